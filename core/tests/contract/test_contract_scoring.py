"""Stamping: sampled tokens go to the algorithm's component, and missing streams are errors."""

import asyncio

import numpy as np
import pytest

from prime_rl import Algorithm, PluginConfig, PluginError, StreamError, hookimpl
from prime_rl.orchestrator.scoring import score_batch, score_envs, score_rollout, sharing, stamp
from prime_rl.registry.calls import fault
from prime_rl.registry.manager import Hooks
from prime_rl.testing import make_rollout, score


def credited(**kwargs):
    rollout = make_rollout(1.0, prompt=1, completion=2, **kwargs)
    rollout.assign_advantages(0.5)
    return rollout


def stream(rollout, name):
    column = getattr(rollout.samples[0], name)
    return None if column is None else column.tolist()


def test_rl_ships_no_weight_stream():
    rollout = credited()
    stamp(rollout, "rl")
    for name in ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs"):
        assert stream(rollout, name) is None
    assert stream(rollout, "advantages") == [0, 0.5, 0.5]
    assert rollout.frozen


def test_ce_takes_the_sampled_tokens_out_of_rl():
    rollout = make_rollout(prompt=1, completion=2)
    stamp(rollout, "ce")
    assert stream(rollout, "ce_weights") == [0, 1, 1]
    assert stream(rollout, "rl_weights") == [0, 0, 0]
    assert stream(rollout, "advantages") is None


def test_ce_keeps_the_weights_of_observed_tokens():
    class Observed:
        @hookimpl
        def observation_weights(self, rollout):
            return [[0, 0, 0, 0.25]]

    rollout = make_rollout(prompt=1, completion=2, tool=1)
    hooks = Hooks()
    hooks.register(Observed())
    asyncio.run(score_rollout(hooks, rollout))
    stamp(rollout, "ce")
    assert stream(rollout, "ce_weights") == [0, 1, 1, 0.25]


def test_ref_kl_trains_the_sampled_tokens_against_the_reference():
    rollout = make_rollout(prompt=1, completion=2)
    rollout.assign_ref_logprobs([-1.0, -2.0])
    stamp(rollout, "ref_kl")
    assert stream(rollout, "ref_kl_weights") == [0, 1, 1]
    assert stream(rollout, "rl_weights") == [0, 0, 0]
    assert stream(rollout, "ref_logprobs") == [0, -1, -2]


def test_a_rollout_without_credit_that_ce_trains_leaves_rl():
    rollout = make_rollout(prompt=1, completion=2, tool=1)
    rollout.assign_weights("ce", [0, 0, 0, 0.25])
    rollout.assign_advantages(0.0)
    stamp(rollout, "rl")
    assert stream(rollout, "rl_weights") == [0, 0, 0, 0]
    assert stream(rollout, "ce_weights") == [0, 0, 0, 0.25]


def test_one_token_with_credit_keeps_the_rollout_in_rl():
    rollout = make_rollout(prompt=1, completion=2, tool=1)
    rollout.assign_weights("ce", [0, 0, 0, 0.25])
    rollout.assign_advantages([0.0, 0.5])
    stamp(rollout, "rl")
    assert stream(rollout, "rl_weights") is None


def test_a_rollout_without_credit_that_nothing_else_trains_is_left_to_the_filters():
    rollout = make_rollout(prompt=1, completion=2)
    rollout.assign_advantages(0.0)
    stamp(rollout, "rl")
    assert stream(rollout, "rl_weights") is None


def test_rl_weights_of_the_algorithm_stay_without_credit_too():
    rollout = make_rollout(prompt=1, completion=2, tool=1)
    rollout.assign_weights("ce", [0, 0, 0, 0.25])
    rollout.assign_weights("rl", [1.0, 0.0])
    rollout.assign_advantages(0.0)
    stamp(rollout, "rl")
    assert stream(rollout, "rl_weights") == [0, 1, 0, 0]


