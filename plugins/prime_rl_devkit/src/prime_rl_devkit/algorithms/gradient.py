"""The check ``gradient`` of algorithms: what the trainer makes of the streams, and the direction of
the step.

A toy policy has its own logits at every position, so a token's probability depends on nothing else
and the gradient has a closed form (``closed_form``).

    p_v = softmax(logits)_v        t = log p_token        i = inference logprob
    dL/dlogits_v = dL/dt (1[v = token] - p_v)

Shapes: T = tokens of one sample, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.loss import Loss, LossInputs, LossOutputs
from prime_rl.registry.components import installed_losses
from prime_rl.rollout import Group, Sample
from prime_rl.streams import components, members, stream
from prime_rl_devkit.algorithms.subject import MIXED, Subject
from prime_rl_devkit.verdicts import Broken, NotApplicable

Floats = npt.NDArray[np.float64]


def gradient(subject: Subject) -> None:
    """A step of SGD moves the policy towards the tokens with higher credit, by the gradient that
    the declared component has in closed form."""
    if find_spec("torch") is None:
        raise NotApplicable("torch is not installed")
    group = subject.stamped(MIXED)
    samples = [sample for rollout in group for sample in rollout.samples]
    vocabulary = 1 + max(int(sample.token_ids.max()) for sample in samples)
    logits = [toy_logits(sample, vocabulary) for sample in samples]
    expected = closed_form(samples, logits)
    computed = trainer_gradient(group, logits)
    for index, (ours, theirs) in enumerate(zip(expected, computed, strict=True)):
        if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-6):
            gap = float(np.abs(ours - theirs).max())
            raise Broken(
                f"sample {index}: the trainer's gradient differs from the closed form by {gap:.3g}"
            )

    # Other components that act on the same tokens may pull the other way.
    declared = closed_form(samples, logits, only=subject.fresh().action_loss)
    _check_direction(subject, samples, logits=logits, gradients=declared)


def _check_direction(
    subject: Subject,
    samples: Sequence[Sample],
    logits: Sequence[Floats],
    gradients: Sequence[Floats],
) -> None:
    """A small step against the ``gradients`` makes tokens with credit likelier."""
    largest = max(float(np.abs(slope).max()) for slope in gradients)
    rate = 0.1 / max(largest, 1e-30)
    moved = 0
    for index, (sample, before, slope) in enumerate(zip(samples, logits, gradients, strict=True)):
        old = token_logprobs(sample, before)
        new = token_logprobs(sample, before - slope * rate)
        credit = _credit(subject, sample, old)
        moved += int((credit != 0).sum())
        wrong = np.flatnonzero(credit * (new - old) < -1e-9)
        if len(wrong):
            t = int(wrong[0])
            raise Broken(
                f"sample {index}, token {t}: credit {credit[t]:.3g}, but its logprob went from "
                f"{old[t]:.6f} to {new[t]:.6f}. Is a weight or a sign the wrong way round?"
            )

    if not moved or not largest:
        raise Broken(f"rewards {list(MIXED)} give no gradient: nothing can be learned from them")


def _credit(subject: Subject, sample: Sample, old: Floats) -> Floats:
    """[T] the direction in which the declared component moves each sampled token: its advantage,
    towards a reference, or up."""
    component = subject.fresh().action_loss
    required = installed_losses()[component].required
    credit = np.ones(len(sample))
    if "advantages" in required:
        credit = _column(sample, "advantages", 0.0)
    elif "ref_logprobs" in required:
        credit = _column(sample, "ref_logprobs", 0.0) - old

    # A credit that rounding may have made is none.
    least = 1e-3 * np.abs(credit).max(initial=0)
    is_credited = members(sample, component) & sample.loss_mask & (np.abs(credit) > least)
    return np.where(is_credited, credit, 0.0)


def toy_logits(sample: Sample, size: int) -> Floats:
    """[T, V] logits under which each sampled token has the probability it was sampled with."""
    p = np.where(sample.loss_mask, np.exp(np.float64(sample.inference_logprobs)), 1 / size)
    p = np.clip(p, 1e-3, 1 - 1e-3)
    logits = np.repeat(np.log((1 - p) / max(size - 1, 1))[:, None], size, axis=1)
    logits[np.arange(len(sample)), sample.token_ids] = np.log(p)
    return logits


def token_logprobs(sample: Sample, logits: Floats) -> Floats:
    """[T] log-probability of each token under [T, V] logits."""
    shifted = logits - logits.max(1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    chosen: Floats = logprobs[np.arange(len(sample)), sample.token_ids]
    return chosen


def closed_form(
    samples: Sequence[Sample], logits: Sequence[Floats], only: str = ""
) -> list[Floats]:
    """dL/dlogits of each sample, [T, V], of all components or of one:

        rl          dL/dt = -w A exp(t - i) / N_rl               (importance-weighted REINFORCE)
        any other   dL/dt by calling its loss for the sample alone, over its N

    Raises ``NotApplicable`` for a loss whose sum is not one over the tokens of a sample.
    """
    names = {name for sample in samples for name in components(sample)}
    counts = {}
    for name in names:
        number = sum(int(members(sample, name).sum()) for sample in samples)
        counts[name] = max(number, 1)

    gradients = []
    for sample, own_logits in zip(samples, logits, strict=True):
        t = token_logprobs(sample, own_logits)
        slope = np.zeros(len(sample))
        for component in components(sample):
            if only in ("", component):
                of_component = _slope(sample, component, t)
                is_member = members(sample, component)
                slope += np.where(is_member, of_component, 0.0) / counts[component]

        p = np.exp(own_logits) / np.exp(own_logits).sum(1, keepdims=True)
        onehot = np.eye(own_logits.shape[1])[sample.token_ids]
        gradients.append(slope[:, None] * (onehot - p))

    return gradients


def _slope(sample: Sample, component: str, t: Floats) -> Floats:
    """[T] dL/dt, not yet divided by the component's count."""
    i = _column(sample, "inference_logprobs", 0.0)
    w = _column(sample, f"{component}_weights", 1.0)
    if component == "rl":
        return -w * _column(sample, "advantages", 0.0) * np.exp(t - i)

    import torch

    loss = installed_losses()[component]
    if loss.unit != "tokens" or loss.scope not in ("token", "sequence") or loss.computed:
        raise NotApplicable(f"the loss {component!r} is no sum over the tokens of one sample")

    streams = {}
    for name in loss.streams:
        absent = loss.defaults.get(name) or 0.0
        streams[name] = torch.from_numpy(_column(sample, name, absent))
    leaf = torch.tensor(t, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=leaf,
        inference_logprobs=torch.from_numpy(i),
        ref_logprobs=streams.get("ref_logprobs"),
        advantages=streams.get("advantages", torch.zeros_like(leaf)),
        loss_mask=torch.from_numpy(members(sample, component)),
        loss_weights=torch.from_numpy(w),
        streams=streams,
    )
    loss.loss(inputs).loss.backward()  # type: ignore[no-untyped-call]
    return np.asarray(leaf.grad)


