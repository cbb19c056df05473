"""The args of an env, checked before a run starts. Imports no verifiers.

Core calls ``check_args(args)`` of a taskset's package that has a module of this name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from function.load import as_paths, load_functions
from function.rewards import check_columns, check_weights
from function.rows import Row, checked_rows, chosen_rows
from prime_rl import ConfigError


class FunctionArgs(BaseModel):
    """``args`` of ``[[orchestrator.train.env]] id = "function"``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    """A file (``.jsonl``, ``.csv``, ``.parquet``), or the name of a data set of the hub."""
    reward: str | list[str] | None = None
    """Import paths of reward functions: ``my_rewards.exact``."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each term; 1.0 for a term without one."""
    prompt_column: str = "prompt"
    system: str | None = None
    """System prompt of every row that has none in a column ``system_prompt``."""
    split: str | None = None
    """The split of a data set of the hub. None: ``train``."""
    subset: str | None = None
    """The subset of a data set of the hub."""
    first: int = Field(0, ge=0)
    """The number of rows to skip, for example to hold the others out."""
    num_examples: PositiveInt | None = None
    """None: all rows."""
    in_process: bool = False
    """The functions are quick and trusted: run them in the orchestrator, without workers."""
    functions: str | None = None
    """File that ``prime_rl.train`` has written; replaces ``reward``."""


def rows_for(args: Any) -> list[Row]:
    """The checked rows of an env. ``args``: an object with the fields of ``FunctionArgs``. Raises
    ``ConfigError``."""
    checked = checked_rows(chosen_rows(args), args.prompt_column, args.system)
    functions = load_functions(as_paths(args.reward), args.functions)
    check_columns(functions, checked)
    return checked


def check_args(args: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for rows and rewards that do not fit. Wrong keys and types are left to
    verifiers' own check, which knows further keys."""
    system = args.get("system_prompt")
    if system is not None and not Path(str(system)).is_file():
        raise ConfigError(
            f"system_prompt: there is no file {str(system)!r}. It names a file with the text; the "
            "text itself is the key 'system'."
        )
    known = {name: value for name, value in args.items() if name in FunctionArgs.model_fields}
    try:
        table = FunctionArgs(**known)
    except ValidationError:
        return
    check_weights(table.weights)
    rows_for(table)