def test_rl_tokens_without_advantages_are_refused():
    with pytest.raises(StreamError) as caught:
        stamp(make_rollout(group_id=4), "rl")
    assert str(caught.value) == (
        "env 'test', group 4: tokens train in the rl component, which reads 'advantages', but no "
        "advantages were assigned. Assign them in score_rollout or score_group "
        "(rollout.assign_stream), set another action_loss, or add the head that gives them "
        "([trainer.heads.<name>])."
    )


def test_one_rl_token_is_enough_to_need_advantages():
    rollout = make_rollout(prompt=1, completion=2)
    rollout.assign_weights("rl", [0.0, 1.0])
    with pytest.raises(StreamError, match="no advantages"):
        stamp(rollout, "rl")
    none_left = make_rollout(prompt=1, completion=2)
    none_left.assign_weights("rl", [0.0, 0.0])
    stamp(none_left, "rl")


def test_ref_kl_tokens_without_a_reference_are_refused():
    with pytest.raises(StreamError) as caught:
        stamp(make_rollout(group_id=4), "ref_kl")
    assert str(caught.value) == (
        "env 'test', group 4: tokens train in the ref_kl component, which reads 'ref_logprobs', "
        "but no ref_logprobs were assigned. Assign them in score_rollout or score_group "
        "(rollout.assign_stream), set another action_loss, or add the head that gives them "
        "([trainer.heads.<name>])."
    )


# -- over the batch -------------------------------------------------------------------------


class Batch:
    """Credit is the number of groups; notes what it was given."""

    def __init__(self, events):
        self.events = events

    @hookimpl
    async def score_batch(self, groups):
        self.events.append([[rollout.reward for rollout in group] for group in groups])
        await asyncio.sleep(0)
        for rollout in (rollout for group in groups for rollout in group):
            rollout.assign_advantages(len(groups))


class Halves:
    def __init__(self, events):
        self.events = events

    @hookimpl(wrapper=True)
    def score_batch(self, groups):
        self.events.append("before")
        yield
        self.events.append("after")
        for rollout in (rollout for group in groups for rollout in group):
            rollout.assign_advantages(rollout.advantages / 2)


def test_score_batch_gets_groups_in_order_and_runs_in_its_wrapper():
    hooks, events = Hooks(), []
    assert not hooks.scores_batches
    hooks.register(Batch(events))
    hooks.register(Halves(events))
    assert hooks.scores_batches
    rollouts = [make_rollout(reward, group_id=group) for reward, group in ((1, 7), (2, 3), (3, 7))]
    scored = asyncio.run(score_batch(hooks, rollouts))
    assert events == ["before", [[2], [1, 3]], "after"]
    assert [rollout.reward for rollout in scored] == [2, 1, 3]
    assert all(set(rollout.advantages) == {1.0} for rollout in rollouts)


def test_score_batch_leaves_what_is_frozen_alone_and_is_not_called_without_groups():
    hooks, events, frozen = Hooks(), [], credited()
    hooks.register(Batch(events))
    stamp(frozen, "rl")
    assert asyncio.run(score_batch(hooks, [frozen])) == []
    assert asyncio.run(score_batch(hooks, [])) == []
    assert events == [] and set(frozen.advantages) == {0.5}


# -- on arrival -----------------------------------------------------------------------------


class Weigh:
    """Echo's half: tool tokens train by cross entropy."""

    def __init__(self, weights):
        self.weights = weights

    @hookimpl
    def observation_weights(self, rollout):
        return [self.weights]


def arrive(rollout, *plugins):
    hooks = Hooks()
    for index, plugin in enumerate(plugins):
        hooks.register(plugin, str(index))
    asyncio.run(score_rollout(hooks, rollout))


def test_observation_weights_become_ce_weights():
    rollout = make_rollout(prompt=1, completion=1, tool=2)
    arrive(rollout, Weigh([0, 0, 0.5, 0.25]))
    assert stream(rollout, "ce_weights") == [0, 0, 0.5, 0.25]


