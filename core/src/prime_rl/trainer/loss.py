"""The loss of one micro batch: three components, each over its own global count.

    L = sum_rl / N_rl  +  sum_ce / N_ce  +  sum_ref_kl / N_ref_kl

N counts a component's member tokens over the whole optimizer step: tokens of another component, or
of another micro batch, never dilute it. They are counts, not sums of weights: a constant weight
would cancel otherwise. With ``normalize_by = "env"`` each env has an N of its own, so that envs do
not dilute each other within a component either::

    L = sum over components and envs of  sum_{component, env} / N_{component, env}

``rl`` is a plugin's. ``ce`` and ``ref_kl`` are fixed; per token, t = trainer logprob, i = inference
logprob::

    ce      -t * w
    ref_kl  drop = exp(t) - exp(i) < -0.2,  g = (ref - t) as a constant
            (-(not drop) * g * exp(t - i) + 1e-3 * (t - i)^2) * w

Shapes: T = tokens of the row (or of one sequence), S = its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.config.trainer import NormalizeBy
from prime_rl.errors import PluginError
from prime_rl.plugins.loss import Loss, LossInputs, LossOutputs, TokenMetric
from prime_rl.rollout import LossComponent
from prime_rl.trainer.counts import Counts
from prime_rl.trainer.loss_metrics import Call, MetricSums, reduce_calls
from prime_rl.trainer.row import Component, Row
from prime_rl.trainer.transfer import to_device

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3

TAKEN = frozenset(
    {"entropy", "kl_ent_ratio", "logprob_gap", "loss", "mismatch_kl", "nll", "optim", "perf"}
    | {"ref_kl", "system", "time", "tokens"}
)
"""First parts of the trainer's own metrics' names, which an rl loss must not use."""


@dataclass
class RowLoss:
    """What one micro batch contributes to the step."""

    loss: Tensor
    """0-dim, with gradient."""
    parts: dict[LossComponent, Tensor] = field(default_factory=dict)
    """Each component's normalised share, 0-dim, no gradient."""
    metrics: list[MetricSums] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Everything the loss functions said."""


def row_loss(
    row: Row, logprobs: Tensor, rl: Loss, counts: Counts, normalize_by: NormalizeBy = "tokens"
) -> RowLoss:
    """The row's share of the step's loss: zero, with a graph, if it has no members.

    ``logprobs`` [T] carry the gradient.
    """
    result = RowLoss(logprobs[:1].sum() * 0.0)
    for name, component in row.components.items():
        for share, denominator in _shares(name, component, row, counts, normalize_by):
            calls = _calls(name, row, share, logprobs, rl)
            part = torch.stack([call.outputs.loss for call in calls]).sum() / max(denominator, 1)
            result.loss = result.loss + part
            result.parts[name] = result.parts.get(name, 0.0) + part.detach()
            result.calls += calls
            if (metrics := reduce_calls(calls, row, share)) is not None:
                result.metrics.append(metrics)
    return result


def _shares(
    name: LossComponent, component: Component, row: Row, counts: Counts, normalize_by: NormalizeBy
) -> Iterator[tuple[Component, int]]:
    """What has a denominator of its own: the whole component, or each env's part of it."""
    if normalize_by == "tokens":
        yield component, counts.totals[name]
        return
    owners = row.sequence_envs[component.sequences]
    for env in np.unique(owners).tolist():
        ours = to_device(row.env_ids == env, np.bool_, component.mask.device)
        sequences = [
            s for s, owner in zip(component.sequences, owners, strict=True) if owner == env
        ]
        share = Component(component.mask & ours, component.weights, sequences)
        yield share, counts.of_env(name, row.envs[env])


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Cross entropy of the member tokens, weighted and summed."""
    nll = torch.where(inputs.loss_mask, -inputs.trainer_logprobs, 0.0)
    metrics = {"nll": TokenMetric(nll.detach(), inputs.loss_mask)}
    return LossOutputs(_weighted(nll, inputs).sum(), metrics)


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
    per_token = _weighted(REF_KL_TAU * log_ratio.square() - gain, inputs)
    mismatch_kl = log_ratio.detach().expm1() - log_ratio.detach()
    metrics = {
        "ref_kl": TokenMetric(signal, member),
        "ref_kl/masked_mismatch_kl": TokenMetric(mismatch_kl, dropped),
        "ref_kl/unmasked_mismatch_kl": TokenMetric(mismatch_kl, keep),
        "ref_kl/is_masked": TokenMetric(dropped.float(), member),
    }
    return LossOutputs(per_token.sum(), metrics)


def _weighted(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """``per_token`` is zero off the mask, and stays so whatever the weights are there."""
    if inputs.loss_weights is None:
        return per_token
    return per_token * torch.where(inputs.loss_mask, inputs.loss_weights, 0.0)


def _calls(
    name: LossComponent, row: Row, component: Component, logprobs: Tensor, rl: Loss
) -> list[Call]:
    """The component's loss of the whole row at once, or of each sequence with members."""
    inputs = _inputs(row, component, logprobs)
    if name == "ce":
        return [Call(ce_loss(inputs))]
    if name == "ref_kl":
        return [Call(ref_kl_loss(inputs))]
    if rl.token_wise:
        return [Call(_checked(rl, rl(inputs)))]
    return [
        Call(_checked(rl, rl(each)), start, sequence)
        for sequence, start, each in _sequences(inputs, row, component)
    ]


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
) -> Iterator[tuple[int, int, LossInputs]]:
    """Each sequence with members by itself, after its index and that of its first token."""
    lengths = list(row.lengths)
    starts = np.cumsum([0, *lengths]).tolist()
    columns: dict[str, Any] = {
        name: [None] * len(lengths) if column is None else column.split_with_sizes(lengths)
        for name, column in vars(inputs).items()
    }
    for index in component.sequences:
        each = LossInputs(**{name: column[index] for name, column in columns.items()})
        yield index, starts[index], each


def _checked(rl: Loss, outputs: Any) -> LossOutputs:
    """Raises ``PluginError`` for what a loss must not give back."""
    if not isinstance(outputs, LossOutputs):
        found = type(outputs).__name__
    elif not isinstance(outputs.loss, Tensor):
        found = f"LossOutputs with a loss of type {type(outputs.loss).__name__}"
    elif outputs.loss.dim():
        found = f"LossOutputs with a loss of shape {tuple(outputs.loss.shape)}"
    else:
        return _check_names(rl, outputs)
    raise PluginError(
        f"loss {rl.name!r} gave {found}, expected LossOutputs with a 0-dim tensor: the sum over "
        "loss_mask. Mend its __call__."
    )


def _check_names(rl: Loss, outputs: LossOutputs) -> LossOutputs:
    for name in outputs.metrics:
        if name.partition("/")[0] in TAKEN:
            raise PluginError(
                f"loss {rl.name!r} reports a metric {name!r}, whose name is the trainer's own "
                f"(taken: {', '.join(sorted(TAKEN))}). Rename it."
            )
    return outputs
