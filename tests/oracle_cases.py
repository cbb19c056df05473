"""A batch of rollouts of three envs, the losses that train it, and its loss by the definition.

``reference`` runs transformers on one sequence after the other and adds up the terms of each
component as ``Loss`` and ``[trainer.loss]`` define them: no packing, no shared prompt, no rank.
``trained`` is the same by the trainer.

Shapes: T = tokens of a sample, or of all samples of a call end to end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, Rollout, Sample
from prime_rl.config.trainer import LossTable
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import Origin
from prime_rl.registry.offers import Offered
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.update import BatchUpdate
from prime_rl.wire.micro_batch import decode_batch

VOCAB, CAPACITY, STEP, CONSTANT = 61, 64, 4, 50.0
ROUNDING = 1e-5
"""Of gradients: losses see logprobs and streams in float32, whose steps at -4 are 2.4e-7, and a
gradient adds up dozens of them that partly cancel."""
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """What a component's calls see whole, and what its sum is divided by."""

    scope: str
    unit: str
    per_env: bool = False
    terms: str = "tokens"
    """The unit that the loss adds one term for."""


CASES: dict[str, dict[str, Rule]] = {
    "token": {"rl": Rule("token", "tokens"), "other": Rule("group", "groups", terms="groups")},
    "sequence": {"rl": Rule("sequence", "sequences"), "other": Rule("token", "rollouts")},
    "rollout": {"rl": Rule("rollout", "rollouts", True), "other": Rule("token", "tokens", True)},
    "group": {"rl": Rule("group", "groups"), "other": Rule("sequence", "constant")},
    "constant": {"rl": Rule("rollout", "constant"), "other": Rule("group", "tokens", True)},
    "per_env": {
        "rl": Rule("token", "groups", True),
        "other": Rule("rollout", "rollouts", terms="rollouts"),
    },
}  # fmt: skip


def terms(c: Mapping[str, Any], rule: Rule) -> Tensor:
    """[T] what each member token adds to the sum of one call, or [1] for a call that is a term.

    R = exp(mean of t - mu over the members that the call sees), or of each token alone.
    """
    mask, t = c["loss_mask"], c["trainer_logprobs"]
    log_ratio = t - c["inference_logprobs"]
    if rule.terms != "tokens":
        return ((c["loss_weights"] * c["advantages"] * log_ratio)[mask].mean().exp() - 1).square()
    ratio = log_ratio.exp() if rule.scope == "token" else log_ratio[mask].mean().exp()
    pull = c["temperatures"] * (t - c["target"]).square() + c["values"] * t
    old = 0.2 * (t - c["old_logprobs"]).exp() * c["values"]
    found = -ratio * c["advantages"] * (1 + c["policy_lag"]) + pull + old - 0.1 * c["entropies"]
    return torch.where(mask, found * c["loss_weights"], 0.0)


class Scoped(Loss):
    """``terms`` by a rule, as a plugin writes it."""

    rule: Rule
    reads = (
        *("advantages", "values", ("target", -2.5), "old_logprobs", "policy_lag", "temperatures"),
        "entropies",
    )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        columns = vars(inputs) | dict(inputs.streams)
        if inputs.loss_weights is None:
            columns["loss_weights"] = torch.ones_like(inputs.trainer_logprobs)
        return LossOutputs(terms(columns, self.rule).sum(), {})


def losses_of(case: str) -> Components:
    """The losses of a case, as a run would load them."""
    classes = {
        name: type(name, (Scoped,), {
            "name": name, "rule": rule, "scope": rule.scope, "normalize_by": rule.terms,
        }) for name, rule in CASES[case].items()
    }  # fmt: skip
    tables = {
        name: LossTable(
            normalize_by=rule.unit,  # type: ignore[arg-type]
            per_env=rule.per_env,
            constant=CONSTANT if rule.unit == "constant" else None,
        )
        for name, rule in CASES[case].items()
    }
    installed = installed_losses().installed | {
        "other": Offered(classes["other"], Origin("", "", ""))
    }
    losses = Components({"rl": LossTable(), **tables}, installed)
    return losses.with_rl(classes["rl"](PluginConfig()), tables["rl"])


