# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers taskset ``text-reversal``: the prompt is a random word, the answer is the word
reversed.

Single turn, no system prompt, no download. The reward is graded by position, so a policy that gets
some letters right can learn from it. Metrics: ``exact``, ``reply_chars``. Each row also has a
``demonstration``: an expert's reply, for algorithms that learn from one.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from in_process import InProcessHarness
from prime_rl_environments.words import position_score
from prime_rl_environments.wordset import WordsConfig, first


class TextReversalConfig(WordsConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "text-reversal"``."""


class TextReversalData(vf.TaskData):
    """One example: ``prompt`` is the word."""

    answer: str
    demonstration: str
    """The answer, as an expert's reply."""


class TextReversalTask(vf.Task[TextReversalData]):
    """Scores one reply."""

    @classmethod
    def of(cls, word: str, config: vf.TaskConfig | None = None) -> TextReversalTask:
        """The task of reversing one word."""
        data = TextReversalData(prompt=word, answer=word[::-1], demonstration=word[::-1])
        return cls(data, config)

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def positions(self, trace: vf.Trace) -> float:
        return position_score(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def reply_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class TextReversalTaskset(vf.Taskset[TextReversalTask, TextReversalConfig]):
    """Words of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: TextReversalConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[TextReversalTask]:
        task = self.config.task
        return first((TextReversalTask.of(word, task) for word in self.config.words()), self.config)


__all__ = ["InProcessHarness", "TextReversalTaskset"]
