"""GAE, the value loss and the algorithm against numbers computed manually; V against a problem that
is small enough to enumerate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import ConfigError, HeadInputs, LossInputs, Rollout, Sample
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.testing import check_algorithm, make_group, score
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_app.config import load_config
from prime_rl_app.resolve import check
from prime_rl_ppo import PPO, PPOConfig
from prime_rl_ppo.critic import ValueHead, ValueLoss, ValueLossConfig
from prime_rl_ppo.gae import ValueHeadConfig, gae
from prime_rl_ppo.value_bins import (
    ValueBinsConfig,
    ValueBinsLoss,
    ValueBinsLossConfig,
    histogram,
)

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/reverse_text/ppo.toml"


# -- advantages ------------------------------------------------------------------------------------


def test_gae_between_the_extremes() -> None:
    """delta = (0.9 * 0.25 - 0.5, 0.9 * 0.75 - 0.25, 1 - 0.75) = (-0.275, 0.425, 0.25)."""
    found = gae([0, 0, 1], [0.5, 0.25, 0.75], gamma=0.9, gae_lambda=0.5)
    assert found == pytest.approx([-0.275 + 0.45 * 0.5375, 0.425 + 0.45 * 0.25, 0.25])


def test_gae_with_lambda_zero_is_the_error_of_one_step() -> None:
    assert gae([0, 2], [1, 3], gamma=0.5, gae_lambda=0.0) == pytest.approx([0.5, -1.0])


STEPS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=12)


@given(STEPS)
def test_gae_with_lambda_one_is_the_sampled_return_minus_the_value(
    steps: list[tuple[float, float]],
) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    expected = [sum(rewards[t:]) - value for t, value in enumerate(values)]
    assert gae(rewards, values, 1.0, 1.0) == pytest.approx(expected, abs=1e-9)


def test_prepare_passes_over_tokens_of_the_environment_and_from_sample_to_sample() -> None:
    """Steps: V = (0.5, 1, 0), r = (0, 0, 2), so with lambda = 0: A = (0.5, -1, 2)."""
    mask = np.array([False, True, False, True, False, True])
    found = ValueHead(ValueHeadConfig(gae_lambda=0.0)).prepare(
        HeadInputs(
            outputs=np.array([0, 0.5, 0, 1, 0, 0], np.float32),
            loss_mask=mask,
            streams={"rewards": np.array([0, 0, 0, 0, 0, 2], np.float32)},
        )
    )
    assert found["advantages"].tolist() == [0, 0.5, 0, -1, 0, 2]
    assert found["old_values"].tolist() == [0, 0.5, 0, 1, 0, 0]
    assert found["returns"].tolist() == [0, 1, 0, 0, 0, 2]


# -- the value loss --------------------------------------------------------------------------------


def value_loss(clip_eps: float | None, weights: Any = None) -> tuple[float, list[float], Any]:
    """Four values: moved 0.5 towards the return, not moved, not moved, moved 0.5 away from it; a
    fifth is off the mask."""
    values = torch.tensor([1.0, 0.0, 0.5, 1.0, 9.0], requires_grad=True)
    streams = {
        "values": values,
        "old_values": torch.tensor([0.5, 0.0, 0.5, 0.5, 0.0]),
        "returns": torch.tensor([2.0, 1.0, 0.25, 0.0, 0.0]),
    }
    zero = torch.zeros(5)
    outputs = ValueLoss(ValueLossConfig(clip_eps=clip_eps))(
        LossInputs(zero, zero, None, zero, torch.arange(5) < 4, weights, streams=streams)
    )
    (slope,) = torch.autograd.grad(outputs.loss, values)
    return float(outputs.loss.detach()), slope.tolist(), outputs.metrics


def test_the_value_loss_is_half_the_squared_error() -> None:
    loss, slope, metrics = value_loss(None)
    assert loss == pytest.approx((1 + 1 + 0.0625 + 1) / 2)
    assert slope == pytest.approx([-1, -1, 0.25, 1, 0])
    assert not metrics["clip_frac"].values.any()


def test_a_value_that_has_moved_far_towards_its_return_stops_training() -> None:
    """The first is held at 0.7, with error 1.3^2; the last has moved away and is pulled back."""
    loss, slope, metrics = value_loss(0.2)
    assert loss == pytest.approx((1.69 + 1 + 0.0625 + 1) / 2)
    assert slope == pytest.approx([0, -1, 0.25, 1, 0])
    assert metrics["clip_frac"].values[:4].tolist() == [1, 0, 0, 0]


def test_the_value_loss_is_weighed() -> None:
    loss, slope, _ = value_loss(None, torch.tensor([2.0, 0.5, 0.0, 1.0, 1.0]))
    assert loss == pytest.approx((2 + 0.5 + 1) / 2)
    assert slope == pytest.approx([-2, -0.5, 0, 1, 0])


# -- the algorithm ---------------------------------------------------------------------------------


def test_the_reward_is_at_the_last_trainable_token_and_all_of_them_train_the_critic() -> None:
    (rollout,) = make_group([0.75], prompt=2, completion=3)
    score(PPO(PPOConfig()), [rollout])
    (sample,) = rollout.samples
    assert sample.streams["rewards"].tolist() == [0, 0, 0, 0, 0.75]
    assert sample.streams["value_loss_weights"].tolist() == [0, 0, 1, 1, 1]
    assert sample.advantages is None and sample.rl_weights is None


def test_it_passes_the_conformance_checks() -> None:
    check_algorithm(PPO(PPOConfig()))


def test_a_run_without_the_critic_is_refused_with_the_table_to_add() -> None:
    config = load_config([CONFIG])
    without = config.trainer.model_copy(update={"heads": {}})
    with pytest.raises(ConfigError, match=r"'ppo' needs the head 'values'.*\[trainer.heads.values"):
        check(config.model_copy(update={"trainer": without}))


def test_neither_half_imports_torch() -> None:
    code = (
        "import sys, prime_rl_ppo, prime_rl_ppo.critic as c; c.register_heads(); "
        "c.register_losses(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- V of a problem that can be enumerated ---------------------------------------------------------

FIRST = {10: Fraction(3, 4), 11: Fraction(1, 4)}
SECOND = {
    10: {20: Fraction(1, 4), 21: Fraction(3, 4)},
    11: {20: Fraction(1, 2), 21: Fraction(1, 2)},
}
PROMPTS = {(1, 2): 1, (3, 4): -2}
"""Two tokens follow a prompt: the first by ``FIRST``, the second by ``SECOND``. The reward is the
prompt's number times ``reward``."""