def test_observation_weights_and_assigned_weights_combine_by_the_larger():
    class Assign:
        @hookimpl
        def score_rollout(self, rollout):
            rollout.assign_weights("ce", [0, 0, 1.0, 0.125])

    rollout = make_rollout(prompt=1, completion=1, tool=2)
    arrive(rollout, Assign(), Weigh([0, 0, 0.5, 0.25]))
    assert stream(rollout, "ce_weights") == [0, 0, 1.0, 0.25]


def test_sampled_tokens_are_no_observations():
    with pytest.raises(StreamError) as caught:
        arrive(make_rollout(prompt=1, completion=1, tool=1), Weigh([0, 0.5, 0]))
    assert str(caught.value) == (
        "env 'test': observation_weights weighs tokens the policy sampled; expected 0.0 there"
    )


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(StreamError) as caught:
        arrive(make_rollout(reward))
    assert str(caught.value) == (
        f"env 'test', example 0: reward is {reward}, expected a finite number. Fix the "
        "environment's reward function."
    )


def test_without_weights_there_is_no_stream():
    rollout = make_rollout()
    arrive(rollout)
    assert stream(rollout, "ce_weights") is None


def test_stamping_does_not_freeze_the_array_of_a_plugin():
    shared = np.array([0, 0, 0.5], np.float32)
    first, second = (make_rollout(prompt=1, completion=1, tool=1) for _ in range(2))
    for rollout in (first, second):
        arrive(rollout, Weigh(shared))
        rollout.assign_advantages(1.0)
        stamp(rollout, "rl")
    assert stream(first, "ce_weights") == stream(second, "ce_weights") == [0, 0, 0.5]


def test_weights_an_algorithm_assigned_stay_as_they_are():
    rollout = make_rollout(prompt=1, completion=2)
    rollout.assign_weights("ce", [0.5, 0.25])
    stamp(rollout, "ce")
    assert stream(rollout, "ce_weights") == [0, 0.5, 0.25]
    assert stream(rollout, "rl_weights") == [0, 0, 0]


def test_rl_weights_assigned_beside_another_component_stay_too():
    rollout = credited()
    rollout.assign_weights("rl", [1.0, 0.0])
    stamp(rollout, "ce")
    assert stream(rollout, "ce_weights") == [0, 1, 1]
    assert stream(rollout, "rl_weights") == [0, 1, 0]


def test_a_repeated_observed_token_trains_in_the_earlier_sample_only():
    class Observed:
        @hookimpl
        def observation_weights(self, rollout):
            return [[0, 0, 0, 0.1, 0.1]]

    rollout = make_rollout(prompt=1, completion=2, tool=2)
    rollout.samples[0].is_repeat = np.array([True, False, False, True, False])
    hooks = Hooks()
    hooks.register(Observed())
    asyncio.run(score_rollout(hooks, rollout))
    assert stream(rollout, "ce_weights") == pytest.approx([0, 0, 0, 0, 0.1])


@pytest.mark.parametrize("component", ["rl", "ref_kl"])
def test_rollouts_without_sampling_logprobs_feed_ce_only(component):
    rollout = credited()
    rollout.assign_ref_logprobs([-1.0, -1.0])
    rollout.has_logprobs, rollout.source = False, "dataset"
    with pytest.raises(StreamError, match=r"compares with sampling.*\('dataset'\) gave none"):
        stamp(rollout, component)


def test_a_demonstration_trains_in_ce():
    rollout = make_rollout(prompt=1, completion=2)
    rollout.has_logprobs, rollout.source = False, "dataset"
    stamp(rollout, "ce")
    assert stream(rollout, "ce_weights") == [0, 1, 1]


# -- over several envs ----------------------------------------------------------------------


class Envs:
    """Credit is the number of envs; notes what it was given."""

    def __init__(self, events):
        self.events = events

    @hookimpl
    async def score_envs(self, batches):
        self.events.append({env: [[r.reward for r in g] for g in b] for env, b in batches.items()})
        await asyncio.sleep(0)
        for groups in batches.values():
            for rollout in (rollout for group in groups for rollout in group):
                rollout.assign_advantages(len(batches))


class Doubles:
    @hookimpl(wrapper=True)
    def score_envs(self, batches):
        yield
        for groups in batches.values():
            for rollout in (rollout for group in groups for rollout in group):
                rollout.assign_advantages(rollout.advantages * 2)


