"""Credit inside a rollout, against numbers computed manually."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from prime_rl import Algorithm, ConfigError, Rollout, Sample
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import (
    FakeHost,
    FakeReference,
    check_algorithm,
    conformance_group,
    make_group,
    make_rollout,
    score,
)
from prime_rl_credit import MTGRPO, GiGPO, VinePPO

A, B, C = 7, 8, 9
"""Observations: tokens of the env."""


def made(cls: type[Algorithm], **table: Any) -> Algorithm:
    return cls(settings_of(cls, ALGORITHM, table, "algo"))


def episode(
    observations: list[int], reward: float, rewards: list[float | None] | None = None
) -> Rollout:
    """Before each reply of two tokens, ids 1 and 2, one token of the env. ``rewards``: of the
    replies."""
    ids = [token for observation in observations for token in (observation, 1, 2)]
    roles = [1, 2, 2] * len(observations)
    sample = Sample(
        token_ids=ids,
        loss_mask=[role == 2 for role in roles],
        inference_logprobs=[0.0] * len(ids),
        roles=roles,
    )
    rollout = Rollout(env="test", example_id=0, group_id=0, reward=reward, samples=[sample])
    if rewards:
        # Without node_ids a turn counts as its number: replies are the odd ones.
        numbered = ((str(2 * k + 1), r) for k, r in enumerate(rewards) if r is not None)
        rollout.info["turn_rewards"] = dict(numbered)
    return rollout


def credit(algorithm: Algorithm, group: list[Rollout]) -> list[list[float]]:
    """By rollout and reply; both tokens of a reply have the same."""
    score(algorithm, group)
    found = []
    for rollout in group:
        assert rollout.advantages is not None
        pairs = rollout.advantages.reshape(-1, 2)
        assert (pairs[:, 0] == pairs[:, 1]).all()
        found.append([round(float(value), 5) for value in pairs[:, 0]])
    return found


def test_mt_grpo_adds_the_turns_own_credit_to_the_outcomes_but_for_the_last() -> None:
    """Outcomes 1, 0, 0.5: 0.5, -0.5, 0. First turns 0.2, 0.8: mean 0.5; the third has one reply."""
    group = [
        episode([A, B], 1.0, [0.2, 0.9]),
        episode([A, B], 0.0, [0.8, 0.0]),
        episode([A], 0.5, [0.5]),
    ]
    expected = [[-0.3 + 0.5, 0.5], [0.3 - 0.5, -0.5], [0.0]]
    assert credit(made(MTGRPO, std=False), group) == expected


def test_mt_grpo_weighs_the_outcome_and_divides_by_the_deviation() -> None:
    """Two values differ from their mean by one deviation each."""
    group = [episode([A, B], 1.0, [0.2, None]), episode([A, B], 0.0, [0.8, None])]
    found = credit(made(MTGRPO, omega=0.5), group)
    np.testing.assert_allclose(found, [[-1 + 0.5, 1], [1 - 0.5, -1]], atol=2e-5)


def test_a_reply_without_a_reward_has_the_outcome_alone() -> None:
    group = [episode([A, B, C], 1.0, [0.4, None, 1]), episode([A, B, C], 0.0, [0.0, None, 0])]
    assert credit(made(MTGRPO, std=False), group) == [[0.7, 0.5, 0.5], [-0.7, -0.5, -0.5]]


def test_a_group_without_rewards_of_turns_has_the_outcome_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rollouts may all have failed at something before the env rewards a turn."""
    algorithm = made(MTGRPO, std=False)
    for _ in range(2):
        group = [episode([A, B], 1.0), episode([A, B], 0.0)]
        assert credit(algorithm, group) == [[0.5, 0.5], [-0.5, -0.5]]
    assert caplog.text.count("has no rewards of turns") == 1
    assert "use grpo, or gigpo" in caplog.text


def test_mt_grpo_does_not_warn_of_a_group_after_one_with_rewards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = made(MTGRPO, std=False)
    credit(algorithm, [episode([A, B], 1.0, [0.2, None]), episode([A, B], 0.0, [0.8, None])])
    credit(algorithm, [episode([A, B], 1.0), episode([A, B], 0.0)])
    assert not caplog.text


def test_gigpo_compares_the_replies_to_one_observation() -> None:
    """gamma = 0.5, rewards 1 and 0 at the last replies.

    Returns: A 0.5 (first), B 1 (first), A 0, C 0, B 0 (second). State A: 0.5 and 0, mean 0.25.
    State B: 1 and 0, mean 0.5. C is alone. Episodes: 0.5 and -0.5.
    """
    group = [episode([A, B], 1.0), episode([A, C, B], 0.0)]
    found = credit(made(GiGPO, gamma=0.5, std=False), group)
    assert found == [[0.5 + 0.25, 0.5 + 0.5], [-0.5 - 0.25, -0.5, -0.5 - 0.5]]


def test_gigpo_compares_a_state_that_one_episode_visits_twice() -> None:
    """Returns 0.5 * 1 and 1 in the state A, mean 0.75; one episode has no episode credit."""
    assert credit(made(GiGPO, gamma=0.5, std=False, omega=2), [episode([A, A], 1.0)]) == [
        [-0.5, 0.5]
    ]