GROUPS = (("words", 3), ("words", 2), ("code", 3), ("mixed", 2))
ACTION_LOSS = {"words": "rl", "code": "other", "mixed": "rl"}


def rollouts_of(
    losses: Components,
    groups: Sequence[tuple[str, int]] = GROUPS,
    action_loss: Mapping[str, str] = ACTION_LOSS,
) -> list[Rollout]:
    """Groups by env and size; siblings share their prompt, and some rollouts have two samples.

    Env ``words`` also trains ce on what its tool says; ``mixed`` trains ``other`` on the same
    tokens as rl.
    """
    rng = np.random.default_rng(0)
    found = []
    for group, (env, size) in enumerate(groups):
        prompt = rng.integers(1, VOCAB, 3 + group).tolist()
        for member in range(size):
            lengths = rng.integers(3, 8, 2 if member == 1 else 1).tolist()
            samples = [_sample(rng, prompt, length) for length in lengths]
            rollout = Rollout(env=env, example_id=0, group_id=group, reward=0.0, samples=samples)
            rollout.assign_advantages(rng.normal(size=rollout.num_trainable_tokens))
            if "values" in losses[action_loss[env]].streams:
                rollout.assign_stream("values", rng.normal(size=rollout.num_tokens))
                if member == 0:
                    rollout.assign_stream("target", rng.normal(-3, 1, rollout.num_trainable_tokens))
            if env == "words":
                for sample in samples:
                    last = np.arange(len(sample)) == len(sample) - 1
                    sample.ce_weights = np.float32(0.3) * last
            if env == "mixed":
                rollout.assign_weights("rl", rng.choice([0, 0.5, 2], rollout.num_trainable_tokens))
                rollout.assign_weights("other", 0.7)
            stamp(rollout, action_loss[env], losses)
            found.append(rollout)
    return found


def _sample(rng: np.random.Generator, prompt: list[int], length: int) -> Sample:
    size = len(prompt) + length
    mask = (np.arange(size) >= len(prompt)) & (np.arange(size) < size - 1)
    return Sample(
        token_ids=[*prompt, *rng.integers(1, VOCAB, length).tolist()],
        loss_mask=mask,
        inference_logprobs=np.where(mask, rng.normal(-4, 0.5, size), 0),
        policy_versions=np.where(mask, rng.integers(0, STEP, size), -1),
        temperature=0.8,
    )


# -- by definition ---------------------------------------------------------------------------------


def reference(
    model: PreTrainedModel, rollouts: Sequence[Rollout], case: str
) -> tuple[float, Gradient]:
    """The loss of the batch and the gradient of every weight, in the model's precision."""
    model.zero_grad()
    pieces = [(n, r, s) for n, r in enumerate(rollouts) for s in r.samples]
    columns = [_columns(model, sample) for _, _, sample in pieces]
    rules = CASES[case] | {"ce": Rule("token", "tokens")}
    total = torch.zeros((), dtype=torch.float64)
    for component, rule in rules.items():
        weights = [_weights(sample, component) for _, _, sample in pieces]
        owners: dict[str, list[Any]] = {
            "token": list(range(len(pieces))),  # terms of one token need no other
            "sequence": list(range(len(pieces))),
            "rollout": [number for number, _, _ in pieces],
            "group": [rollout.group_id for _, rollout, _ in pieces],
        }
        envs = [rollout.env if rule.per_env else "" for _, rollout, _ in pieces]
        factors = _factors(rule, owners, envs, weights)
        calls: defaultdict[Any, list[int]] = defaultdict(list)
        for index, owner in enumerate(owners[rule.scope]):
            calls[owner].append(index)
        for call in calls.values():
            mask = torch.cat([weights[i] != 0 for i in call])
            if not mask.any():
                continue
            c = {name: torch.cat([columns[i][name] for i in call]) for name in columns[0]}
            c |= {"loss_mask": mask, "loss_weights": torch.cat([weights[i] for i in call])}
            if component == "ce":
                found = torch.where(mask, -c["trainer_logprobs"] * c["loss_weights"], 0.0)
            else:
                found = terms(c, rule)
            if rule.terms == "tokens":
                found = found * torch.cat([torch.full_like(weights[i], factors[i]) for i in call])
                total = total + found.sum()
            else:
                total = total + found * factors[call[0]]
    torch.autograd.backward(total)
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), gradient


