"""Rollouts on disk: msgpack with exact floats, no pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec
import numpy as np

from prime_rl.errors import RunError
from prime_rl.rollout import Rollout, sample_of

FIELDS = tuple(
    field.name for field in fields(Rollout) if field.init and field.name not in ("samples", "trace")
)
"""What is saved of a rollout beside its samples."""
TYPES = get_type_hints(Rollout)


@dataclass(frozen=True, eq=False)
class StoredRollout:
    """One rollout of a file."""

    rollout: Rollout
    dropped_by: str | None
    """None: it trained, or is still waiting."""
    objections: Mapping[str, str] = field(default_factory=dict)
    """What each filter said that dropped it (``Batch.objections``). Older files have none."""

    @property
    def why_dropped(self) -> str:
        """``zero_advantage: its advantages are all zero``; several objections stand after ``;``."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.objections.items())


def encode_rollouts(
    step: int,
    rollouts: Iterable[tuple[Rollout, str | None]],
    waiting: Iterable[Rollout] = (),
    frames: Iterable[tuple[int, str]] = (),
    objections: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
) -> bytes:
    """The content of a file: rollouts with how they were dropped, siblings that no batch has taken
    yet, size and sha256 of each frame. ``objections``: why, by ``id()`` of the rollout."""
    record = {
        "step": step,
        "rollouts": [
            _record(rollout, dropped_by, objections.get(id(rollout), {}))
            for rollout, dropped_by in rollouts
        ],
        "waiting": [_record(rollout, None, {}) for rollout in waiting],
        "frames": list(frames),
    }
    return msgspec.msgpack.encode(record, enc_hook=_plain)


def decode_rollouts(path: Path) -> dict[str, Any]:
    """The arguments of ``encode_rollouts`` by name, with each rollout as a ``StoredRollout``.
    Raises ``RunError`` if the file is truncated or of another kind."""
    try:
        record: dict[str, Any] = {"waiting": [], "frames": []}  # older files lack them
        record |= msgspec.msgpack.decode(path.read_bytes())
        record["step"] = msgspec.convert(record["step"], int)
        for name in ("rollouts", "waiting"):
            record[name] = [_stored(row) for row in record[name]]
        return record
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{path}: not a file of rollouts: {error}. Expected what a run writes as "
            "rollouts/step_N.msgpack."
        ) from error


def _plain(value: Any) -> Any:
    """A value without a msgpack type: numpy's as plain ones, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _record(
    rollout: Rollout, dropped_by: str | None, objections: Mapping[str, str]
) -> dict[str, Any]:
    samples = [
        {
            "temperature": sample.temperature,
            "columns": {
                name: [column.dtype.str, column.tobytes(), *column.shape[1:]]
                for name, column in sample.columns.items()
            },
        }
        for sample in rollout.samples
    ]

    plain = {name: getattr(rollout, name) for name in FIELDS}
    record = plain | {"samples": samples, "dropped_by": dropped_by}
    if objections:
        record["objections"] = dict(objections)
    return record


def _stored(row: Mapping[str, Any]) -> StoredRollout:
    samples = []
    for sample in row["samples"]:
        # The columns are views of the file's bytes, so they are read-only.
        columns = {
            name: np.frombuffer(data, dtype).reshape(-1, *more)
            for name, (dtype, data, *more) in sample["columns"].items()
        }
        samples.append(sample_of(columns, sample["temperature"]))

    plain = {  # older files have fewer
        name: msgspec.convert(row[name], TYPES[name]) for name in FIELDS if name in row
    }
    rollout = Rollout(**{"frozen": True} | plain, samples=samples)

    return StoredRollout(
        rollout,
        dropped_by=msgspec.convert(row["dropped_by"], str | None),
        objections=msgspec.convert(row.get("objections", {}), dict[str, str]),
    )
