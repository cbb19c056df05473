"""Groups stored as bytes, and restored as new equal objects.

All of a rollout is stored except its credit (an algorithm assigns it again), a plugin's changes of
the env's reward (it will repeat them) and the env framework's own trace. Floats, token ids and
logprobs are exact. In ``info`` and the like, numpy values become plain ones, tuples become lists,
and types that msgpack does not have become text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from prime_rl import Group, Rollout, Sample

CREDIT = {"advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs", "streams"}
"""Columns that an algorithm writes."""

NOT_KEPT = {"samples", "trace", "assigned", "credited", "frozen", "place", "given"}

ROLLOUT_FIELDS = tuple(f.name for f in fields(Rollout) if f.init and f.name not in NOT_KEPT)
SAMPLE_FIELDS = tuple(f.name for f in fields(Sample) if f.init and f.name not in CREDIT)


@dataclass
class Kept:
    """One stored group."""

    record: bytes
    policy_version: int
    """The oldest version among its rollouts, from which staleness counts."""
    uses: int = 0
    """How often it was returned."""


def keep(group: Group) -> Kept:
    """Store a copy of a group."""
    record = [_rollout_record(rollout) for rollout in group]
    version = min(rollout.policy_version for rollout in group)
    return Kept(msgspec.msgpack.encode(record, enc_hook=_plain), version)


def restore(kept: Kept) -> list[Rollout]:
    """The group as new rollouts with new samples, whose columns are writable."""
    return [_rollout(record) for record in msgspec.msgpack.decode(kept.record)]


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    record = {name: getattr(rollout, name) for name in ROLLOUT_FIELDS} | (rollout.given or {})
    return record | {"samples": [_sample_record(sample) for sample in rollout.samples]}


def _sample_record(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in SAMPLE_FIELDS}
    return {
        name: [value.dtype.str, value.tobytes(), *value.shape[1:]]
        if isinstance(value, np.ndarray)
        else value
        for name, value in values.items()
    }


def _rollout(record: Mapping[str, Any]) -> Rollout:
    plain = {name: record[name] for name in ROLLOUT_FIELDS}
    return Rollout(**plain, samples=[_sample(sample) for sample in record["samples"]])


def _sample(record: Mapping[str, Any]) -> Sample:
    values: dict[str, Any] = {
        name: np.frombuffer(value[1], value[0]).reshape(-1, *value[2:]).copy()
        if isinstance(value, list)
        else value
        for name, value in record.items()
    }
    return Sample(**values)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
