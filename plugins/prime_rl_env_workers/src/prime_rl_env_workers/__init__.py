"""Environment workers: processes that run an environment's episodes for the orchestrator.

    orchestrator                 ``environment``  an ``Environment`` whose episodes run in a pool
      |  socket                  ``pool``         starts, watches and replaces its workers
      +- fork server             ``forked``       imports verifiers once, forks a worker in 50 ms
      |    +- worker             ``server``       verifiers' env server for one environment
      +- Unix sockets            ``client``       requests to a worker, and the end of all of them

The protocol is verifiers' own (``verifiers.v1.serve``), so that an env server on another machine
takes the place of a worker (``prime-rl serve-env``). Its pool is not used: it neither notices nor
replaces a dead worker.
"""

import typer

from prime_rl import hookimpl


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add the command that serves an environment to runs on other machines."""
    from prime_rl_env_workers.command import serve_env

    cli.command("serve-env", rich_help_panel="Serve")(serve_env)
