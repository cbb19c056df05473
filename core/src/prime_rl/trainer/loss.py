"""The loss of one micro batch: three components, each divided by its own global count.

    L = sum_rl / N_rl  +  sum_ce / N_ce  +  sum_ref_kl / N_ref_kl

N counts a component's member tokens over the whole optimizer step: tokens of another component, or
of another micro batch, never dilute it. N is a count and not a sum of weights, which a constant
weight would cancel. With ``normalize_by = "env"`` each env has an N of its own, so that envs do not
dilute each other within a component either::

    L = sum over components and envs of  sum_{component, env} / N_{component, env}

``rl`` is a plugin's. ``ce`` and ``ref_kl`` are fixed; per token, t = trainer logprob, i = inference
logprob::

    ce      -t * w
    ref_kl  drop = exp(t) - exp(i) < -0.2,  g = (ref - t) as a constant
            (-(not drop) * g * exp(t - i) + 1e-3 * (t - i)^2) * w

Shapes: T = tokens of the row (or of one sequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.config.trainer import NormalizeBy
from prime_rl.errors import PluginError
from prime_rl.plugins.loss import Loss, LossInputs, LossOutputs, TokenMetric
from prime_rl.plugins.metrics import running
from prime_rl.rollout import COMPONENTS, LossComponent, members
from prime_rl.trainer import parallel
from prime_rl.trainer.device import to_device
from prime_rl.trainer.loss_metrics import Call, MetricSums, reduce_calls
from prime_rl.trainer.packed_row import Component, PackedRow
from prime_rl.wire.micro_batch import MicroBatch

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3

TAKEN = frozenset(
    {"entropy", "kl_ent_ratio", "logprob_gap", "loss", "mismatch_kl", "nll", "optim", "perf"}
    | {"plugin", "ref_kl", "system", "time", "tokens"}
)
"""First parts of the names of the trainer's own metrics, which an rl loss must not use."""


@dataclass(frozen=True)
class Counts:
    """Member tokens of one optimizer step, over all ranks: the loss's denominators."""

    members: Mapping[tuple[LossComponent, str], int]
    """By component and env; only those that have any."""
    num_tokens: int
    """All tokens of all rows, members or not."""

    @property
    def totals(self) -> dict[LossComponent, int]:
        """Members of each component, over all envs."""
        totals: dict[LossComponent, int] = dict.fromkeys(COMPONENTS, 0)
        for (name, _), number in self.members.items():
            totals[name] += number
        return totals

    def metrics(self) -> dict[str, float]:
        """``tokens/<component>``, and ``tokens/<component>/<env>`` where there are any."""
        totals = {f"tokens/{name}": float(number) for name, number in self.totals.items()}
        by_env = {f"tokens/{name}/{env}": float(n) for (name, env), n in self.members.items()}
        return totals | by_env


def count_members(micro_batches: Sequence[MicroBatch]) -> Counts:
    """The counts of a step, over all its micro batches and all ranks: one exchange per step."""
    own: Counter[tuple[LossComponent, str]] = Counter()
    for micro_batch in micro_batches:
        env_ids = np.repeat(micro_batch.env_ids, micro_batch.sequence_lengths)
        for name in COMPONENTS:
            numbers = np.bincount(env_ids[members(micro_batch, name)])
            own.update({(name, micro_batch.envs[i]): int(numbers[i]) for i in numbers.nonzero()[0]})
    total: Counter[tuple[LossComponent, str]] = Counter()
    parts = parallel.gather((list(own.items()), sum(map(len, micro_batches))))
    for items, _ in parts:
        total.update({(name, env): number for (name, env), number in items})
    return Counts(total, sum(num_tokens for _, num_tokens in parts))


@dataclass
class RowLoss:
    """What one micro batch contributes to the step."""

    loss: Tensor
    """0-dim, with gradient."""
    parts: dict[LossComponent, Tensor] = field(default_factory=dict)
    """Each component's normalized share, 0-dim, no gradient."""
    metrics: list[MetricSums] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Every call of a loss function."""


def row_loss(
    row: PackedRow, logprobs: Tensor, rl: Loss, counts: Counts, normalize_by: NormalizeBy = "tokens"
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
    name: LossComponent,
    component: Component,
    row: PackedRow,
    counts: Counts,
    normalize_by: NormalizeBy,
) -> Iterator[tuple[Component, int]]:
    """The whole component, or each env's part of it, with its denominator."""
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
        yield share, counts.members.get((name, row.envs[env]), 0)


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
    name: LossComponent, row: PackedRow, component: Component, logprobs: Tensor, rl: Loss
) -> list[Call]:
    """The component's loss of the whole row at once, or of each sequence with members."""
    advantages = torch.zeros_like(logprobs) if row.advantages is None else row.advantages
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=row.inference_logprobs,
        ref_logprobs=row.ref_logprobs,
        advantages=advantages.detach(),
        loss_mask=component.mask,
        loss_weights=component.weights,
    )
    if name == "ce":
        return [Call(ce_loss(inputs))]
    if name == "ref_kl":
        return [Call(ref_kl_loss(inputs))]
    call = running(rl.name)(rl)
    if rl.token_wise:
        return [Call(_checked(rl, call(inputs)))]
    starts = np.cumsum([0, *row.lengths]).tolist()
    columns: dict[str, Any] = {
        name: [None] * len(row.lengths) if column is None else column.split_with_sizes(row.lengths)
        for name, column in vars(inputs).items()
    }
    calls = []
    for index in component.sequences:
        outputs = call(LossInputs(**{name: column[index] for name, column in columns.items()}))
        calls.append(Call(_checked(rl, outputs), starts[index], index))
    return calls


def _checked(rl: Loss, outputs: Any) -> LossOutputs:
    """Raises ``PluginError`` for outputs that break the contract."""
    if not isinstance(outputs, LossOutputs):
        found = type(outputs).__name__
    elif not isinstance(outputs.loss, Tensor):
        found = f"LossOutputs with a loss of type {type(outputs.loss).__name__}"
    elif outputs.loss.dim():
        found = f"LossOutputs with a loss of shape {tuple(outputs.loss.shape)}"
    elif taken := [name for name in outputs.metrics if name.partition("/")[0] in TAKEN]:
        raise PluginError(
            f"loss {rl.name!r} reports a metric {taken[0]!r}, but the trainer uses that name "
            f"(taken: {', '.join(sorted(TAKEN))}). Rename it."
        )
    else:
        return outputs
    raise PluginError(
        f"loss {rl.name!r} returned {found}, expected LossOutputs with a 0-dim tensor: the sum "
        "over loss_mask. Fix its __call__."
    )