def reward(first: int, second: int) -> Fraction:
    return Fraction({(10, 20): 4, (10, 21): 0, (11, 20): 1, (11, 21): -2}[first, second], 4)


def true_values() -> dict[tuple[int, ...], Fraction]:
    """The expected reward after each prefix, enumerated."""
    found = {}
    for prompt, scale in PROMPTS.items():
        for a in FIRST:
            found[*prompt, a] = scale * sum(p * reward(a, b) for b, p in SECOND[a].items())
        found[prompt] = sum((p * found[*prompt, a] for a, p in FIRST.items()), Fraction(0))
    return found


def rollout_of(prompt: tuple[int, ...], completion: tuple[int, ...], earned: float) -> Rollout:
    """Sampled from ``FIRST`` and ``SECOND``; the policy stays as it is."""
    probabilities = [float(FIRST[completion[0]])]
    if len(completion) > 1:
        probabilities.append(float(SECOND[completion[0]][completion[1]]))
    sample = Sample(
        token_ids=[*prompt, *completion],
        loss_mask=[False] * len(prompt) + [True] * len(completion),
        inference_logprobs=[*np.zeros(len(prompt)), *np.log(probabilities)],
    )
    rollout = Rollout(env="a", example_id=0, group_id=0, reward=earned, samples=[sample])
    rollout.assign_weights("rl", 0.0)
    return rollout


