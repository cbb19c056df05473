"""The bench's slow task: scoring blocks the process that it runs in, for ``milliseconds``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import verifiers.v1 as vf

from in_process import InProcessHarness


class BusyTaskConfig(vf.TaskConfig):
    milliseconds: float = 0.0


class BusyTask(vf.Task[vf.TaskData, vf.State, BusyTaskConfig]):
    """Scores one reply, slowly."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def share_of_e(self, trace: vf.Trace) -> float:
        time.sleep(self.config.milliseconds / 1e3)
        return trace.last_reply.count("e") / max(1, len(trace.last_reply))


class BusyConfig(vf.TasksetConfig):
    task: BusyTaskConfig = BusyTaskConfig()
    num_examples: int = 2048


class BusyTaskset(vf.Taskset[BusyTask, BusyConfig]):
    """Numbered prompts."""

    def load(self) -> Iterator[BusyTask]:
        for number in range(self.config.num_examples):
            yield BusyTask(vf.TaskData(prompt=f"task {number}"), self.config.task)


__all__ = ["BusyTaskset", "InProcessHarness"]