def test_score_envs_gets_the_groups_of_each_env_that_has_some_and_runs_in_its_wrapper():
    hooks, events = Hooks(), []
    hooks.register(Envs(events))
    assert hooks.scores_batches and hooks.scores_envs  # streams freeze after it
    hooks.register(Doubles())
    waiting = {
        "a": [make_rollout(r, env="a", group_id=g) for r, g in ((1, 3), (2, 3), (3, 7))],
        "b": [],
        "c": [make_rollout(4, env="c", group_id=5)],
    }
    asyncio.run(score_envs(hooks, waiting))
    assert events == [{"a": [[1, 2], [3]], "c": [[4]]}]
    credit = [set(rollout.advantages) for rollouts in waiting.values() for rollout in rollouts]
    assert credit == [{4.0}] * 4

    asyncio.run(score_envs(hooks, {"a": [], "b": []}))
    assert len(events) == 1


class Textless(Exception):
    def __str__(self):
        raise ZeroDivisionError


def test_an_error_whose_text_cannot_be_made_names_its_plugin():
    class Fails:
        @hookimpl
        def score_envs(self, batches):
            raise Textless

    hooks = Hooks()
    hooks.register(Fails(), "fails")
    with pytest.raises(Textless) as caught:
        asyncio.run(score_envs(hooks, {"a": [make_rollout(1, env="a")]}))
    said = "score_envs, envs 'a': Textless: (its text cannot be made: ZeroDivisionError)"
    assert said in fault(caught.value)


def test_an_error_over_several_envs_names_them():
    class Fails:
        name = "fails"

        @hookimpl
        def score_envs(self, batches):
            raise KeyError("gone")

    hooks = Hooks()
    hooks.register(Fails(), "fails")
    waiting = {env: [make_rollout(1, env=env)] for env in "ab"}
    with pytest.raises(KeyError) as caught:
        asyncio.run(score_envs(hooks, waiting))
    assert "plugin 'fails', score_envs, envs 'a', 'b': KeyError" in fault(caught.value)


def test_a_batch_of_several_envs_is_read_only():
    class Takes:
        @hookimpl
        def score_envs(self, batches):
            batches["a"] = ()

    class Pops:
        @hookimpl
        def score_envs(self, batches):
            batches["a"][0].pop()

    for plugin, error in ((Takes(), TypeError), (Pops(), PluginError)):
        hooks = Hooks()
        hooks.register(plugin)
        with pytest.raises(error):
            asyncio.run(score_envs(hooks, {"a": [make_rollout(1, env="a")]}))


def test_envs_share_a_hook_if_class_and_settings_are_the_same():
    class Settings(PluginConfig):
        scale: float = 1.0

    class One(Algorithm):
        name = "one"
        config_class = Settings

    class Other(One):
        name = "other"

    algorithms = {
        "a": One(Settings()),
        "b": Other(Settings()),
        "c": One(Settings(scale=2.0)),
        "d": One(Settings(scale=1.0)),
        "e": Other(Settings()),
    }
    assert sharing(algorithms) == [["a", "d"], ["b", "e"], ["c"]]


@pytest.mark.parametrize("hook", ["score_group", "score_batch", "score_envs"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_hook_that_makes_a_reward_no_finite_number_is_named(hook, value):
    class Spoils(Algorithm):
        name = "spoils"

        def spoil(self, called):
            if called == hook:
                rollout.reward = value

        @hookimpl
        def score_group(self, group):
            self.spoil("score_group")

        @hookimpl
        def score_batch(self, groups):
            self.spoil("score_batch")

        @hookimpl
        def score_envs(self, batches):
            self.spoil("score_envs")

    rollout = make_rollout(1.0, env="a", group_id=3)
    with pytest.raises(PluginError, match=f"env 'a', group 3: rollout.reward is {value}") as caught:
        score(Spoils(PluginConfig()), [rollout])
    assert f"plugin 'spoils', {hook}" in fault(caught.value)
