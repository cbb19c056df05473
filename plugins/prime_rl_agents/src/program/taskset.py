# mypy: allow-subclassing-any, allow-untyped-decorators
"""Rows of a file for programs that score themselves."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import NonNegativeInt, PositiveInt, model_validator

from function.rows import checked_rows, read_rows
from function.taskset import FunctionData


class ProgramTask(vf.Task[FunctionData]):
    """Scores nothing: the program does."""


class ProgramTasksetConfig(vf.TasksetConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "program"``."""

    data: str = ""
    """A file (``.jsonl``, ``.csv``, ``.parquet``), or the name of a data set of the hub."""
    prompt_column: str = "prompt"
    system: str | None = None
    """System prompt of every row that has none in a column ``system_prompt``."""
    split: str | None = None
    """Split of a data set of the hub. None: ``train``."""
    subset: str | None = None
    """Subset of a data set of the hub."""
    first: NonNegativeInt = 0
    """The number of rows to skip, for example to hold the others out."""
    num_examples: PositiveInt | None = None
    """None: all rows."""

    @model_validator(mode="after")
    def _has_data(self) -> ProgramTasksetConfig:
        if self.id and not self.data:
            raise ValueError("data: set a file (.jsonl, .csv, .parquet) or a data set of the hub")
        return self


class ProgramTaskset(vf.Taskset[ProgramTask, ProgramTasksetConfig]):
    """The rows of the data, in their order."""

    def load(self) -> Iterator[ProgramTask]:
        config = self.config
        rows = read_rows(config.data, config.split, config.subset)
        end = None if config.num_examples is None else config.first + config.num_examples
        chosen = rows[config.first : end]
        for row in checked_rows(chosen, config.prompt_column, config.system):
            data = FunctionData.of(row, row[config.prompt_column], config.system)
            yield ProgramTask(data, config.task)