def test_gigpo_discounts_the_rewards_of_turns() -> None:
    """G of the first: 0.2 + 0.5 * 0.6 = 0.5 and 0.4; the seconds are in states of their own."""
    group = [episode([A, B], 1.0, [0.2, 0.6]), episode([A, C], 1.0, [0.4, 0.0])]
    found = credit(made(GiGPO, gamma=0.5, std=False), group)
    assert found == [[0.05, 0.0], [-0.05, 0.0]]


def test_gigpo_divides_by_the_deviations() -> None:
    group = [episode([A], 1.0), episode([A], 0.0)]
    np.testing.assert_allclose(credit(made(GiGPO), group), [[2], [-2]], atol=1e-4)


def with_rewards(rewards: Any) -> list[Rollout]:
    """The kit's groups, with rewards of the two turns."""
    group = conformance_group(rewards)
    for rollout in group:
        places = [k for k, turn in enumerate(rollout.turns) if turn.role == "assistant"]
        rollout.info["turn_rewards"] = {str(k): rollout.reward for k in places}
    return group


@pytest.mark.parametrize("std", [True, False])
def test_the_conformance_checks_pass(std: bool) -> None:
    check_algorithm(made(GiGPO, std=std))
    check_algorithm(made(GiGPO, std=std), make_group=with_rewards)
    check_algorithm(made(MTGRPO, std=std), make_group=with_rewards)


# -- vineppo ---------------------------------------------------------------------------------------

PROMPT = [101, 102]
REPLY = [ord(letter) for letter in "abcd"]


def answered(reward: float) -> Rollout:
    (rollout,) = make_group([reward], prompt=2, completion=4)
    rollout.samples[0].token_ids[:] = [*PROMPT, *REPLY]
    rollout.task = {"answer": "abcd"}
    return rollout


def branching(correct: Mapping[int, int]) -> FakeHost:
    """Of the branches after n tokens of the reply, the first ``correct[n]`` end in the answer."""

    def reply(ids: list[int], number: int) -> list[int]:
        done = len(ids) - len(PROMPT)
        return REPLY[done:] if number < correct[done] else [ord("x")]

    return FakeHost(policy=FakeReference(reply=reply))


def test_vineppo_credits_a_segment_with_what_it_adds_to_the_value() -> None:
    """Of 4 branches, 1 is right after the prompt and 3 after two tokens: V = 0.25 and 0.75."""
    rollout, host = answered(1.0), branching({0: 1, 2: 3})
    algorithm = made(VinePPO, branches=4, segments=2, max_tokens=8)
    score(algorithm, [rollout], host=host)
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [0.5, 0.5, 0.25, 0.25]
    assert rollout.metrics["vine_value"] == 0.25
    assert [len(prompt) for _, prompt in host.policy.prompts] == [2] * 4 + [4] * 4
    assert len(rollout.samples) == 1  # branches do not train


def test_the_credit_of_all_segments_is_the_reward_above_the_first_value() -> None:
    rollout, host = answered(0.5), branching({0: 2, 1: 0, 2: 4, 3: 1})
    score(made(VinePPO, branches=4, max_tokens=8), [rollout], host=host)
    assert rollout.advantages is not None
    assert rollout.advantages.tolist() == [-0.5, 1.0, -0.75, 0.25]
    assert rollout.advantages.sum() == 0.5 - 0.5


def test_a_branch_is_shorter_by_what_the_reply_has() -> None:
    asked: list[int] = []

    class Recording(FakeReference):
        async def generate(self, token_ids: Any, *, max_tokens: int, **settings: Any) -> Any:
            asked.append(max_tokens)
            return await super().generate(token_ids, max_tokens=max_tokens, **settings)

    host = FakeHost(policy=Recording())
    score(made(VinePPO, segments=2, max_tokens=4), [answered(0.0)], host=host)
    assert asked == [4, 2]


def test_several_replies_are_refused() -> None:
    rollout = make_rollout(1.0, tool=1)
    rollout.samples += make_rollout(1.0).samples
    with pytest.raises(ConfigError, match="'vineppo' branches a single reply"):
        score(made(VinePPO, max_tokens=8), [rollout])


def test_a_reward_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward: .*'nowhere'.* Expected a function"):
        made(VinePPO, max_tokens=8, reward="nowhere:score")


def single(rewards: Any) -> list[Rollout]:
    """The kit's groups, with one reply."""
    group = make_group(rewards, tool=2)
    for rollout in group:
        rollout.task = {"answer": "yes"}
    return group


def test_vineppo_passes_the_conformance_checks() -> None:
    check_algorithm(made(VinePPO, max_tokens=8), make_group=single)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_deviation_that_is_rounding_of_float32_divides_nothing(scale: float) -> None:
    reward = np.float32(scale * 0.7123459)
    pair = [float(reward), float(np.nextafter(reward, np.float32(1e9)))]
    group = [episode([A, B], each, [each, 0.0]) for each in pair]
    for cls in (MTGRPO, GiGPO):
        assert credit(made(cls), group) == [[0.0, 0.0], [0.0, 0.0]]
