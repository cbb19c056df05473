"""Per-token streams by name, and the rule for which tokens train in which component of the loss.

A sample, and a packed row of samples, carry streams: what an algorithm writes and a loss reads.
``<component>_weights`` routes tokens to a component; any other stream is data. The five streams of
``STREAMS`` are attributes; all others stand in ``streams``.

Shapes: T = tokens, C = trainable tokens of one rollout, N = all tokens of one rollout, k = a stream
with several values per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl.errors import StreamError

FloatColumn: TypeAlias = npt.NDArray[np.float32]
BoolColumn: TypeAlias = npt.NDArray[np.bool_]
IntColumn: TypeAlias = npt.NDArray[np.int32]
StreamColumn: TypeAlias = npt.NDArray[Any]
"""float32 or int32, [T] or [T, k]; ``ROUTES``: uint8 or uint16, [T, layers, k]."""
Values: TypeAlias = Sequence[float] | npt.NDArray[Any]

OBSERVATION_WEIGHTS = "ce_weights"
"""The stream that the hook ``observation_weights`` assigns."""
STREAMS = ("advantages", "rl_weights", OBSERVATION_WEIGHTS, "ref_kl_weights", "ref_logprobs")
"""The streams that are attributes."""
WEIGHTS = "_weights"
LossComponent: TypeAlias = str
"""``rl``, which is the run's default loss, or the name of an installed loss."""
COMPUTED = frozenset(
    {
        "entropies",
        "top_logprobs",
        "old_logprobs",
        "initial_logprobs",
        "ema_logprobs",
        "policy_lag",
        "temperatures",
        "sequence_ids",
        "rollout_ids",
        "group_ids",
    }
)
"""Columns that a loss may read and core computes: no algorithm assigns them."""
TOP_IDS = "top_ids"
"""The int32 stream [T, k] of the tokens whose log π is the computed column ``top_logprobs``."""
ROUTES = "routed_experts"
"""The stream [T, layers, k] of the experts by which the sampler computed each token. Engines record
it, and no algorithm assigns it."""
RESERVED = COMPUTED | {
    "token_ids",
    "loss_mask",
    "inference_logprobs",
    "trainer_logprobs",
    "roles",
    "is_content",
    "policy_versions",
    "is_repeat",
    "node_ids",
    "env_ids",
    "sequence_lengths",
    "loss_weights",
    ROUTES,
}
"""Names that streams must not have."""


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
        column: StreamColumn | None = getattr(columns, name)
        return column
    return columns.streams.get(name)


def stream_names(columns: Columns) -> list[str]:
    """The streams that are there."""
    return [name for name in STREAMS if getattr(columns, name) is not None] + [*columns.streams]


def components(columns: Columns) -> list[LossComponent]:
    """The components that may have members: rl, and those with a weight stream."""
    weights = [name for name in stream_names(columns) if name.endswith(WEIGHTS)]
    named = [name.removesuffix(WEIGHTS) for name in weights]
    return ["rl", *(name for name in named if name != "rl")]


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
        # rl trains only tokens that the policy sampled, even if others have weights.
        mask &= columns.loss_mask
    mask[columns.first_tokens] = False
    return mask


def trains(columns: Columns, *, beside: LossComponent | None = None) -> bool:
    """Whether any token trains in a component other than ``beside``."""
    return any(members(columns, name).any() for name in components(columns) if name != beside)


def as_stream(values: float | Values) -> StreamColumn:
    """``values`` as int32 if they are integers or bool, else as float32. Nothing is cast that would
    become another number. Raises ``ValueError`` for what is no real number, for an integer that
    int32 cannot hold, and for a value that is not finite or that float32 cannot hold."""
    column = _real_numbers(values)
    if column.dtype.kind in "iub":
        return column.astype(np.int32)

    # A number beyond float32 becomes inf, which is refused below.
    with np.errstate(over="ignore"):
        column = column.astype(np.float32)
    finite = np.isfinite(column)
    if not finite.all():
        raise ValueError(f"got {column[~finite].flat[0]}, expected finite numbers")

    return column


def as_credit(values: float | Values) -> FloatColumn:
    """``values`` as float32, for a stream of ``STREAMS``. Raises ``ValueError`` as ``as_stream``,
    and for an integer that float32 cannot hold exactly."""
    column = as_stream(values)
    exact = column.astype(np.float32)
    # The comparison is in float64, which holds int32 and float32 exactly.
    rounded = exact.astype(np.float64) != column.astype(np.float64)
    if column.dtype.kind == "i" and rounded.any():
        raise ValueError(
            f"got the integer {column[rounded].flat[0]}, which float32 cannot hold exactly "
            f"(it holds every integer up to {2**24}). Scale it down"
        )

    return exact


