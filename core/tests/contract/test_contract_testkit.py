"""The kit that plugin authors test with: it must catch what it promises to catch."""

import asyncio

import numpy as np
import pytest

from prime_rl import Algorithm, PluginConfig, StreamError, hookimpl
from prime_rl.testing import check_algorithm, make_group, make_rollout, score


def test_a_made_rollout_has_the_tokens_asked_for():
    rollout = make_rollout(0.5, prompt=2, completion=3, tool=1)
    (sample,) = rollout.samples
    assert rollout.reward == 0.5
    assert sample.loss_mask.tolist() == [False, False, True, True, True, False]
    assert sample.inference_logprobs.tolist() == [0, 0, -1, -1, -1, 0]
    assert sample.roles.tolist() == [1, 1, 2, 2, 2, 3]
    assert sample.policy_versions.tolist() == [-1, -1, 0, 0, 0, -1]


def test_a_made_group_has_the_rewards_asked_for():
    assert [rollout.reward for rollout in make_group([1, 0, 0.5])] == [1, 0, 0.5]


class Base(Algorithm):
    name = "base"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


def test_a_sound_algorithm_passes():
    check_algorithm(Base(PluginConfig()))


class Divides(Base):
    @hookimpl
    def score_group(self, group):
        mean = np.float32(np.mean([rollout.reward for rollout in group]))
        with np.errstate(all="ignore"):
            for rollout in group:
                rollout.assign_advantages(np.float32(rollout.reward) / mean)


def test_dividing_by_a_zero_mean_is_caught():
    with pytest.raises((AssertionError, StreamError)):
        check_algorithm(Divides(PluginConfig()))


class Behind(Base):
    """Writes columns directly, past every check of ``assign_*``."""

    column = np.zeros(1)
    stream = "advantages"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            for sample in rollout.samples:
                setattr(sample, self.stream, self.column_of(sample))


class TooShort(Behind):
    def column_of(self, sample):
        return np.zeros(len(sample) - 1, np.float32)


class NotFinite(Behind):
    stream = "ref_logprobs"

    def column_of(self, sample):
        return np.full(len(sample), np.nan, np.float32)


class OffMask(Behind):
    def column_of(self, sample):
        return np.ones(len(sample), np.float32)


class LoneMember(Base):
    @hookimpl
    def score_group(self, group):
        rewards = [rollout.reward for rollout in group]
        for index, rollout in enumerate(group):
            rest = rewards[:index] + rewards[index + 1 :]
            rollout.assign_advantages(rollout.reward - sum(rest) / len(rest))


@pytest.mark.parametrize(
    ("algorithm", "error", "says"),
    [
        (TooShort, AssertionError, "advantages: wrong length"),
        (NotFinite, AssertionError, "ref_logprobs: not finite"),
        (OffMask, AssertionError, "advantages: credit off the mask"),
        (LoneMember, ZeroDivisionError, "division"),
    ],
)
def test_a_broken_algorithm_is_caught(algorithm, error, says):
    with pytest.raises(error, match=says):
        check_algorithm(algorithm(PluginConfig()))


def test_scoring_runs_as_in_the_orchestrator_setup_first_close_last():
    calls = []

    class Lifecycle(Base):
        async def setup(self):
            calls.append("setup")

        async def close(self):
            calls.append("close")

        @hookimpl
        async def score_rollout(self, rollout):
            await asyncio.sleep(0)
            calls.append("rollout")

        @hookimpl
        def score_group(self, group):
            calls.append("group")

    score(Lifecycle(PluginConfig()), make_group([1, 0]))
    assert calls == ["setup", "rollout", "rollout", "group", "close"]


def test_an_algorithm_that_gives_no_signal_is_caught():
    class Nothing(Algorithm):
        name = "nothing"

    with pytest.raises(StreamError, match="no advantages were assigned"):
        check_algorithm(Nothing(PluginConfig()))
