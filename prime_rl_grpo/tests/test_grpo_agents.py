"""Credit in multi-agent envs: hierarchical_grpo and rae."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import ConfigError
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import FakeHost, check_algorithm, make_rollout, score
from prime_rl_grpo import RAE, HierarchicalGRPO, HierarchicalGRPOConfig, RAEConfig


def group_of(*members):
    """Rollouts of ``(agent, episode, reward)``."""
    group = []
    for agent, episode, reward in members:
        rollout = make_rollout(reward)
        rollout.agent, rollout.episode_id = agent, episode
        group.append(rollout)
    return group


def credit(algorithm, group):
    score(algorithm, group)
    return [round(float(rollout.advantages[0]), 6) for rollout in group]


def hierarchical(*agents):
    return HierarchicalGRPO(HierarchicalGRPOConfig(episode_agents=agents))


PROPOSED = (
    *(("proposer", 0, 0.1), ("solver", 0, 1.0), ("solver", 0, 0.0)),
    *(("proposer", 1, 0.6), ("solver", 1, 1.0), ("solver", 1, 1.0)),
)


def test_solvers_are_compared_in_their_episode_and_proposers_in_the_group():
    algorithm = HierarchicalGRPO(HierarchicalGRPOConfig())
    assert credit(algorithm, group_of(*PROPOSED)) == [-0.25, 0.5, -0.5, 0.25, 0, 0]


def test_without_episode_agents_every_agent_is_compared_within_the_group():
    # Proposers 0.1 and 0.6 have the mean 0.35, solvers 1, 0, 1, 1 have 0.75.
    expected = [-0.25, 0.25, -0.75, 0.25, 0.25, 0.25]
    assert credit(hierarchical(), group_of(*PROPOSED)) == expected


def test_a_cohort_of_one_gets_no_credit():
    group = group_of(("proposer", 0, 0.7), ("solver", 0, 0.3), ("solver", 1, 0.9))
    assert credit(hierarchical("solver"), group) == [0, 0, 0]


def test_one_episode_is_enough_for_its_agents():
    assert not HierarchicalGRPO.group_relative and not RAE.group_relative
    group = group_of(("proposer", 0, 0.5), ("solver", 0, 1.0), ("solver", 0, 0.0))
    assert credit(hierarchical("solver"), group) == [0, 0.5, -0.5]


def test_an_unknown_agent_is_named():
    with pytest.raises(ConfigError) as caught:
        score(
            hierarchical("solver", "slover"),
            group_of(*PROPOSED),
            host=FakeHost(env="duel", agents=("proposer", "solver")),
        )
    assert str(caught.value) == (
        "env 'duel': algo 'hierarchical_grpo': episode_agents names 'slover', and the env has "
        "'proposer', 'solver'. Name agents of the env, or use grpo if it has only one."
    )


def test_rae_subtracts_the_baseline_before_its_update():
    # b: 0 -> 0.05 -> 0.95 * 0.05 + 0.05 * 0.5 = 0.0725 -> 0.068875
    algorithm = RAE(RAEConfig())
    group = group_of(*(("agent", i, reward) for i, reward in enumerate([1.0, 0.5, 0.0])))
    assert credit(algorithm, group) == [1.0, 0.45, -0.0725]
    assert algorithm.baselines["agent"] == pytest.approx(0.068875)


def test_rae_keeps_a_baseline_for_each_agent():
    group = group_of(("white", 0, 1.0), ("black", 0, -1.0), ("white", 1, 1.0), ("black", 1, -1.0))
    assert credit(RAE(RAEConfig(decay=0.5)), group) == [1.0, -1.0, 0.5, -0.5]


def test_rae_keeps_its_baselines_across_groups():
    algorithm = RAE(RAEConfig(decay=0.5))
    assert credit(algorithm, group_of(("agent", 0, 1.0))) == [1.0]
    assert credit(algorithm, group_of(("agent", 0, 1.0))) == [0.5]


def test_rae_with_decay_0_compares_with_the_previous_reward():
    group = group_of(*(("agent", i, reward) for i, reward in enumerate([0.25, 1.0, 0.5])))
    assert credit(RAE(RAEConfig(decay=0)), group) == [0.25, 0.75, -0.5]


def test_a_decay_of_1_is_refused():
    with pytest.raises(ConfigError) as caught:
        settings_of(RAE, ALGORITHM, {"decay": 1.0}, "algo")
    assert (
        str(caught.value) == "algo (algorithm 'rae').decay: Input should be less than 1 (got 1.0)"
    )


@pytest.mark.parametrize("algorithm", [RAE(RAEConfig()), hierarchical("agent"), hierarchical()])
def test_it_passes_the_conformance_checks(algorithm):
    check_algorithm(algorithm)


@given(st.floats(0, 1), st.integers(1, 8), st.integers(1, 4))
def test_ties_are_exactly_zero_in_every_cohort(reward, episodes, solvers):
    members = [("proposer", e, reward) for e in range(episodes)]
    members += [("solver", e, reward) for e in range(episodes) for _ in range(solvers)]
    assert not any(credit(hierarchical("solver"), group_of(*members)))
