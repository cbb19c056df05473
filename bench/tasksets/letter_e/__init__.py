"""The bench's task: random prompts, a fixed number of new tokens, reward by the letter e."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

from in_process import InProcessHarness

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class LetterEConfig(vf.TasksetConfig):
    """``args``"""

    prompt_letters: int = 58
    """With six tokens of the chat template: 64."""


class LetterETask(vf.Task[vf.TaskData]):
    """Scores one reply."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def share_of_e(self, trace: vf.Trace) -> float:
        return trace.last_reply.count("e") / max(1, len(trace.last_reply))


class LetterETaskset(vf.Taskset[LetterETask, LetterEConfig]):
    """Random text."""

    RUNS_IN_PROCESS = True

    def load(self) -> Iterator[LetterETask]:
        rng = random.Random(0)
        for _ in range(2048):
            prompt = "".join(rng.choices(LETTERS, k=self.config.prompt_letters))
            yield LetterETask(vf.TaskData(prompt=prompt), self.config.task)


__all__ = ["InProcessHarness", "LetterETaskset"]
