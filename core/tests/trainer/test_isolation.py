"""Per-env algorithms in one batch: what one env contributes to the gradient is its own affair.

The contribution of an env is what flows into the weights through its tokens' logprobs, sequences of
other envs lying in the same packed row and starting from the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import LossTable, NormalizeBy
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch

CPU = torch.device("cpu")
PROMPT = [5, 9]
FILLS = {"advantages": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0,
         "ref_logprobs": 0.0}  # fmt: skip

Streams = dict[str, list[float]]


class PolicyGradient(Loss):
    """-w * A * exp(t - i), sequence by sequence."""

    name = "policy_gradient"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
        return LossOutputs((-weights * inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


class TokenWisePolicyGradient(PolicyGradient):
    """The same, row by row."""

    token_wise = True


def streams(algorithm: str, num_sampled: int) -> Streams:
    """What an algorithm ships for one sequence: the prompt, then what was sampled, and of echo one
    token of observation at the end."""
    none = [0.0] * len(PROMPT)
    zero, one = [*none, *[0.0] * num_sampled], [*none, *[1.0] * num_sampled]
    credit = [*none, *np.linspace(-1, 2, num_sampled).tolist()]
    if algorithm == "grpo":
        return {"advantages": credit}
    if algorithm == "sft":
        return {"rl_weights": zero, "ce_weights": one}
    if algorithm == "opd":
        reference = [*none, *np.linspace(-4, -1, num_sampled).tolist()]
        return {"rl_weights": zero, "ref_kl_weights": one, "ref_logprobs": reference}
    if algorithm == "echo":
        return {"advantages": [*credit[:-1], 0.0], "ce_weights": [*zero[:-1], 0.3]}
    assert algorithm == "overlap"  # every component on every sampled token
    reference = streams("opd", num_sampled)["ref_logprobs"]
    some = [*none, *[0.7] * num_sampled]
    of_both = {"ce_weights": some, "ref_kl_weights": some}
    return {"advantages": credit, "ref_logprobs": reference, **of_both}


def batch(*envs: tuple[str, str, Sequence[int]]) -> MicroBatch:
    """One packed row; each env by name (a letter), algorithm and its sequences' sampled tokens."""
    columns: dict[str, list[float]] = {name: [] for name in FILLS}
    tokens, mask, lengths, owners = [], [], [], []
    for number, (name, algorithm, sizes) in enumerate(envs):
        for size in sizes:
            own = streams(algorithm, size)
            sampled = np.random.default_rng([ord(name), size]).integers(1, 60, size)
            tokens += [*PROMPT, *sampled.tolist()]
            mask += [False] * len(PROMPT) + [True] * size
            if algorithm == "echo":
                mask[-1] = False
            for stream, fill in FILLS.items():
                columns[stream] += own.get(stream, [fill] * (len(PROMPT) + size))
            lengths.append(len(PROMPT) + size)
            owners.append(number)
    return MicroBatch(
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask),
        inference_logprobs=np.where(mask, -2.0, 0.0).astype("f4"),
        sequence_lengths=np.array(lengths, np.int32),
        temperatures=np.ones(len(lengths), np.float32),
        env_ids=np.array(owners, np.uint16),
        envs=tuple(name for name, _, _ in envs),
        **{name: np.array(column, np.float32) for name, column in columns.items()},
    )


def contribution(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    env: str,
    rl: Loss,
    normalize_by: NormalizeBy = "tokens",
) -> Tensor:
    """The part of the step's gradient on the weights that comes through one env's tokens."""
    model.zero_grad()
    row = make_row(micro_batch, CPU)
    logprobs, _ = token_logprobs(model, row)
    leaf = logprobs.detach().requires_grad_()
    losses = installed_losses().with_rl(rl, LossTable(normalize_by=normalize_by))
    result = row_loss(row, leaf, losses, count_members([micro_batch], losses))
    (on_logprobs,) = torch.autograd.grad(result.loss, leaf)
    ours = torch.from_numpy(row.env_ids == row.envs.index(env))
    torch.autograd.backward(logprobs, torch.where(ours, on_logprobs, 0.0))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


MINE, OTHERS = [5, 3], [7, 4, 6]


