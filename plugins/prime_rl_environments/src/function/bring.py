"""``prime_rl.function_env``: the table of an env from prompts and reward functions in Python."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from function.rewards import check_columns, check_weights, reward_functions
from function.rows import checked_rows, read_rows, rows_of
from function.travel import packed
from prime_rl import ConfigError

Reward: TypeAlias = Callable[..., Any] | str
FOLDER = ".functions"
"""The folder of rows and functions in ``output_dir``."""


def function_env(
    prompts: Any,
    reward: Reward | Sequence[Reward],
    *,
    weights: Mapping[str, float] | None = None,
    prompt_column: str = "prompt",
    system_prompt: str | None = None,
    split: str | None = None,
    in_process: bool = False,
    output_dir: str | Path = "outputs",
) -> dict[str, Any]:
    """The table of an env ``function``, for ``orchestrator.train.env`` of a config.

    ``prompts``: a list of dicts or texts, a data set, a table or a frame; or a file or a data set
    of the hub by name. ``reward``: a function, an import path, or a list of them. Rows and
    functions are written to ``output_dir``, for the run's processes. Raises ``ConfigError``.
    """
    rewards = [reward] if isinstance(reward, str) or callable(reward) else reward
    wrong = rewards if not isinstance(rewards, list | tuple) else _no_rewards(rewards)
    if wrong is not None:
        raise ConfigError(
            f"reward: got {wrong!r:.80}, expected a function, an import path, or a list of them"
        )
    functions, paths = _apart(rewards)
    folder = Path(output_dir).absolute() / FOLDER
    is_named = isinstance(prompts, str | Path)
    if split is not None and not is_named:
        raise ConfigError(
            f"split: {split!r} is of a data set of the hub, and prompts has the rows themselves. "
            "Leave split out."
        )
    rows = read_rows(str(prompts), split) if is_named else rows_of(prompts)
    checked = checked_rows(rows, prompt_column, system_prompt)
    check_columns(reward_functions(functions), checked)
    check_weights(weights or {})

    text = "".join(json.dumps(row) + "\n" for row in checked)
    args: dict[str, Any] = {
        "data": str(_write(folder, text.encode(), ".jsonl")),
        "weights": dict(weights or {}),
        "prompt_column": prompt_column,
        "in_process": in_process,
    }
    if system_prompt is not None:
        args["system"] = system_prompt
    if paths:
        args["reward"] = paths
    else:
        args["functions"] = str(_write(folder, packed(functions), ".functions"))
    return {"id": "function", "args": args}


def _no_rewards(given: Sequence[Any]) -> Any:
    """The first that is no reward. None: all are."""
    wrong = (each for each in given if not (isinstance(each, str) or callable(each)))
    return next(wrong, None if given else given)


def _apart(given: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """All functions, and the import paths if all of them have one: then nothing has to travel."""
    from function.load import function_at

    functions = [function_at(each) if isinstance(each, str) else each for each in given]
    paths = [each for each in given if isinstance(each, str)]
    return functions, paths if len(paths) == len(given) and given else []


def _write(folder: Path, data: bytes, suffix: str) -> Path:
    """A file that is named after its content, readable by this user only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
    if path.exists() and path.read_bytes() == data:
        return path
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)
    return path