def _columns(model: PreTrainedModel, sample: Sample) -> dict[str, Tensor]:
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1] / float(np.float32(sample.temperature))
    log_softmax = logits.log_softmax(-1)
    first = torch.full((1,), -float(np.log(VOCAB)), dtype=logits.dtype)
    t = torch.cat([first, log_softmax.gather(1, ids[1:, None])[:, 0]])
    entropies = torch.cat([-first, -(log_softmax.exp() * log_softmax).sum(-1)])
    assert sample.policy_versions is not None and sample.advantages is not None
    lag = np.where(sample.policy_versions < 0, -1, STEP - 1 - sample.policy_versions)
    given = {
        "inference_logprobs": sample.inference_logprobs,
        "advantages": sample.advantages,
        "values": sample.streams["values"],
        "target": sample.streams.get("target", np.full(len(sample), -2.5)),
        "policy_lag": lag,
        "temperatures": np.full(len(sample), np.float32(sample.temperature)),
    }
    known = {name: torch.from_numpy(np.array(v, np.float64)) for name, v in given.items()}
    return {"trainer_logprobs": t, "old_logprobs": t.detach(), "entropies": entropies, **known}


def _weights(sample: Sample, component: str) -> Tensor:
    """[T] the members' weights; 0.0 for a token that is no member."""
    stream = sample.streams.get(
        f"{component}_weights", getattr(sample, f"{component}_weights", None)
    )
    if component == "rl":
        stream = np.where(sample.loss_mask, 1.0 if stream is None else stream, 0.0)
    column = np.zeros(len(sample)) if stream is None else stream
    return torch.from_numpy(np.array(column, np.float64))


def _factors(
    rule: Rule, owners: Mapping[str, list[Any]], envs: list[str], weights: list[Tensor]
) -> list[float]:
    """Of each sample: what each of its terms is multiplied by."""
    numbers = [int((each != 0).sum()) for each in weights]
    if rule.unit == "constant":
        return [1 / CONSTANT] * len(envs)
    if rule.unit == "tokens":
        return [1 / max(sum(n for n, e in zip(numbers, envs, strict=True) if e == env), 1)
                for env in envs]  # fmt: skip
    units = owners[rule.unit.removesuffix("s")]
    sizes: defaultdict[Any, int] = defaultdict(int)
    for unit, number in zip(units, numbers, strict=True):
        sizes[unit] += number
    found = []
    for unit, env in zip(units, envs, strict=True):
        trained = {u for u, e in zip(units, envs, strict=True) if e == env and sizes[u]}
        averaged = max(sizes[unit], 1) if rule.terms == "tokens" else 1
        found.append(1 / (averaged * max(len(trained), 1)))
    return found


# -- by the trainer --------------------------------------------------------------------------------


def trained(
    trainer: Trainer, rollouts: Sequence[Rollout], rank: int = 0, num_ranks: int = 1
) -> tuple[float, Gradient]:
    """The same by packer, wire and ``BatchUpdate``, on every rank."""
    frames = batch_frames(
        batch_to_pack(STEP, rollouts, trainer.losses, CAPACITY), CAPACITY, num_ranks
    )
    update = BatchUpdate(trainer, STEP, decode_batch(frames[rank])[1], None)
    sums, _ = update.forward_backward(update.parts[0], update.counts[0])
    gradient = {}
    for name, p in trainer.model.named_parameters():
        if p.grad is not None:
            whole: Any = p.grad
            gradient[name] = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    return sums.result()["loss/mean"], gradient


class DoubleNorm(Qwen3RMSNorm):
    """Qwen3's norm in the precision of its input; transformers' own computes in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * (variance + self.variance_epsilon).rsqrt())


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """A Qwen3 in double precision, norms included: else two right ways to compute it differ by the
    rounding of float32, which depends on the processor."""
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.__class__ = DoubleNorm
    return model.double()


def distance(found: Gradient, expected: Gradient) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in expected.items()
    )