def _column(sample: Sample, name: str, absent: float) -> Floats:
    column = sample.inference_logprobs if name == "inference_logprobs" else stream(sample, name)
    if column is None:
        return np.full(len(sample), absent)
    return np.asarray(column, np.float64)


class _Reinforce(Loss):
    name = "reinforce"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        import torch

        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        per_token = -inputs.advantages * ratio
        if inputs.loss_weights is not None:
            per_token = per_token * inputs.loss_weights
        return LossOutputs(torch.where(inputs.loss_mask, per_token, 0.0).sum(), {})


def trainer_gradient(group: Group, logits: Sequence[Floats]) -> list[Floats]:
    """dL/dlogits of each sample, [T, V], through the packer, the wire's rows and the trainer's own
    loss."""
    import torch

    from prime_rl.orchestrator.packer import pack
    from prime_rl.trainer.loss import count_members, row_loss
    from prime_rl.trainer.packed_row import make_row

    samples = [(sample, rollout.env) for rollout in group for sample in rollout.samples]
    batches = [pack([sample], [env], len(sample))[0] for sample, env in samples]
    losses = installed_losses().with_rl(_Reinforce(PluginConfig()))
    counts = count_members(batches, losses)
    total: Any = 0.0
    leaves = [torch.tensor(each, requires_grad=True) for each in logits]
    for batch, leaf in zip(batches, leaves, strict=True):
        tokens = torch.from_numpy(batch.token_ids.astype(np.int64))[:, None]
        logprobs = leaf.log_softmax(1).gather(1, tokens)[:, 0]
        row = make_row(batch, torch.device("cpu"))
        total = total + row_loss(row, logprobs, losses=losses, counts=counts).loss

    total.backward()
    return [np.asarray(leaf.grad) for leaf in leaves]


def loss_probe() -> Any:
    """The module by which the trainer judges a loss before its first token: ``mean_of``,
    ``leak_of`` and ``probe_inputs``."""
    from prime_rl.trainer import loss_probe

    return loss_probe
