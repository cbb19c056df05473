"""Environment workers: processes that run an environment's episodes for the orchestrator.

    orchestrator                 ``environment``  an ``Environment`` whose episodes run in a pool
      |  pipe                    ``pool``         starts, watches and replaces its workers
      +- fork server             ``forkserver``   imports verifiers once, forks a worker in 50 ms
      |    +- worker             ``server``       verifiers' env server for one environment
      +- Unix sockets            ``client``       requests to a worker, and the end of all of them

The protocol is verifiers' own (``verifiers.v1.serve``), so that an env server on another machine
takes the place of a worker. Its pool is not used: it neither notices nor replaces a dead worker.
"""
