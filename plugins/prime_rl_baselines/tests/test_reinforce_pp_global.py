"""One whitening for several envs: numbers worked out manually, an oracle, and a run of two envs."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.testing import check_algorithm, make_rollout, run, score_batch
from prime_rl_baselines import ReinforcePPGlobal
from prime_rl_grpo import GRPOConfig
from prime_rl_tools.replay.compare import change_of
from prime_rl_tools.replay.score import algorithms_of, read_run_config, read_steps, replay


def algorithm():
    return ReinforcePPGlobal(GRPOConfig())


def of_env(env, group_id, rewards, completion=1):
    return [
        make_rollout(reward, env=env, group_id=group_id, prompt=2, completion=completion)
        for reward in rewards
    ]


def test_two_envs_have_one_mean_and_one_deviation():
    """Centered: 1/2, -1/2 in env a and 4, -4 in env b; the mean is 0, the variance
    (2 x 1/4 + 2 x 16) / 4 = 8.125."""
    groups = [of_env("a", 0, [1, 0]), of_env("b", 1, [9, 1])]
    score_batch(algorithm(), groups)
    std = 8.125**0.5
    credit = [float(rollout.advantages[0]) for group in groups for rollout in group]
    np.testing.assert_allclose(credit, [0.5 / std, -0.5 / std, 4 / std, -4 / std], rtol=1e-6)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=4),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_credit_is_that_of_an_oracle(parts):
    groups = [of_env(env, n, rewards, length) for n, (env, rewards, length) in enumerate(parts)]
    score_batch(algorithm(), groups)
    tokens = np.concatenate(
        [np.repeat(np.array(rewards) - np.mean(rewards), length) for _, rewards, length in parts]
    )
    found = np.concatenate([rollout.advantages for group in groups for rollout in group])
    if tokens.std() < 1e-6:
        np.testing.assert_allclose(found * tokens.std(), 0, atol=1e-5)
    else:
        np.testing.assert_allclose(found, (tokens - tokens.mean()) / tokens.std(), atol=1e-4)


def test_the_conformance_checks_pass():
    check_algorithm(algorithm())


@pytest.mark.slow
def test_a_run_whitens_over_its_envs_and_replay_ships_the_same_bytes(tmp_path):
    sizes = {"a": 2, "b": 4}
    envs = [{"id": "reverse-text", "name": env, "group_size": n} for env, n in sizes.items()]
    table = {
        "orchestrator": {
            "algo": {"type": "reinforce_pp_global"},
            "save_rollouts": True,
            "train": {"env": envs},
            "post_batch_filters": [],
        },
    }
    done = run(table, 3, folder=tmp_path)
    assert done.state == "done"

    steps = read_steps(done.path)
    # The mean is of all members, where one batch was full and the next one has the others, too.
    members = defaultdict(list)
    for step in steps:
        for each in step.rollouts:
            members[each.rollout.group_id].append(each.rollout.reward)

    compared = 0
    for step in steps:
        kept = [each.rollout for each in step.rollouts if each.dropped_by is None]
        if any(len(members[each.group_id]) < sizes[each.env] for each in kept):
            assert step is steps[-1]  # members that waited for a batch after the last are not saved
            continue
        tokens = []
        for rollout in kept:
            above = rollout.reward - np.mean(members[rollout.group_id])
            tokens.append(np.full(rollout.num_trainable_tokens, above))
        credit = np.concatenate(tokens)
        found = np.concatenate([rollout.advantages for rollout in kept])
        np.testing.assert_allclose(found, (credit - credit.mean()) / credit.std(), atol=1e-4)
        compared += {rollout.env for rollout in kept} == {"a", "b"}
    assert compared

    config = read_run_config(done.path)
    found = asyncio.run(replay(config, steps, algorithms_of(config)))
    for step in found.steps:
        change = change_of(config, found, step)
        assert change.frames_equal is True and change.num_changed == 0