def every_rollout() -> Iterator[Rollout]:
    """16 of each prompt: each pair of tokens as often as it is probable."""
    for prompt, scale in PROMPTS.items():
        for a, p in FIRST.items():
            for b, q in SECOND[a].items():
                for _ in range(int(16 * p * q)):
                    yield rollout_of(prompt, (a, b), float(scale * reward(a, b)))


def with_truncated() -> Iterator[Rollout]:
    """The same, and as many that are cut behind their first token, before they earn anything."""
    yield from every_rollout()
    for prompt in PROMPTS:
        for a, p in FIRST.items():
            for _ in range(int(16 * p)):
                rollout = rollout_of(prompt, (a,), 0.0)
                rollout.is_truncated = True
                yield rollout


def learned(
    model_dir: Path, rollouts: list[Rollout], ppo: PPOConfig, head: dict[str, Any], steps: int = 400
) -> dict[tuple[int, ...], float]:
    """V after each prefix, as the critic gives it after training on the same rollouts."""
    config = TrainerConfig.model_validate(
        {
            "device": "cpu",
            "loss": {"type": "ppo_clip"},
            "losses": {} if ppo.critic == "value_bins" else {"value_loss": {"clip_eps": None}},
            "heads": {ppo.critic: {"lr": 0.1, "detach": True, **head}},
            "optim": {"weight_decay": 0.0, "max_norm": None},
            "scheduler": {"type": "cosine"},
        }
    )
    losses = Components.load(config, load_plugins(TRAINER_GROUP))
    trainer = Trainer(load_model(model_dir, config), losses, config, steps)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    for rollout in rollouts:
        score(PPO(ppo), [rollout])
    (frame,) = batch_frames(batch_to_pack(1, rollouts, losses, 512), 512)
    for step in range(1, steps + 1):
        rows = decode_batch(frame)[1]
        trainer.train_step(step, rows)

    assert all(map(torch.equal, before, trainer.model.parameters()))
    seen: dict[tuple[int, ...], float] = {}
    for row in rows:
        assert row.advantages is not None
        values = row.streams["returns"] - row.advantages
        ends = np.cumsum(row.sequence_lengths)
        for start, end in zip(ends - row.sequence_lengths, ends, strict=True):
            tokens = row.token_ids[start:end].tolist()
            for number in range(2, len(tokens)):
                seen[tuple(tokens[:number])] = float(values[start + number])
    return seen


