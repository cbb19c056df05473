# mypy: allow-subclassing-any
"""The verifiers taskset ``gateway-sessions``: for a gateway whose agents bring their own tasks.

It has no tasks: an env of a run needs a taskset, and this one says that there is nothing to give.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class GatewaySessionsTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """Blank tasks without end."""

    INFINITE = True

    def load(self) -> Iterator[vf.Task]:
        while True:
            yield vf.Task(vf.TaskData(prompt=None))


__all__ = ["GatewaySessionsTaskset"]
