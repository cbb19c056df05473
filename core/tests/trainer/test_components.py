"""Every scope x divisor x env against a sum in float64 that knows no rows, ranks or packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from written_elements import WrittenElements

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, Rollout, Sample
from prime_rl.config.trainer import LossTable
from prime_rl.errors import ConfigError, StreamError
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.registry.components import Component, Components, installed_losses
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire.micro_batch import decode_batch

CPU = torch.device("cpu")
CONSTANT = 7.0
CAPACITY = 64
SCOPES = ("token", "sequence", "rollout", "group")
UNITS = ("tokens", "sequences", "rollouts", "groups", "constant")


class Ratio(Loss):
    """-R A w, R the geometric mean of exp(t - i) over what the call sees; a pull to a stream."""

    reads = ("advantages", ("target", 0.5), "policy_lag", "temperatures", "entropies")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms = per_token(
            inputs.trainer_logprobs,
            inputs.inference_logprobs,
            inputs.advantages,
            inputs.streams["target"],
            inputs.policy_lag,
            inputs.temperatures,
            inputs.entropies,
            inputs.loss_mask if self.scope != "token" else None,
        )
        weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
        return LossOutputs(torch.where(inputs.loss_mask, terms * weights, 0.0).sum(), {})


def per_token(
    t: Any, i: Any, a: Any, target: Any, lag: Any, heat: Any, entropy: Any, mask: Any
) -> Any:
    ratio = (t - i).exp() if mask is None else ((t - i)[mask]).mean().exp()
    return -ratio * a * (1 + lag) + heat * (t - target) ** 2 - 0.1 * entropy


def loss_of(scope: str) -> Loss:
    return type("Scoped", (Ratio,), {"name": f"by_{scope}", "scope": scope})(PluginConfig())


@st.composite
def batches(draw: Any) -> list[Rollout]:
    """Groups of two envs; tokens are numbered, so that each has values of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found, first = [], 1
    for group in range(draw(st.integers(1, 4))):
        env = draw(st.sampled_from(["a", "b"]))
        for _ in range(draw(st.integers(1, 3))):
            samples = []
            for size in draw(st.lists(st.integers(2, 6), min_size=1, max_size=2)):
                mask = np.arange(size) >= draw(st.integers(1, size))
                samples.append(
                    Sample(
                        token_ids=np.arange(first, first + size),
                        loss_mask=mask,
                        inference_logprobs=np.where(mask, -rng.uniform(0.1, 2, size), 0),
                        policy_versions=np.where(mask, rng.integers(0, 3, size), -1),
                        temperature=float(rng.choice([0.5, 1.0])),
                    )
                )
                first += size
            rollout = Rollout(env=env, example_id=0, group_id=group, reward=0.0, samples=samples)
            rollout.assign_advantages(rng.normal(size=rollout.num_trainable_tokens))
            if draw(st.booleans()):
                rollout.assign_stream("target", rng.normal(size=rollout.num_tokens))
            if draw(st.booleans()):
                weights = rng.choice([0.0, 0.5, 2.0], rollout.num_trainable_tokens)
                rollout.assign_weights("rl", weights)
            found.append(rollout)
    return found


def unit_of(unit: str, number: int, rollout: Rollout, sample: Sample) -> Any:
    return {
        "sequence": id(sample), "rollout": number, "group": (rollout.env, rollout.group_id),
    }[unit.removesuffix("s")]  # fmt: skip


def pieces(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, Rollout, Sample]]:
    for number, rollout in enumerate(rollouts):
        for sample in rollout.samples:
            yield number, rollout, sample


def weights_of(sample: Sample) -> np.ndarray:
    own = np.ones(len(sample)) if sample.rl_weights is None else sample.rl_weights
    return np.where(sample.loss_mask, own, 0.0).astype(np.float64)