@pytest.mark.parametrize("normalize_by", ["tokens", "env"])
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("grpo", "sft"),
        ("sft", "grpo"),
        ("grpo", "opd"),
        ("opd", "grpo"),
        ("sft", "opd"),
        ("opd", "sft"),
        ("echo", "opd"),
        ("opd", "echo"),
    ],
)
def test_an_env_contributes_the_same_with_and_without_one_of_another_component(
    mine: str,
    other: str,
    normalize_by: NormalizeBy,
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model, rl = make_model(), TokenWisePolicyGradient(PluginConfig())
    alone = contribution(model, batch(("a", mine, MINE)), "a", rl, normalize_by)
    mixed = batch(("b", other, OTHERS), ("a", mine, MINE))
    beside = contribution(model, mixed, "a", rl, normalize_by)
    torch.testing.assert_close(beside, alone, atol=1e-6, rtol=0)
    assert alone.abs().max() > 1e-2
    assert contribution(model, mixed, "b", rl, normalize_by).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [PolicyGradient, TokenWisePolicyGradient])
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("grpo", "grpo"),
        ("sft", "sft"),
        ("opd", "opd"),
        ("grpo", "echo"),
        ("echo", "overlap"),
        ("overlap", "overlap"),
    ],
)
def test_with_a_denominator_each_it_also_holds_within_a_component_and_without_it_does_not(
    mine: str, other: str, kind: type[Loss], make_model: Callable[..., PreTrainedModel]
) -> None:
    model, rl = make_model(), kind(PluginConfig())
    mixed = batch(("b", other, OTHERS), ("a", mine, MINE))
    by_env, by_tokens = (
        (
            contribution(model, batch(("a", mine, MINE)), "a", rl, normalize_by),
            contribution(model, mixed, "a", rl, normalize_by),
        )
        for normalize_by in ("env", "tokens")
    )
    torch.testing.assert_close(by_env[1], by_env[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(by_tokens[0], by_env[0], atol=1e-6, rtol=0)  # alone they agree
    assert (by_tokens[1] - by_tokens[0]).abs().max() > 1e-2  # diluted


def test_two_rl_envs_dilute_each_other_by_their_share_of_the_tokens(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model, rl = make_model(), PolicyGradient(PluginConfig())
    alone = contribution(model, batch(("a", "grpo", [8])), "a", rl)
    beside = contribution(model, batch(("a", "grpo", [8]), ("b", "grpo", [24])), "a", rl)
    torch.testing.assert_close(beside, alone / 4, atol=1e-6, rtol=0)


def test_observation_tokens_leave_the_rl_term_as_it_is(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    """echo is grpo plus a ce term: with the observations' weights at zero, only that is gone."""
    model, rl = make_model(), PolicyGradient(PluginConfig())
    echo = batch(("a", "echo", MINE))
    plain = batch(("a", "echo", MINE))
    assert plain.ce_weights is not None
    weights, plain.ce_weights = plain.ce_weights, None
    only_ce = batch(("a", "echo", MINE))
    only_ce.rl_weights = np.zeros(len(weights), np.float32)
    parts = [contribution(model, each, "a", rl) for each in (plain, only_ce)]
    torch.testing.assert_close(
        contribution(model, echo, "a", rl), parts[0] + parts[1], atol=1e-6, rtol=0
    )
    assert all(part.abs().max() > 1e-2 for part in parts)


def test_it_holds_over_several_micro_batches_of_a_step(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    """The denominator is the step's: env a's tokens in another row count, env b's do not."""
    model, rl = make_model(), TokenWisePolicyGradient(PluginConfig())
    rows = [batch(("b", "grpo", [7]), ("a", "grpo", [5])), batch(("a", "grpo", [3]))]
    losses = installed_losses().with_rl(rl, LossTable(normalize_by="env"))
    counts = count_members(rows, losses)
    total = torch.zeros(())
    for micro_batch in rows:
        row = make_row(micro_batch, CPU)
        leaf = token_logprobs(model, row)[0].detach().requires_grad_()
        result = row_loss(row, leaf, losses, counts)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        ours = torch.from_numpy(row.env_ids == row.envs.index("a"))
        ratio = (leaf - row.inference_logprobs).exp().detach()
        expected = torch.where(ours, -row.streams["advantages"] * ratio / 8, 0.0)
        torch.testing.assert_close(torch.where(ours, gradient, 0.0), expected)
        total = total + ours.sum()
    assert int(total) == 5 + 3 + 2 * len(PROMPT)
