# mypy: allow-subclassing-any, allow-untyped-decorators
"""The task of reversing one word. The environment of several agents decides the rewards."""

from __future__ import annotations

import verifiers.v1 as vf

from prime_rl_environments.words import position_score


class ReversalData(vf.TaskData):
    """One example: ``prompt`` is the word."""

    answer: str


class ReversalTask(vf.Task[ReversalData]):
    """One reply. Metrics: ``positions`` and ``exact``, by the truth."""

    @classmethod
    def of(cls, word: str, config: vf.TaskConfig | None = None) -> ReversalTask:
        """The task of reversing one word."""
        return cls(ReversalData(prompt=word, answer=word[::-1]), config)

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.metric
    async def positions(self, trace: vf.Trace) -> float:
        return position_score(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)
