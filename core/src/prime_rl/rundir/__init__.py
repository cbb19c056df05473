"""The run directory as every process sees it: paths, status, atomic writes, index of checkpoints.

The lowest layer: the wire, the trainer and the orchestrator import it, and it imports none of them.
"""
