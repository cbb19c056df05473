"""Per-token streams by name, and the rule for which tokens train in which component of the loss.

A sample, and a packed row of samples, carry streams: what an algorithm writes and a loss reads.
``<component>_weights`` routes tokens to a component; any other stream is data. The five streams of
``STREAMS`` are attributes; all others stand in ``streams``.

Shapes: T = tokens, C = trainable tokens of one rollout, N = all tokens of one rollout, k = a stream
with several values per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl.errors import StreamError

FloatColumn: TypeAlias = npt.NDArray[np.float32]
BoolColumn: TypeAlias = npt.NDArray[np.bool_]
IntColumn: TypeAlias = npt.NDArray[np.int32]
StreamColumn: TypeAlias = npt.NDArray[Any]
"""float32 or int32, [T] or [T, k]."""
Values: TypeAlias = Sequence[float] | npt.NDArray[Any]

OBSERVATION_WEIGHTS = "ce_weights"
"""The stream that the hook ``observation_weights`` assigns."""
STREAMS = ("advantages", "rl_weights", OBSERVATION_WEIGHTS, "ref_kl_weights", "ref_logprobs")
"""The streams that are attributes."""
WEIGHTS = "_weights"
LossComponent: TypeAlias = str
"""``rl``, which is the run's default loss, or the name of an installed loss."""
COMPUTED = frozenset(
    {"entropies", "top_logprobs", "old_logprobs", "initial_logprobs", "ema_logprobs"}
    | {"policy_lag", "temperatures", "sequence_ids", "rollout_ids", "group_ids"}
)
"""Columns that a loss may read and core computes: no algorithm assigns them."""
TOP_IDS = "top_ids"
"""The int32 stream [T, k] of the tokens whose log π is the computed column ``top_logprobs``."""
RESERVED = COMPUTED | {
    *("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs", "roles", "is_content"),
    *("policy_versions", "is_repeat", "node_ids", "env_ids", "sequence_lengths", "loss_weights"),
}
"""Names that no stream may have."""


def can_be_stream(name: str) -> bool:
    """Whether a stream of data may have this name."""
    return name not in RESERVED and not name.endswith(WEIGHTS) and name.isidentifier()


class Columns(Protocol):
    """A sample, or a packed row of them: columns of one length T."""

    @property
    def loss_mask(self) -> BoolColumn: ...

    @property
    def streams(self) -> Mapping[str, StreamColumn]: ...

    @property
    def first_tokens(self) -> npt.NDArray[np.int64]: ...

    def __len__(self) -> int: ...


def stream(columns: Columns, name: str) -> StreamColumn | None:
    """The stream of this name, [T] or [T, k]; None: not assigned."""
    if name in STREAMS:
        found: StreamColumn | None = getattr(columns, name)
        return found
    return columns.streams.get(name)


def stream_names(columns: Columns) -> list[str]:
    """The streams that are there."""
    return [name for name in STREAMS if getattr(columns, name) is not None] + [*columns.streams]


def components(columns: Columns) -> list[LossComponent]:
    """The components that may have members: rl, and those with a weight stream."""
    weights = (name for name in stream_names(columns) if name.endswith(WEIGHTS))
    return ["rl", *(n for w in weights if (n := w.removesuffix(WEIGHTS)) != "rl")]


def members(columns: Columns, component: LossComponent) -> BoolColumn:
    """[T] the tokens that train in a component: those with a weight other than zero. Without a
    weight stream, rl trains every sampled token and the others none. The first token of a sequence
    is no member: nothing predicts it.

    Scoring, packing and the trainer's counts all use this rule.
    """
    weights = stream(columns, f"{component}{WEIGHTS}")
    if weights is not None:
        mask = np.asarray(weights != 0)
    else:
        mask = np.full(len(columns), component == "rl")

    if component == "rl":
        mask &= columns.loss_mask
    mask[columns.first_tokens] = False
    return mask


def trains(columns: Columns, *, beside: LossComponent | None = None) -> bool:
    """Whether any token trains in a component other than ``beside``."""
    return any(members(columns, name).any() for name in components(columns) if name != beside)


def as_stream(values: float | Values) -> StreamColumn:
    """``values`` as int32 if they are integers that fit, else as float32. Raises ``ValueError`` for
    a value that is not finite, or that float32 cannot hold."""
    found = np.asarray(values)
    if found.dtype.kind in "iub" and np.abs(found, dtype=np.float64).max(initial=0) < 2**31:
        return found.astype(np.int32)
    with np.errstate(over="ignore"):
        found = found.astype(np.float32)
    if not np.isfinite(found).all():
        bad = found[~np.isfinite(found)].flat[0]
        raise ValueError(f"got {bad}, expected finite numbers")

    return found


def split_stream(
    values: StreamColumn, masks: Sequence[BoolColumn], max_dims: int = 2
) -> list[StreamColumn]:
    """One column per sample from one value (for all trainable tokens), one per trainable token [C]
    or one per token [N]; each may be a row of k. ``masks``: the samples' loss masks. Raises
    ``ValueError`` for another shape."""
    mask = np.concatenate([*masks, np.zeros(0, np.bool_)])
    trainable = int(mask.sum())
    total = len(mask)
    fits = values.ndim <= max_dims and 0 not in values.shape[1:]
    if values.ndim and not (fits and len(values) in (trainable, total)):
        raise ValueError(
            f"got shape {values.shape}, expected one value per trainable token ({trainable},) or "
            f"one per token ({total},)"
        )

    if not values.ndim or len(values) == trainable != total:
        compact, values = values, np.zeros((total, *values.shape[1:]), values.dtype)
        values[mask] = compact

    bounds = np.cumsum([len(each) for each in masks])
    return [part.copy() for part in np.split(values, bounds[:-1])][: len(masks)]


def concatenate(parts: Iterable[tuple[int, StreamColumn | None]], name: str) -> StreamColumn | None:
    """The stream ``name`` of several samples end to end, given each one's length and column; None
    if none has it.

    Where a sample lacks it, its tokens get what absence means: rl weighs 1.0, other components and
    credit 0.0. Any other stream is NaN there, or the lowest integer, which no algorithm can assign:
    a loss sees its default.
    """
    pairs = list(parts)
    first = next((column for _, column in pairs if column is not None), None)
    if first is None:
        return None
    found = {column.dtype for _, column in pairs if column is not None}
    dtype = found.pop() if len(found) == 1 else np.dtype(np.float32)
    missing = absent_value(name, dtype)
    shape = first.shape[1:]
    columns = [np.full((n, *shape), missing, dtype) if c is None else c for n, c in pairs]
    if any(column.shape[1:] != shape for column in columns):
        shapes = sorted({column.shape[1:] for column in columns})
        raise StreamError(
            f"stream {name!r} has rows of different sizes in one batch: {shapes}. Every algorithm "
            "of a run has to write it with the same number of values per token."
        )

    return np.concatenate(columns).astype(dtype, copy=False)


def absent_value(name: str, dtype: Any = np.float32) -> float:
    """What stands in a packed stream for a token that lacks it."""
    if name == "advantages" or name.endswith(WEIGHTS):
        return float(name == f"rl{WEIGHTS}")
    return np.iinfo(np.int32).min if dtype == np.int32 else np.nan


def is_absent(column: StreamColumn) -> BoolColumn:
    """Where a packed stream (``concatenate``) has no value; its first value per token tells."""
    first = column if column.ndim == 1 else column[:, 0]
    return np.isnan(first) if first.dtype.kind == "f" else first == np.iinfo(np.int32).min