_NAMES = {"c": "complex numbers", "U": "text", "S": "bytes", "M": "dates", "m": "durations"}


def _real_numbers(values: float | Values) -> npt.NDArray[Any]:
    """``values`` as an array of real numbers. Raises ``ValueError`` for anything else, which a cast
    would turn into numbers in silence."""
    column = np.asarray(values)
    kind = column.dtype.kind
    # numpy makes floats of a list of integers of which one is beyond int64.
    if kind == "f" and not isinstance(values, np.ndarray) and (np.abs(column) >= 2**31).any():
        exact = np.asarray(values, object)
        whole = [int(each) for each in exact.flat if isinstance(each, Integral)]
        _check_int32(max(whole, key=abs, default=0))

    if kind == "O":  # fractions, or integers beyond int64
        strange = [each for each in column.flat if not isinstance(each, Real)]
        if strange:
            raise ValueError(f"got {strange[0]!r}, expected real numbers")

        whole = [int(each) for each in column.flat if isinstance(each, Integral)]
        _check_int32(max(whole, key=abs, default=0))
        return column.astype(np.float64)

    if kind not in "iufb":
        got = _NAMES.get(kind, str(column.dtype))
        raise ValueError(f"got {got}, such as {column.flat[0]!r}, expected real numbers")

    if kind in "iu" and column.size:
        _check_int32(max(int(column.max()), int(column.min()), key=abs))
    return column


def _check_int32(number: int) -> None:
    # The lowest integer stands for a token without a value (``absent_value``).
    if abs(number) >= 2**31:
        raise ValueError(
            f"got the integer {number}, which int32 cannot hold (up to {2**31 - 1}). Store a "
            "smaller number, such as an index or a remainder"
        )


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

    whole = values
    # A single value, or one value per trainable token, is spread over the mask. If every token is
    # trainable, the values are whole already.
    is_per_trainable = values.ndim > 0 and len(values) == trainable and trainable != total
    if values.ndim == 0 or is_per_trainable:
        whole = np.zeros((total, *values.shape[1:]), values.dtype)
        whole[mask] = values

    bounds = np.cumsum([len(each) for each in masks])
    parts = np.split(whole, bounds[:-1])
    return [part.copy() for part in parts][: len(masks)]  # np.split gives one part of nothing


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

    dtypes = {column.dtype for _, column in pairs if column is not None}
    widest = np.result_type(*dtypes)
    is_routes = widest.kind == "u"  # of engines that name the experts in one byte or two
    dtype = widest if len(dtypes) == 1 or is_routes else np.dtype(np.float32)
    if len(dtypes) > 1 and not is_routes:
        _check_mixed(name, [column for _, column in pairs if column is not None])

    missing = absent_value(name, dtype)
    shape = first.shape[1:]
    columns = [
        np.full((length, *shape), missing, dtype) if column is None else column
        for length, column in pairs
    ]
    if any(column.shape[1:] != shape for column in columns):
        shapes = sorted({column.shape[1:] for column in columns})
        raise StreamError(
            f"stream {name!r} has rows of different sizes in one batch: {shapes}. Every algorithm "
            "of a run has to write it with the same number of values per token."
        )

    return np.concatenate(columns).astype(dtype, copy=False)


def _check_mixed(name: str, columns: Sequence[StreamColumn]) -> None:
    """Integers of one sample that become float32 beside floats of another stay what they are."""
    for column in columns:
        # int64, because the absolute value of the lowest int32 overflows.
        if column.dtype.kind == "i" and np.abs(column.astype(np.int64)).max(initial=0) > 2**24:
            raise StreamError(
                f"stream {name!r} has integers beyond {2**24} in some samples of a batch and "
                "fractions in others: as float32 they would be rounded. Write it as integers "
                "everywhere, or with smaller numbers."
            )


def absent_value(name: str, dtype: Any = np.float32) -> float:
    """The value in a packed stream for a token that has none."""
    if name == "advantages" or name.endswith(WEIGHTS):
        return float(name == f"rl{WEIGHTS}")
    if np.dtype(dtype).kind == "u":
        return np.iinfo(dtype).max
    return np.iinfo(np.int32).min if dtype == np.int32 else np.nan


def is_absent(column: StreamColumn) -> BoolColumn:
    """Where a packed stream (``concatenate``) has no value; its first value per token tells. Of
    routes all tell: a router names different experts, so no token has the highest number twice."""
    if column.dtype.kind == "u":
        values = column.reshape(len(column), -1)
        return np.asarray((values == np.iinfo(column.dtype).max).all(1))
    first = column if column.ndim == 1 else column[:, 0]
    return np.isnan(first) if first.dtype.kind == "f" else first == np.iinfo(np.int32).min