def reference(
    rollouts: Sequence[Rollout], t: Tensor, entropies: Tensor, component: Component, step: int
) -> Tensor:
    """L by its definition, one unit after the other. ``t`` and ``entropies``: by token id."""
    columns = []
    sizes: dict[Any, int] = {}
    envs: dict[Any, str] = {}
    for number, rollout, sample in pieces(rollouts):
        weights, ids = weights_of(sample), torch.from_numpy(sample.token_ids.astype(np.int64))
        lag = np.where(sample.policy_versions >= 0, step - 1 - sample.policy_versions, -1)
        target = sample.streams.get("target", np.full(len(sample), 0.5))
        columns.append((number, rollout, sample, weights, ids, lag, target))
        if component.unit not in ("tokens", "constant") and (weights != 0).any():
            key = unit_of(component.unit, number, rollout, sample)
            sizes[key] = sizes.get(key, 0) + int((weights != 0).sum())
            envs[key] = rollout.env
    num_tokens = {
        env: sum(int((c[3] != 0).sum()) for c in columns if env in (None, c[1].env))
        for env in (None, "a", "b")
    }
    calls: dict[Any, list[Any]] = {}
    for column in columns:
        scope = component.scope
        key = id(column[2]) if scope == "token" else unit_of(scope, *column[:3])
        calls.setdefault(key, []).append(column)
    total = torch.zeros((), dtype=torch.float64)
    for parts in calls.values():
        joined = [np.concatenate([part[n] for part in parts]) for n in (3, 5, 6)]
        weights, lag, target = (torch.from_numpy(np.asarray(c, np.float64)) for c in joined)
        if not weights.any():
            continue
        ids = torch.cat([part[4] for part in parts])
        samples = [part[2] for part in parts]
        i, a = (
            torch.from_numpy(np.concatenate([getattr(s, n) for s in samples]).astype(np.float64))
            for n in ("inference_logprobs", "advantages")
        )
        heat = torch.cat([torch.full((len(s),), s.temperature).double() for s in samples])
        member = weights != 0
        mask = None if component.scope == "token" else member
        terms = per_token(t[ids], i, a, target, lag, heat, entropies[ids], mask)
        scale = []
        for number, rollout, sample, *_ in parts:
            env = rollout.env if component.per_env else None
            if component.unit == "tokens":
                own = 1 / max(num_tokens[env], 1)
            elif component.unit == "constant":
                own = 1 / CONSTANT
            else:
                key = unit_of(component.unit, number, rollout, sample)
                number_of = sum(env in (None, other) for other in envs.values())
                own = 1 / (sizes.get(key, 1) * max(number_of, 1))
            scale.append(torch.full((len(sample),), own, dtype=torch.float64))
        total = total + torch.where(member, terms * weights * torch.cat(scale), 0.0).sum()
    return total


def packed(
    rollouts: Sequence[Rollout], t: Tensor, entropies: Tensor, losses: Components, num_ranks: int
) -> float:
    """The same through packer, wire, rows and ``row_loss``."""
    frames = batch_frames(batch_to_pack(5, rollouts, losses, CAPACITY), CAPACITY, num_ranks)
    rows = [row for frame in frames for row in decode_batch(frame)[1]]
    counts = count_members(rows, losses)
    total = 0.0
    for micro_batch in rows:
        row = make_row(micro_batch, CPU)
        loss = row_loss(row, t[row.token_ids], losses, counts, entropies[row.token_ids]).loss
        torch.autograd.backward(loss, retain_graph=True)
        total += float(loss.detach())
    return total


