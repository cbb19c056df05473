"""The loss of one micro batch: three components, each over its own global count.

    L = sum_rl / N_rl  +  sum_ce / N_ce  +  sum_ref_kl / N_ref_kl

N counts a component's member tokens over the whole optimizer step: tokens of another component, or
of another micro batch, never dilute it. They are counts, not sums of weights: a constant weight
would cancel otherwise.

``rl`` is a plugin's. ``ce`` and ``ref_kl`` are fixed; per token, t = trainer logprob, i = inference
logprob::

    ce      -t * w
    ref_kl  drop = exp(t) - exp(i) < -0.2,  g = (ref - t) as a constant
            (-(not drop) * g * exp(t - i) + 1e-3 * (t - i)^2) * w

Shapes: T = tokens of the row (or of one sequence), S = its sequences, M = metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prime_rl.plugins.base import Loss, LossComponent, LossInputs, LossOutputs, TokenMetric
from prime_rl.plugins.errors import PluginError
from prime_rl.trainer.row import Component, Counts, Row

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3


@dataclass
class RowLoss:
    """What one micro batch contributes to the step."""

    loss: Tensor
    """0-dim, with gradient."""
    parts: dict[LossComponent, Tensor] = field(default_factory=dict)
    """Each component's normalised share, 0-dim, no gradient."""
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    """Sum over the sequences with members, and how many those are."""


def row_loss(row: Row, logprobs: Tensor, rl: Loss, counts: Counts) -> RowLoss:
    """The row's share of the step's loss: zero, with a graph, if it has no members.

    ``logprobs`` [T] carry the gradient.
    """
    result = RowLoss(logprobs.sum() * 0.0)
    for name, component in row.components.items():
        outputs = _component_outputs(name, row, component, logprobs, rl)
        part = torch.stack([output.loss for output, _ in outputs]).sum() / max(counts[name], 1)
        result.loss = result.loss + part
        result.parts[name] = part.detach()
        result.metrics |= _reduce(outputs, row, component)
    return result


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Cross entropy of the member tokens, weighted and summed."""
    nll = -inputs.trainer_logprobs
    per_token = _weighted(torch.where(inputs.loss_mask, nll, 0.0), inputs.loss_weights)
    return LossOutputs(per_token.sum(), {"nll": TokenMetric(nll.detach(), inputs.loss_mask)})


def ref_kl_loss(inputs: LossInputs) -> LossOutputs:
    """Reverse KL to the reference policy as a per-token advantage, importance weighted, summed."""
    assert inputs.ref_logprobs is not None
    member, zero = inputs.loss_mask, inputs.trainer_logprobs.new_zeros(())
    log_ratio = torch.where(member, inputs.trainer_logprobs - inputs.inference_logprobs, zero)
    trainer = inputs.trainer_logprobs.detach()
    dropped = member & (trainer.exp() - inputs.inference_logprobs.exp() < -REF_KL_MASK_LOW)
    keep = member & ~dropped
    signal = inputs.ref_logprobs - trainer
    # Where, not a product: off the mask a ratio may be infinite, and 0 * inf is NaN.
    gain = torch.where(keep, signal * torch.where(keep, log_ratio, zero).exp(), zero)
    per_token = _weighted(REF_KL_TAU * log_ratio.square() - gain, inputs.loss_weights)
    mismatch_kl = log_ratio.detach().expm1() - log_ratio.detach()
    metrics = {
        "ref_kl": TokenMetric(signal, member),
        "ref_kl/masked_mismatch_kl": TokenMetric(mismatch_kl, dropped),
        "ref_kl/unmasked_mismatch_kl": TokenMetric(mismatch_kl, keep),
        "ref_kl/is_masked": TokenMetric(dropped.float(), member),
    }
    return LossOutputs(per_token.sum(), metrics)


def _weighted(per_token: Tensor, weights: Tensor | None) -> Tensor:
    return per_token if weights is None else per_token * weights


def _component_outputs(
    name: LossComponent, row: Row, component: Component, logprobs: Tensor, rl: Loss
) -> list[tuple[LossOutputs, int | None]]:
    """Outputs with the sequence each is about; None: one output about all of them."""
    inputs = _inputs(row, component, logprobs)
    if name == "ce":
        return [(ce_loss(inputs), None)]
    if name == "ref_kl":
        return [(ref_kl_loss(inputs), None)]
    if rl.token_wise:
        return [(rl(inputs), None)]
    return [(rl(each), index) for index, each in _sequences(inputs, row, component)]


def _inputs(row: Row, component: Component, logprobs: Tensor) -> LossInputs:
    advantages = torch.zeros_like(logprobs) if row.advantages is None else row.advantages
    return LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=row.inference_logprobs,
        ref_logprobs=row.ref_logprobs,
        advantages=advantages.detach(),
        loss_mask=component.mask,
        loss_weights=component.weights,
    )


def _sequences(
    inputs: LossInputs, row: Row, component: Component
) -> Iterator[tuple[int, LossInputs]]:
    """Each sequence with members, by itself."""
    lengths = list(row.lengths)
    columns: dict[str, Any] = {
        name: [None] * len(lengths) if column is None else column.split_with_sizes(lengths)
        for name, column in vars(inputs).items()
    }
    for index in component.sequences:
        yield index, LossInputs(**{name: column[index] for name, column in columns.items()})


def _reduce(
    outputs: list[tuple[LossOutputs, int | None]], row: Row, component: Component
) -> dict[str, tuple[Tensor, int]]:
    """Means per sequence, summed over the sequences with members."""
    number = len(component.sequences)
    if outputs[0][1] is None:
        sums = _sums_of_means(outputs[0][0].metrics, row, component)
        return {name: (total, number) for name, total in sums.items()}
    totals: dict[str, Tensor] = {}
    for output, _ in outputs:
        for name, metric in output.metrics.items():
            totals[name] = totals.get(name, 0.0) + _one_sequence(metric)
    return {name: (total, number) for name, total in totals.items()}


def _sums_of_means(
    metrics: Mapping[str, Tensor | TokenMetric], row: Row, component: Component
) -> dict[str, Tensor]:
    """Metrics of a row's tokens [M, T] -> means [M, S] -> sums over sequences with members [M]."""
    if not metrics:
        return {}
    for name, metric in metrics.items():
        if not isinstance(metric, TokenMetric):
            raise PluginError(
                f"loss metric {name!r}: a token_wise loss sees all sequences at once, so its "
                f"metrics have to be TokenMetric, got {type(metric).__name__}. Wrap it, or set "
                "token_wise = False."
            )
    stacked = [metric for metric in metrics.values() if isinstance(metric, TokenMetric)]
    masks = torch.stack([metric.mask for metric in stacked])
    values = torch.stack([metric.values.detach().float() for metric in stacked])
    sums = values.new_zeros(len(stacked), row.num_sequences)
    sums.index_add_(1, row.sequence_ids, values.where(masks, values.new_zeros(())))
    sizes = torch.zeros_like(sums).index_add_(1, row.sequence_ids, masks.float())
    owners = torch.zeros(row.num_sequences)
    owners[component.sequences] = 1.0
    return dict(zip(metrics, (sums / sizes.clamp(min=1)) @ owners.to(sums.device), strict=True))


def _one_sequence(metric: Tensor | TokenMetric) -> Tensor:
    if isinstance(metric, TokenMetric):
        values = metric.values.detach().float().where(metric.mask, 0.0)
        return values.sum() / metric.mask.sum().clamp(min=1)
    return metric.detach().float()
