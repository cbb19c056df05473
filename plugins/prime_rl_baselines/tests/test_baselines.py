"""The credit of each baseline, against numbers computed manually and formulas written in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import ConfigError, Rollout
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import check_algorithm, make_rollout, score
from prime_rl_baselines import DAPO, OPO, RLOO, Baseline, DrGRPO, GRPOStd, Reinforce

GROUP_RELATIVE = [RLOO, OPO, GRPOStd, DrGRPO, DAPO]


def made(cls: type[Baseline], **table: Any) -> Baseline:
    return cls(settings_of(cls, ALGORITHM, table, "algo"))


def group_of(rewards: list[float], lengths: list[int] | None = None) -> list[Rollout]:
    lengths = lengths or [3] * len(rewards)
    pairs = zip(rewards, lengths, strict=True)
    return [make_rollout(reward, completion=length) for reward, length in pairs]


def credit(algorithm: Baseline, group: list[Rollout]) -> list[float]:
    """One number per rollout, the same on all its tokens."""
    algorithm.score_group(group)
    found = []
    for rollout in group:
        assert rollout.advantages is not None
        assert len(rollout.advantages) == rollout.num_trainable_tokens
        assert (rollout.advantages == rollout.advantages[0]).all()
        found.append(float(rollout.advantages[0]))
    return found


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    """1 against (0 + 0.5) / 2, 0 against 0.75, 0.5 against 0.5."""
    assert credit(made(RLOO), group_of([1, 0, 0.5])) == pytest.approx([0.75, -0.75, 0])


def test_opo_weighs_the_baseline_by_length() -> None:
    """b = (1 * 1 + 0 * 3 + 1 * 4) / 8 = 0.625."""
    group = group_of([1, 0, 1], [1, 3, 4])
    assert credit(made(OPO), group) == pytest.approx([0.375, -0.625, 0.375])


def test_grpo_std_divides_by_the_deviation() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, variance 3/16."""
    std = 3**0.5 / 4
    expected = [0.75 / std, *[-0.25 / std] * 3]
    assert credit(made(GRPOStd), group_of([1, 0, 0, 0])) == pytest.approx(expected, rel=1e-5)


def test_dr_grpo_does_not() -> None:
    assert credit(made(DrGRPO), group_of([1, 0, 0, 0])) == [0.75, -0.25, -0.25, -0.25]


def test_reinforce_subtracts_the_mean_of_earlier_groups() -> None:
    """d = 1/2: after 1 and 0, b = (0 + 1/2) / (1 + 1/2) = 1/3; the first group has b = 0."""
    algorithm = made(Reinforce, decay=0.5)
    assert credit(algorithm, group_of([1, 0])) == [1, 0]
    assert credit(algorithm, group_of([1, 0])) == pytest.approx([2 / 3, -1 / 3])


def test_reinforce_with_decay_one_subtracts_the_mean_of_all_rewards() -> None:
    algorithm = made(Reinforce, decay=1)
    for reward in (1, 0, 0, 3):
        credit(algorithm, group_of([reward]))
    assert credit(algorithm, group_of([2])) == [1]


def test_the_baseline_of_reinforce_is_exact_after_a_resume(tmp_path: Path) -> None:
    straight, resumed = made(Reinforce), made(Reinforce)
    credit(straight, group_of([1, 0, 0.3]))
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert credit(resumed, group_of([0.7])) == credit(straight, group_of([0.7]))
    (tmp_path / "baseline.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"baseline\.json: not a baseline that reinforce saved"):
        resumed.load(tmp_path)


def test_dapo_penalizes_length_within_the_cache_and_above() -> None:
    """max_tokens 8, cache 4: nothing up to 4, a half at 6, all at 8 and 10."""
    dapo = made(DAPO, max_tokens=8, cache=4)
    assert isinstance(dapo, DAPO)
    assert [dapo.penalty(length) for length in (1, 4, 6, 8, 10)] == [0, 0, -0.5, -1, -1]
    shaped = np.array([1, 0.5, 0, -1])
    expected = (shaped - shaped.mean()) / shaped.std()
    found = credit(dapo, group_of([1, 1, 0, 0], [2, 6, 4, 9]))
    assert found == pytest.approx(expected.tolist(), rel=1e-5)


def test_dapo_gives_a_tied_group_nothing_whatever_its_lengths() -> None:
    assert credit(made(DAPO, max_tokens=8, cache=4), group_of([1, 1], [2, 8])) == [0, 0]


def test_a_cache_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache is 4096 and max_tokens 512: the penalty would"):
        made(DAPO, max_tokens=512)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 9)), min_size=2, max_size=8))
@settings(deadline=None, max_examples=30)
def test_the_formulas_as_written(members: list[tuple[float, int]]) -> None:
    r, lengths = (np.array(column, float) for column in zip(*members, strict=True))
    others = np.array([np.delete(r, i).mean() for i in range(len(r))])
    written = {
        RLOO: r - others,
        OPO: r - (lengths * r).sum() / lengths.sum(),
        DrGRPO: r - r.mean(),
        GRPOStd: (r - r.mean()) / (r.std() + 1e-6),
    }
    for cls, expected in written.items():
        group = group_of([*r], [int(n) for n in lengths])
        np.testing.assert_allclose(credit(made(cls), group), expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_ties_are_exactly_zero(reward: float, lengths: list[int]) -> None:
    for cls in GROUP_RELATIVE:
        assert not any(credit(made(cls), group_of([reward] * len(lengths), lengths)))


@pytest.mark.parametrize("cls", [*GROUP_RELATIVE, Reinforce])
def test_the_conformance_checks_pass(cls: type[Baseline]) -> None:
    check_algorithm(made(cls))


def test_penalties_train_the_same_tokens_with_their_weight() -> None:
    (rollout,) = group = group_of([1.0])
    score(made(Reinforce, penalties={"ce": 0.25}), group)
    assert rollout.samples[0].ce_weights is not None
    assert rollout.samples[0].ce_weights.tolist() == [0, 0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("rewards", [[0.7 + 0.2 + 0.1, 1.0], [0.1 + 0.2, 0.3, 0.3]])
def test_weighted_sums_that_differ_by_rounding_are_ties(rewards: list[float]) -> None:
    lengths = [2, 30, 4][: len(rewards)]
    for cls in GROUP_RELATIVE:
        table = {"max_tokens": 20, "cache": 10} if cls is DAPO else {}
        assert credit(made(cls, **table), group_of(rewards, lengths)) == [0.0] * len(rewards)


@pytest.mark.parametrize("cls", [GRPOStd, DAPO])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_deviation_that_is_rounding_of_float32_divides_nothing(cls: Any, scale: float) -> None:
    """One spacing apart; at 1000 it is 6e-5, and the 1e-6 beside the deviation no help."""
    reward = np.float32(scale * 0.7123459)
    pair = [float(reward), float(np.nextafter(reward, np.float32(1e9)))]
    assert credit(made(cls), group_of(pair)) == [0.0, 0.0]
