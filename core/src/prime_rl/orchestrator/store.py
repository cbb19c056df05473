"""Rollouts on disk: ``<run>/rollouts/step_N.msgpack``, exact floats, no pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prime_rl.rollout import COLUMNS, Rollout, Sample


def write_rollouts(
    path: Path, step: int, rollouts: Sequence[Rollout], dropped: Mapping[int, str]
) -> None:
    """Save one step's rollouts, kept and dropped; ``dropped`` says why by ``id()``. Written whole
    or not at all."""
    record = {
        "step": step,
        "rollouts": [_rollout_record(rollout, dropped.get(id(rollout))) for rollout in rollouts],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.msgpack.encode(record, enc_hook=_plain))
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """What msgpack has no type for: numpy's values as plain ones, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def read_rollouts(path: Path) -> tuple[int, list[Rollout], list[str | None]]:
    """The step, its rollouts, and why each was dropped (None: it trained)."""
    record = msgspec.msgpack.decode(path.read_bytes())
    rows = record["rollouts"]
    return record["step"], [_rollout(row) for row in rows], [row["dropped_by"] for row in rows]


_PLAIN = (
    "env",
    "example_id",
    "group_id",
    "reward",
    "rewards",
    "metrics",
    "info",
    "num_turns",
    "is_truncated",
    "stop_condition",
    "policy_version",
    "episode_id",
    "agent",
    "task",
    "source",
    "has_logprobs",
)


def _rollout_record(rollout: Rollout, dropped_by: str | None) -> dict[str, Any]:
    record = {name: getattr(rollout, name) for name in _PLAIN}
    record["samples"] = [_sample_record(sample) for sample in rollout.samples]
    return record | {"dropped_by": dropped_by}


def _sample_record(sample: Sample) -> dict[str, Any]:
    columns = {
        name: [column.dtype.str, column.tobytes()]
        for name in COLUMNS
        if (column := getattr(sample, name)) is not None
    }
    return {"temperature": sample.temperature, "columns": columns}


def _rollout(row: Mapping[str, Any]) -> Rollout:
    samples = [
        Sample(
            temperature=sample["temperature"],
            **{
                name: np.frombuffer(data, dtype)
                for name, (dtype, data) in sample["columns"].items()
            },
        )
        for sample in row["samples"]
    ]
    return Rollout(**{name: row[name] for name in _PLAIN}, samples=samples)
