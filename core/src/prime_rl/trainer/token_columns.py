"""The columns of the token export: what exists of every token, by name.

Shapes: T = tokens of a micro batch, as it was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from prime_rl.plugins.loss import TokenMetric
from prime_rl.trainer.loss_metrics import Call
from prime_rl.trainer.row import Row
from prime_rl.wire.micro_batch import MicroBatch

Kind: TypeAlias = Literal["int", "bool", "float"]
Column: TypeAlias = npt.NDArray[Any]

MASKS = ("is_masked", "is_masked_high", "is_masked_low")
RATIOS = ("mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta")
STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")
COLUMNS: dict[str, Kind] = {
    "token_ids": "int",
    "position_ids": "int",
    "loss_mask": "bool",
    "advantages": "float",
    "inference_logprobs": "float",
    "trainer_logprobs": "float",
    "entropy": "float",
    **dict.fromkeys(RATIOS, "float"),
    **dict.fromkeys(MASKS, "bool"),
    **dict.fromkeys(STREAMS, "float"),
}
"""What is exported of every token, in order; a float that is not finite, as a bool too, is null."""


def token_columns(
    micro_batch: MicroBatch, row: Row, logprobs: Tensor, entropies: Tensor, calls: Sequence[Call]
) -> dict[str, Column | None]:
    """[T] of each of ``COLUMNS``, in the micro batch's own order."""
    found: dict[str, Column | None] = {
        "token_ids": micro_batch.token_ids,
        "position_ids": micro_batch.position_ids,
        "loss_mask": micro_batch.loss_mask,
        "advantages": micro_batch.advantages,
        "inference_logprobs": micro_batch.inference_logprobs,
        **{name: getattr(micro_batch, name) for name in STREAMS},
    }
    targets = row.targets.cpu().numpy()
    trainer = _only(logprobs.cpu().numpy(), targets)
    own = {"trainer_logprobs": trainer, "entropy": _only(entropies.cpu().numpy(), targets)}
    own |= _ratios(row, trainer) | _masks(calls, len(trainer))
    for name, column in own.items():  # they are in the row's order
        found[name] = packed = np.empty_like(column)
        packed[row.origins] = column
    return {name: found.get(name) for name in COLUMNS}


def _only(column: Column, tokens: Column) -> Column:
    """NaN for all other tokens."""
    kept = np.full(len(column), np.nan)
    kept[tokens] = column[tokens]
    return kept


def _ratios(row: Row, trainer: Column) -> dict[str, Column]:
    """π against μ where a component compares them; nothing if none does."""
    if not len(row.ratio_tokens):
        return {}
    inference = _only(row.inference_logprobs.cpu().numpy(), row.ratio_tokens)
    log_ratio = trainer - inference
    with np.errstate(over="ignore", invalid="ignore"):
        columns = (
            np.expm1(log_ratio) - log_ratio,
            log_ratio,
            np.exp(log_ratio),
            np.exp(trainer) - np.exp(inference),
        )
    return dict(zip(RATIOS, columns, strict=True))


def _masks(calls: Sequence[Call], num_tokens: int) -> dict[str, Column]:
    """1.0, 0.0, or NaN where no loss says; what several say of one token is true if one says so."""
    masks: dict[str, Column] = {}
    for call in calls:
        for name, metric in call.outputs.metrics.items():
            field = name.rpartition("/")[2]
            if field in MASKS and isinstance(metric, TokenMetric):
                said = metric.values.detach().float().where(metric.mask, np.nan).cpu().numpy()
                column = masks.setdefault(field, np.full(num_tokens, np.nan))
                part = column[call.start : call.start + len(said)]
                np.fmax(part, said, out=part)
    return masks
