"""VinePPO by turns: its credit in hand-worked numbers, and a proof that it is unbiased."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl import BranchFailed, Prefix, Rollout
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import (
    FakeHost,
    check_algorithm,
    default_branch,
    make_rollout,
    make_sample,
    prove,
    score,
)
from prime_rl_credit import TurnVinePPO


def made(**table: Any) -> TurnVinePPO:
    return TurnVinePPO(settings_of(TurnVinePPO, ALGORITHM, table, "algo"))


def two_replies(reward: float) -> Rollout:
    """Prompt of 2, reply of 3, an answer of 2 of the env in one sample; a reply of 2 in another."""
    rollout = make_rollout(reward, tool=2)
    rollout.samples.append(make_sample(prompt=7, completion=2))
    return rollout


def branching(values: dict[tuple[int, int], list[float | None]]) -> FakeHost:
    """Rewards of branches by sample and end of the prefix. None: the branch fails."""

    def branch(prefix: Prefix, number: int) -> Rollout:
        assert prefix.end is not None
        reward = values[prefix.sample, prefix.end][number]
        if reward is None:
            raise BranchFailed("no")
        found = default_branch(prefix, number)
        found.reward = reward
        return found

    return FakeHost(branch=branch)


def test_a_reply_has_credit_for_what_it_adds_to_the_value() -> None:
    """V = 0.25 at the start and 0.75 after the env's answer; the rollout has 1."""
    rollout = two_replies(1.0)
    host = branching({(0, 2): [0, 1, 0, 0], (1, 7): [1, 1, 0, 1]})
    score(made(branches=4), [rollout], host=host)
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert rollout.metrics["vine_value"] == 0.25
    assert len(rollout.samples) == 2  # branches do not train


def test_branches_that_fail_are_left_out() -> None:
    rollout = two_replies(1.0)
    host = branching({(0, 2): [0, None], (1, 7): [None, None]})
    score(made(branches=2), [rollout], host=host)
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [0, 0, 0, 1, 1]
    host = branching({(0, 2): [None, None], (1, 7): [0.5, None]})
    rollout = two_replies(1.0)
    score(made(branches=2), [rollout], host=host)
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [0, 0, 0, 0.5, 0.5]
    rollout = two_replies(1.0)
    host = branching({(0, 2): [None, None], (1, 7): [None, None]})
    score(made(branches=2), [rollout], host=host)
    assert rollout.advantages is not None and not rollout.advantages.any()


def test_with_exact_values_it_is_the_gradient_of_the_expected_reward() -> None:
    proof = prove(
        made(), group_size=1, normalize_by="constant", problems=["two-turn"], staleness=[0]
    )
    assert proof.is_unbiased, proof.verdict
    assert proof.residual < 1e-6


def test_it_passes_the_conformance_checks() -> None:
    check_algorithm(made())


@pytest.mark.parametrize("branches", [0, -1])
def test_a_value_needs_a_branch(branches: int) -> None:
    with pytest.raises(Exception, match="branches"):
        made(branches=branches)
