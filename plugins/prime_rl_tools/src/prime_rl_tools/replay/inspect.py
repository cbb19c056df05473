"""Describe a run or a file of it: a frame of micro batches, rollouts, or a folder of weights."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from prime_rl.errors import RunError, WireError
from prime_rl.rundir.checkpoints import whole_steps
from prime_rl.rundir.rows import parse_row, read_table
from prime_rl.streams import stream_names
from prime_rl.wire import MicroBatch, decode_batch
from prime_rl.wire.micro_batch import MAGIC
from prime_rl.wire.sealing import unsealed
from prime_rl_app.files import reading
from prime_rl_app.run_states import run_info
from prime_rl_app.saved_rollouts import StoredRollout, read_step
from prime_rl_tools.replay.compare import credit
from prime_rl_tools.terminal import Console

Facts = dict[str, Any]
"""``kind``, single values, and lists of like tables by name."""

LONGEST = 40
"""Most printed lines of a table."""

PRINTED = {
    "rows": ("tokens", "sequences", "masked in", "envs", "streams", "mean logprob"),
    "rollouts": (
        "env",
        "group",
        "agent",
        "reward",
        "credit",
        "turns",
        "tokens",
        "dropped by",
        "why",
    ),
}
"""Columns printed of a wide table."""


def facts_of(path: Path) -> Facts:
    """Values for JSON. Raises ``RunError`` for any other file."""
    if path.is_dir():
        return _folder(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}. Give a file of a run.") from error

    with reading(path):
        return _frame(path) if start == MAGIC else _rollouts(path)


def print_facts(facts: Facts) -> None:
    """Print single values line by line, then every list as a table."""
    console = Console()
    for name, value in facts.items():
        if not _is_table(value):
            console.print(f"{name:<12} {_text(value)}", markup=False, highlight=False)
    for name, rows in facts.items():
        if _is_table(rows):
            _print_table(console, name, rows)


def _print_table(console: Console, name: str, rows: list[Facts]) -> None:
    columns = PRINTED.get(name, tuple(rows[0]))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows[:LONGEST]:
        table.add_row(*(Text(_text(row[column])) for column in columns))
    console.print()
    console.print(name, style="bold")
    console.print(table)
    if len(rows) > LONGEST:
        console.print(f"{len(rows) - LONGEST} more; --json prints all", style="dim")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)


# -- micro batches ---------------------------------------------------------------------------


def _frame(path: Path) -> Facts:
    data = path.read_bytes()
    with suppress(WireError):  # a frame that was saved elsewhere has no checksum
        data = bytes(unsealed(data))
    step, rows = decode_batch(data)
    num_tokens = sum(map(len, rows))
    return {
        "kind": "micro batches",
        "step": step,
        "bytes": len(data),
        "bytes per token": len(data) / max(num_tokens, 1),
        "tokens": num_tokens,
        "envs": sorted({env for row in rows for env in row.envs}),
        "rows": [_row(row) for row in rows],
    }


def _row(row: MicroBatch) -> Facts:
    sampled = row.loss_mask
    return {
        "tokens": len(row),
        "sequences": row.num_sequences,
        "longest": int(row.sequence_lengths.max(initial=0)),
        "masked in": int(sampled.sum()),
        "envs": dict(Counter(row.envs[i] for i in row.env_ids.tolist())),
        "temperatures": sorted({round(float(t), 4) for t in row.temperatures}),
        "streams": stream_names(row),
        "mean logprob": _mean(row.inference_logprobs[sampled]),
        "mean advantage": None if row.advantages is None else _mean(row.advantages[sampled]),
    }


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


# -- rollouts --------------------------------------------------------------------------------


def _rollouts(path: Path) -> Facts:
    stored = read_step(path)
    rollouts = [each.rollout for each in stored.rollouts]
    return {
        "kind": "rollouts",
        "step": stored.step,
        "bytes": path.stat().st_size,
        "kept": len(stored.kept),
        "dropped": dict(Counter(r.dropped_by for r in stored.rollouts if r.dropped_by)),
        "waiting": len(stored.waiting),
        "tokens": sum(rollout.num_tokens for rollout in rollouts),
        "mean reward": _mean([rollout.reward for rollout in rollouts]),
        "frames": [{"bytes": f.num_bytes, "sha256": f.sha256} for f in stored.frames],
        "rollouts": [_rollout(each) for each in stored.rollouts],
    }


def _rollout(stored: StoredRollout) -> Facts:
    rollout = stored.rollout
    streams = [*dict.fromkeys(n for s in rollout.samples for n in stream_names(s))]
    return {
        "env": rollout.env,
        "group": rollout.group_id,
        "example": rollout.example_id,
        "agent": rollout.agent,
        "reward": rollout.reward,
        "credit": _mean(credit(rollout)),
        "turns": rollout.num_turns,
        "samples": len(rollout.samples),
        "tokens": rollout.num_tokens,
        "trainable": rollout.num_trainable_tokens,
        "version": rollout.policy_version,
        "streams": streams,
        "dropped by": stored.dropped_by,
        "why": stored.why_dropped or None,
    }


# -- folders ---------------------------------------------------------------------------------


def _run(path: Path) -> Facts:
    """What a run has on disk, folder by folder: versions of one model are not added up."""
    info = run_info(path)
    weights = _folder(path / "weights") if (path / "weights").is_dir() else {}
    sizes = {
        folder.name: sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        for folder in sorted(path.iterdir())
        if folder.is_dir()
    }
    return {
        "kind": "run",
        "state": info.state,
        "step": info.step,
        "complete": weights.get("complete", False),
        "parameters": weights.get("parameters"),
        "checkpoints": whole_steps(path),
        "folders": [{"name": name, "bytes": size} for name, size in sizes.items()],
    }


def _folder(path: Path) -> Facts:
    if (path / "configs" / "run.json").is_file():
        return _run(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    if not files:
        raise RunError(f"{path}: the folder is empty.")
    weights = [file for file in files if file.suffix == ".safetensors"]
    tensors = [tensor for file in weights for tensor in _tensors(file)]
    facts: Facts = {
        "kind": "folder",
        "complete": _is_complete(path, files, weights),
        "bytes": sum(each.stat().st_size for each in files),
        "parameters": sum(tensor["parameters"] for tensor in tensors),
        "files": [
            {"name": f.relative_to(path).as_posix(), "bytes": f.stat().st_size} for f in files
        ],
    }
    config = path / "config.json"
    if config.exists():
        with reading(config):
            facts["model"] = read_table(config).get("model_type")

    return facts | {"tensors": tensors}


def _is_complete(path: Path, files: list[Path], weights: list[Path]) -> bool:
    """A version or checkpoint (``step_N``) has a marker. Another model has none: it is complete if
    every file that its index names is there, and every file has all of its bytes."""
    if any(each.name in ("STABLE", ".ready") for each in files):
        return True
    if path.name.startswith((".", "step_")) or not (path / "config.json").is_file():
        return False
    index = path / "model.safetensors.index.json"
    named: set[str] = set()
    if index.is_file():
        table: _Index = read_table(index, _Index)
        named = {*table.weight_map.values()}
    present = {each.relative_to(path).as_posix() for each in weights}
    return bool(weights) and present.issuperset(named) and all(map(_is_whole, weights))


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file has the bytes that its header announces."""
    size, tensors = _header(file)
    ends = [tensor.data_offsets[1] for tensor in tensors.values()]
    return file.stat().st_size == _LENGTH.size + size + max(ends, default=0)


_LENGTH = struct.Struct("<Q")


def _tensors(file: Path) -> list[Facts]:
    _, tensors = _header(file)
    return [
        {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "name": name,
            "parameters": math.prod(tensor.shape),
        }
        for name, tensor in tensors.items()
    ]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _header(file: Path) -> tuple[int, dict[str, _Tensor]]:
    """Size of the header of a safetensors file, and its tensors, which are not read."""
    try:
        with file.open("rb") as stream:
            (size,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            text = stream.read(min(size, file.stat().st_size))
        header = parse_row(text, dict[str, Any])
        header.pop("__metadata__", None)
        return size, msgspec.convert(header, dict[str, _Tensor])
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise RunError(f"{file}: not a whole safetensors file: {error}") from error
