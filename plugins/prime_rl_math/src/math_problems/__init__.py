# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers taskset ``math-problems``: questions and answers from a file, checked by
math-verify.

    [[orchestrator.train.env]]
    id = "math-problems"
    args = { path = "gsm8k/train.jsonl" }                         # or, with a network:
    args = { dataset = "openai/gsm8k", files = "main/train-*.parquet" }

The reward is 1 if the reply's answer equals the row's, else 0. Metric: ``boxed`` (the reply has a
``\\boxed`` answer).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import PositiveInt, model_validator

from math_problems.check import BOXED, Where, is_answer, is_right
from math_problems.files import hub_files, local_files, rows_of
from prime_rl import ConfigError

INSTRUCTIONS = "Think step by step, and put the final answer into \\boxed{}."


class MathProblemsTaskConfig(vf.TaskConfig):
    """How a reply is read."""

    where: Where = "boxed"
    """``boxed``: the answer is what the reply's last ``\\boxed`` has. ``reply``: what
    math-verify finds in the reply."""


class MathProblemsConfig(vf.TasksetConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "math-problems"``."""

    path: Path | None = None
    """A ``.jsonl`` or ``.parquet`` file, or a folder of them."""
    dataset: str | None = None
    """A dataset of the hub, instead of ``path``."""
    files: str = "**/*.parquet"
    """The files of ``dataset``, as a pattern."""
    question: str = "question"
    """Column of the question."""
    answer: str = "answer"
    """Column of the answer: a number, an expression, a text with ``\\boxed{...}``, or GSM8K's
    solution with the answer after ``####``."""
    instructions: str = INSTRUCTIONS
    """The system prompt; empty: none."""
    first: int = 0
    """The number of rows to skip, for example to hold the others out."""
    num_examples: PositiveInt | None = None
    """None: all rows."""
    task: MathProblemsTaskConfig = MathProblemsTaskConfig()

    @model_validator(mode="after")
    def _one_source(self) -> MathProblemsConfig:
        if self.id and (self.path is None) == (self.dataset is None):
            raise ValueError("set either path (a file here) or dataset (of the hub)")
        return self


class MathProblemsData(vf.TaskData):
    """One example: ``prompt`` is the question."""

    answer: str


class MathProblemsTask(vf.Task[MathProblemsData, vf.State, MathProblemsTaskConfig]):
    """Scores one reply."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(is_right(trace.last_reply, self.data.answer, self.config.where))

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        return float(BOXED in trace.last_reply)


class MathProblemsTaskset(vf.Taskset[MathProblemsTask, MathProblemsConfig]):
    """The rows of the files, in their order."""

    def load(self) -> Iterator[MathProblemsTask]:
        config = self.config
        if config.path is not None:
            files = local_files(config.path)
        else:
            files = hub_files(str(config.dataset), config.files)
        rows = (self.task_of(place, row) for file in files for place, row in rows_of(file))
        end = None if config.num_examples is None else config.first + config.num_examples
        return itertools.islice(rows, config.first, end)

    def task_of(self, place: str, row: dict[str, Any]) -> MathProblemsTask:
        """One task of the row at ``place``. Raises ``ConfigError`` if the row lacks a column, or
        has a cell of another type, or an answer that no reply equals."""
        config = self.config
        for column in (config.question, config.answer):
            if column not in row:
                raise ConfigError(
                    f"{place}: no column {column!r}; its columns are: {', '.join(row)}. "
                    "Set args.question and args.answer."
                )

        question = row[config.question]
        cell = row[config.answer]
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(
                f"{place}: column {config.question!r}: expected a text, the question; found "
                f"{_shown(question)}. Set args.question."
            )

        is_number = isinstance(cell, int | float | Decimal) and not isinstance(cell, bool)
        if isinstance(cell, str):
            answer = cell
        elif is_number and (isinstance(cell, int) or math.isfinite(cell)):
            answer = _written(cell)
        else:
            raise ConfigError(
                f"{place}: column {config.answer!r}: expected a text or a number, the answer; "
                f"found {_shown(cell)}. Set args.answer."
            )

        if not is_answer(answer):
            raise ConfigError(
                f"{place}: column {config.answer!r}: math-verify reads no answer in "
                f"{_shown(cell)} that a reply with the same text would equal, so no reply could be "
                "right. Expected a number, a formula, a text with \\boxed{...}, or a solution "
                "with the answer after ####."
            )

        data = MathProblemsData(
            prompt=question,
            system_prompt=config.instructions or None,
            answer=answer,
        )
        return MathProblemsTask(data, config.task)


def _written(number: float | Decimal) -> str:
    """A number in digits: math-verify does not read ``1e+20`` as a reply writes it."""
    return str(number) if isinstance(number, int) else format(Decimal(str(number)), "f")


def _shown(cell: object) -> str:
    """A cell's type and text, truncated to a line."""
    text = repr(cell)
    return f"{type(cell).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


__all__ = ["MathProblemsTaskset"]