@pytest.mark.parametrize("gae_lambda", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_critic_learns_the_enumerated_values(model_dir: Path, gae_lambda: float) -> None:
    seen = learned(model_dir, [*every_rollout()], PPOConfig(), {"gae_lambda": gae_lambda})
    expected = true_values()
    assert seen.keys() == expected.keys() and len(expected) == 6
    for prefix, value in expected.items():
        assert seen[prefix] == pytest.approx(float(value), abs=2e-3), prefix


@pytest.mark.slow
def test_with_bootstrap_truncated_rollouts_do_not_change_the_values(model_dir: Path) -> None:
    """Without, half of the rollouts earn nothing: the values of prompts are halved."""
    expected = true_values()
    with_it = learned(model_dir, [*with_truncated()], PPOConfig(bootstrap=True), {}, 250)
    without = learned(model_dir, [*with_truncated()], PPOConfig(), {}, 250)
    for prompt in PROMPTS:
        value = float(expected[prompt])
        assert with_it[prompt] == pytest.approx(value, abs=5e-3)
        assert without[prompt] == pytest.approx(value / 2, abs=5e-3)


@pytest.mark.slow
def test_a_critic_of_bins_learns_the_enumerated_values(model_dir: Path) -> None:
    # At lr = 0.3 the values end up to 0.02 away, by which CPU computes them; at 0.03, 0.003.
    head = {"low": -3.0, "high": 3.0, "bins": 61, "gae_lambda": 1.0, "lr": 0.03}
    expected = true_values()
    for rollouts in (every_rollout(), with_truncated()):
        ppo = PPOConfig(critic="value_bins", bootstrap=True)
        seen = learned(model_dir, [*rollouts], ppo, head)
        for prefix, value in expected.items():
            assert seen[prefix] == pytest.approx(float(value), abs=2e-2), prefix


def test_a_truncated_rollout_ends_with_the_value_behind_its_last_trainable_sample() -> None:
    """Steps: V = (1, 2), r = (0, 0), the second sample is left at 5, the third trains nothing; with
    lambda = 0 and gamma = 0.5: A = (0.5 * 2 - 1, 0.5 * 5 - 2)."""
    inputs = HeadInputs(
        outputs=np.array([0, 1, 0, 2, 9], np.float32),
        loss_mask=np.array([False, True, False, True, False]),
        streams={"rewards": np.zeros(5, np.float32), "truncated": np.ones(5, np.float32)},
        lengths=(2, 2, 1),
        ends=np.array([3, 5, 7], np.float32),
    )
    head = ValueHead(ValueHeadConfig(gamma=0.5, gae_lambda=0.0))
    assert head.prepare(inputs)["advantages"].tolist() == [0, 0, 0, 0.5, 0]
    whole = replace(inputs, streams=inputs.streams | {"truncated": np.zeros(5, np.float32)})
    assert head.prepare(whole)["advantages"].tolist() == [0, 0, 0, -2, 0]


@given(st.floats(-2, 3), st.integers(2, 80), st.floats(0.3, 2))
def test_a_histogram_is_a_distribution_around_its_return(
    earned: float, bins: int, sigma: float
) -> None:
    """Of scipy's normal distribution, cut at the edges."""
    config = ValueBinsConfig(low=-1.0, high=2.0, bins=bins, sigma=sigma)
    (found,) = histogram([earned], config)
    inside = min(max(earned, -1.0), 2.0)
    normal = NormalDist(inside, sigma * 3.0 / bins)
    mass = [normal.cdf(edge) for edge in config.edges]
    expected = [(b - a) / (mass[-1] - mass[0]) for a, b in pairwise(mass)]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert found.sum() == pytest.approx(1)


def test_the_loss_of_bins_is_the_cross_entropy() -> None:
    """Two bins: q = (1/4, 3/4), p = (1/2, 1/2), so the gradient is coef (p - q)."""
    logits = torch.zeros(2, 2, requires_grad=True)
    streams = {
        "value_bins": logits,
        "return_bins": torch.tensor([[0.25, 0.75], [float("nan")] * 2]),
        "returns": torch.zeros(2),
    }
    zero = torch.zeros(2)
    member = torch.tensor([True, False])
    outputs = ValueBinsLoss(ValueBinsLossConfig(coef=2.0))(
        LossInputs(zero, zero, None, zero, member, None, streams=streams)
    )
    outputs.loss.backward()  # type: ignore[no-untyped-call]
    assert float(outputs.loss.detach()) == pytest.approx(2 * np.log(2))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5], [0.0, 0.0]]))


def test_bins_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low is 2.0 and high 1.0, expected low below high"):
        ValueBinsConfig(low=2.0)


def test_the_setting_chooses_head_and_loss() -> None:
    ppo = PPO(PPOConfig(critic="value_bins", bootstrap=True))
    assert ppo.needs_heads == ("value_bins",) and ppo.losses == ("rl", "value_bins_loss")
    (rollout,) = make_group([0.75], prompt=2, completion=3)
    rollout.is_truncated = True
    score(ppo, [rollout])
    (sample,) = rollout.samples
    assert sample.streams["value_bins_loss_weights"].tolist() == [0, 0, 1, 1, 1]
    assert sample.streams["truncated"].tolist() == [0, 0, 1, 1, 1]


def test_the_reward_of_a_rollout_that_is_cut_stands_at_its_last_token() -> None:
    """Of 2 + 3 tokens 4 stay; the return of both sampled ones is the reward."""
    rollout = make_group([0.75])[0]
    rollout.cut(4)
    score(PPO(PPOConfig()), [rollout])
    assert rollout.samples[0].streams["rewards"].tolist() == [0.0, 0.0, 0.0, 0.75]