@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize("per_env", [False, True])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("scope", SCOPES)
@given(rollouts=batches(), num_ranks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_loss_and_gradient_are_those_of_the_definition(
    scope: str, unit: str, per_env: bool, rollouts: list[Rollout], num_ranks: int, seed: int
) -> None:
    constant = CONSTANT if unit == "constant" else None
    table = LossTable(normalize_by=unit, per_env=per_env, constant=constant)  # type: ignore[arg-type]
    losses = installed_losses().with_rl(loss_of(scope), table)
    torch.manual_seed(seed)
    size = 1 + sum(rollout.num_tokens for rollout in rollouts)
    leaves = torch.randn(2, size, dtype=torch.float64)
    found, expected = leaves.clone().requires_grad_(), leaves.clone().requires_grad_()
    value = packed(rollouts, found[0], found[1], losses, num_ranks)
    loss = reference(rollouts, expected[0], expected[1], losses["rl"], 5)
    if loss.requires_grad:
        torch.autograd.backward(loss)
    size_of_terms = 1 + float(
        (expected.detach().abs() * (0 if expected.grad is None else expected.grad.abs())).sum()
    )
    assert value == pytest.approx(float(loss.detach()), abs=1e-6 * size_of_terms)
    other = torch.zeros_like(leaves) if expected.grad is None else expected.grad
    torch.testing.assert_close(found.grad, other, rtol=1e-5, atol=1e-6)


def rollout_of(env: str, group: int = 0, size: int = 3, **more: Any) -> Rollout:
    sample = Sample(
        token_ids=np.arange(size),
        loss_mask=np.arange(size) > 0,
        inference_logprobs=np.zeros(size),
        **more,
    )
    rollout = Rollout(env=env, example_id=0, group_id=group, reward=0.0, samples=[sample])
    rollout.assign_advantages(1.0)
    return rollout


class Seen(Loss):
    """Records whether each call got a reference."""

    name = "seen"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.calls.append((int(inputs.loss_mask.sum()), inputs.ref_logprobs is not None))
        return LossOutputs(inputs.trainer_logprobs.sum() * 0.0, {})


@pytest.mark.parametrize("token_wise", [False, True])
def test_an_env_without_a_reference_gives_none_beside_one_that_has_it(token_wise: bool) -> None:
    with_reference, without = rollout_of("a"), rollout_of("b", group=1, size=4)
    with_reference.assign_ref_logprobs([-1.0, -2.0])
    loss = type("Wise", (Seen,), {"token_wise": token_wise})(PluginConfig())
    losses = installed_losses().with_rl(loss)
    (frame,) = batch_frames(batch_to_pack(1, [with_reference, without], losses, 10), 10)
    (micro_batch,) = decode_batch(frame)[1]
    row_loss(
        make_row(micro_batch, CPU),
        torch.zeros(7, requires_grad=True),
        losses,
        count_members([micro_batch], losses),
    )
    assert sorted(loss.calls) == [(2, True), (3, False)]


def test_a_member_without_a_required_stream_is_named() -> None:
    class Needs(Seen):
        name = "needs"
        reads = ("targets",)

    losses = installed_losses().with_rl(Needs(PluginConfig()))
    valued = rollout_of("a")
    valued.assign_stream("targets", [0.5, 1.5])
    (frame,) = batch_frames(batch_to_pack(1, [valued, rollout_of("b", 1)], losses, 9), 9)
    (micro_batch,) = decode_batch(frame)[1]
    with pytest.raises(StreamError, match=r"envs a, b: 4 tokens train .* 'needs' .* 'targets'"):
        row_loss(
            make_row(micro_batch, CPU),
            torch.zeros(6),
            losses,
            count_members([micro_batch], losses),
        )


@pytest.mark.parametrize("scope", ["rollout", "group"])
def test_what_trains_in_another_component_does_not_take_an_optional_stream_away(
    scope: str,
) -> None:
    """Two samples of a unit: one trains here and has the stream, the other trains in ce."""
    seen: list[Tensor | None] = []

    class Optional(Loss):
        reads = ("advantages", ("target", None))

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            target = inputs.streams["target"]
            seen.append(target)
            return LossOutputs(inputs.trainer_logprobs[inputs.loss_mask].sum(), {})

    loss = type("Scoped", (Optional,), {"name": f"optional_{scope}", "scope": scope})
    losses = installed_losses().with_rl(loss(PluginConfig()))
    here, elsewhere = (
        Sample(
            token_ids=[number, 5, 6],
            loss_mask=[False, True, True],
            inference_logprobs=[0.0, -1.0, -1.0],
            temperature=1.0,
        )
        for number in (1, 2)
    )
    here.set_stream("target", np.array([0.0, 0.5, 1.5], np.float32))
    elsewhere.rl_weights = np.zeros(3, np.float32)
    elsewhere.set_stream("ce_weights", np.array([0.0, 1.0, 1.0], np.float32))
    rollout = Rollout(env="a", example_id=0, group_id=0, reward=0.0, samples=[here, elsewhere])
    rollout.assign_advantages(np.ones(4))
    (frame,) = batch_frames(batch_to_pack(1, [rollout], losses, 9), 9)
    (micro_batch,) = decode_batch(frame)[1]
    counts = count_members([micro_batch], losses)
    row_loss(make_row(micro_batch, CPU), torch.zeros(6), losses, counts)
    (target,) = seen
    assert target is not None
    assert {0.5, 1.5} <= set(target.tolist())


def test_streams_of_several_values_per_token_and_of_integers_cross_the_wire() -> None:
    rollout = rollout_of("a")
    rollout.assign_stream("top", [[1.0, 2.0], [3.0, 4.0]])
    rollout.assign_stream("ids", np.array([7, 2**31 - 1]))
    losses = installed_losses()
    (frame,) = batch_frames(batch_to_pack(1, [rollout], losses, 9), 9)
    (micro_batch,) = decode_batch(frame)[1]
    assert micro_batch.streams["top"].tolist() == [[0, 0], [1, 2], [3, 4]]
    assert micro_batch.streams["ids"].tolist() == [0, 7, 2**31 - 1]
    assert micro_batch.streams["ids"].dtype == np.int32


def test_a_loss_that_sums_over_groups_is_not_divided_by_tokens() -> None:
    class Pairwise(Seen):
        name = "pairwise"
        normalize_by = "groups"

    with pytest.raises(ConfigError, match=r"trainer.loss.normalize_by is 'tokens', .* 'groups'"):
        installed_losses().with_rl(Pairwise(PluginConfig()), LossTable(normalize_by="tokens"))


@pytest.mark.parametrize("scope", SCOPES)
def test_the_backward_pass_of_a_row_is_linear_in_its_units(scope: str, pack: Any) -> None:
    """Rollouts of one sequence in groups of two."""
    losses = installed_losses().with_rl(loss_of(scope))

    def elements(number: int) -> int:
        ids = np.arange(number, dtype=np.int32)
        streams = {
            "target": np.zeros(4 * number, np.float32),
            "policy_lag": np.zeros(4 * number, np.int32),
        }
        batch = pack([[1, 2, 3, 4]] * number)
        batch = replace(batch, rollout_ids=ids, group_ids=ids // 2, streams=streams)
        row = make_row(batch, torch.device("cpu"))
        logprobs = torch.full((4 * number,), -1.0, requires_grad=True)
        entropies = torch.ones(4 * number, requires_grad=True)
        result = row_loss(row, logprobs, losses, count_members([batch], losses), entropies)
        with WrittenElements() as written:
            result.loss.backward()
        return written.number

    assert elements(128) < 16 * 1.1 * elements(8)
