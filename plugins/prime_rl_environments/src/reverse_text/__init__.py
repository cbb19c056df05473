# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers taskset ``reverse-text``: the prompt is a random word, the answer is the word
backwards.

Single turn, no system prompt, nothing to download. The reward is graded by position, so a policy
that gets some letters right can learn from it; ``exact`` and ``reply_chars`` are logged beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import verifiers.v1 as vf
from pydantic import PositiveInt, model_validator

from in_process import InProcessHarness
from prime_rl_environments.words import Split, position_score, words


class ReverseTextConfig(vf.TasksetConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "reverse-text"``."""

    seed: int = 0
    split: Split = "train"
    """``held_out``: words that no seed's ``train`` split contains, nor the warm-up of
    ``tiny-reverse``."""
    num_examples: PositiveInt | None = 2000
    """None: words without end."""
    min_letters: PositiveInt = 4
    max_letters: PositiveInt = 8

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> ReverseTextConfig:
        if self.min_letters > self.max_letters:
            raise ValueError(
                f"reverse-text: min_letters = {self.min_letters} exceeds "
                f"max_letters = {self.max_letters}"
            )
        return self


class ReverseTextData(vf.TaskData):
    """One example: ``prompt`` is the word."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scores one reply."""

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


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Words of one split, the same for the same seed."""

    def __init__(self, config: ReverseTextConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        stream = words(config.seed, config.split, config.min_letters, config.max_letters)
        for word in islice(stream, config.num_examples):
            data = ReverseTextData(prompt=word, answer=word[::-1])
            yield ReverseTextTask(data, config.task)


__all__ = ["InProcessHarness", "ReverseTextTaskset"]
