# mypy: allow-subclassing-any, allow-untyped-decorators
"""A small taskset: write a word backwards. Its id is ``words_env``."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]

WORDS = ("ab", "cd", "ef")


class Word(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.prompt[::-1])


class WordsTaskset(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self) -> Any:
        for word in WORDS:
            yield Word(vf.TaskData(prompt=word), self.config.task)
