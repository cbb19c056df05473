"""Each env has hooks of its own; wrappers wrap every algorithm; observation weights combine."""

import asyncio

import numpy as np
import pytest

from prime_rl import Algorithm, PluginConfig, PluginError, Rollout, hookimpl
from prime_rl.registry.manager import Hooks, scope
from prime_rl.testing import make_group, make_rollout, score


class Constant(Algorithm):
    """Credits every rollout with its reward, sync."""

    name = "constant"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


class Patient(Algorithm):
    """The same, after waiting."""

    name = "patient"

    @hookimpl
    async def score_group(self, group):
        await asyncio.sleep(0)
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


class Clip:
    """Clips credit to 0.5."""

    @hookimpl(wrapper=True)
    def score_group(self, group):
        result = yield
        for rollout in group:
            rollout.assign_advantages(np.minimum(rollout.advantages, 0.5))
        return result


def run(hooks, group):
    asyncio.run(hooks.score_group(group))


def test_scopes_run_their_own_algorithm_only():
    shared = Hooks()
    one, two = Constant(PluginConfig()), Patient(PluginConfig())
    calls = []

    class Spy:
        @hookimpl
        def score_group(self, group):
            calls.append(group[0].env)

    shared.register(Spy(), "spy")
    first, second = scope("one", shared, [one]), scope("two", shared, [two])
    assert first.has_plugin("one:constant") and not first.has_plugin("two:patient")
    assert second.has_plugin("two:patient") and not second.has_plugin("one:constant")
    group = make_group([2.0])
    run(first, group)
    run(shared, group)
    assert calls == ["test", "test"]
    assert group[0].advantages.tolist() == [2.0, 2.0, 2.0]


def test_two_envs_of_one_algorithm_keep_their_settings_apart():
    class Settings(PluginConfig):
        scale: float = 1.0

    class Scaled(Algorithm):
        name = "scaled"
        config_class = Settings

        @hookimpl
        def score_group(self, group):
            for rollout in group:
                rollout.assign_advantages(rollout.reward * self.config.scale)

    shared = Hooks()
    scopes = [scope(str(s), shared, [Scaled(Settings(scale=s))]) for s in (1.0, 3.0)]
    groups = [make_group([1.0]), make_group([1.0])]
    for hooks, group in zip(scopes, groups, strict=True):
        run(hooks, group)
    assert [group[0].advantages[0] for group in groups] == [1.0, 3.0]


def test_a_scope_keeps_the_sources_of_the_shared_plugins(install):
    from prime_rl.registry.manager import load_plugins

    install()
    assert scope("env", load_plugins(), []).sources["demo"].distribution == "demo-plugin"


@pytest.mark.parametrize("algorithm", [Constant, Patient])
def test_a_wrapper_sees_the_work_done_sync_or_async(algorithm):
    group = make_group([2.0, 0.25])
    score(algorithm(PluginConfig()), group, Clip())
    assert [rollout.advantages[0] for rollout in group] == [0.5, 0.25]


def test_wrappers_nest_and_the_last_registered_is_outermost():
    order = []

    def wrapper(name):
        class Wrapper:
            @hookimpl(wrapper=True)
            def score_rollout(self, rollout):
                order.append(f"{name} in")
                result = yield
                order.append(f"{name} out")
                return result

        return Wrapper()

    class Inner:
        @hookimpl
        async def score_rollout(self, rollout):
            await asyncio.sleep(0)
            order.append("inner")

    hooks = Hooks()
    for name, plugin in (("a", wrapper("a")), ("inner", Inner()), ("b", wrapper("b"))):
        hooks.register(plugin, name)
    asyncio.run(hooks.score_rollout(make_rollout()))
    assert order == ["b in", "a in", "inner", "a out", "b out"]


def test_implementations_run_one_after_the_other_the_last_registered_first():
    order = []

    def plugin(name):
        class Slow:
            @hookimpl
            async def score_rollout(self, rollout):
                order.append(f"{name} starts")
                await asyncio.sleep(0)
                order.append(f"{name} ends")

        return Slow()

    class Sync:
        @hookimpl
        def score_rollout(self, rollout):
            order.append("sync")

    class First:
        @hookimpl(tryfirst=True)
        def score_rollout(self):
            order.append("first")

    hooks = Hooks()
    for name, each in (("f", First()), ("a", plugin("a")), ("s", Sync()), ("b", plugin("b"))):
        hooks.register(each, name)
    asyncio.run(hooks.score_rollout(make_rollout()))
    assert order == ["first", "b starts", "b ends", "sync", "a starts", "a ends"]


@pytest.mark.parametrize("algorithm", [Constant, Patient])
def test_a_wrapper_can_put_back_what_it_changed_when_scoring_fails(algorithm):
    class Fails(algorithm):
        name = "fails"

        @hookimpl
        async def score_rollout(self, rollout):
            raise KeyError("judge")

    seen = []

    class Watch:
        @hookimpl(wrapper=True)
        def score_rollout(self, rollout):
            try:
                return (yield)
            except KeyError as error:
                seen.append(error)
                raise

    with pytest.raises(KeyError, match="judge"):
        score(Fails(PluginConfig()), make_group([1.0]), Watch())
    assert len(seen) == 1


def test_a_wrapper_shapes_the_reward_before_the_algorithm_reads_it():
    class Shape:
        @hookimpl(wrapper=True)
        def score_group(self, group):
            for rollout in group:
                rollout.reward *= 10
            return (yield)

    group = make_group([1.0])
    score(Constant(PluginConfig()), group, Shape())
    assert group[0].advantages[0] == 10.0


# -- observation weights --------------------------------------------------------------------


def weights(*answers, samples: int = 1):
    hooks = Hooks()
    for index, answer in enumerate(answers):

        class Weigh:
            answer = None

            @hookimpl
            def observation_weights(self):
                return self.answer

        plugin = Weigh()
        plugin.answer = answer
        hooks.register(plugin, str(index))
    one = make_rollout(prompt=1, completion=1, tool=1)  # 3 tokens
    more = [make_rollout(prompt=1, completion=1).samples[0] for _ in range(samples - 1)]
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=0.0, samples=[*one.samples, *more])
    return hooks.observation_weights(rollout)


def test_without_implementations_observations_have_no_weights():
    assert weights() == [None]
    assert weights(None, [None]) == [None]


def test_the_larger_weight_of_each_token_wins():
    (combined,) = weights([[0.0, 0.0, 0.5]], [[0.25, 0.0, 0.125]], None)
    assert combined.dtype == np.float32
    assert combined.tolist() == [0.25, 0.0, 0.5]


def test_a_sample_may_be_left_out():
    first, second = weights([None, [0.0, 1.0]], [[0.0, 0.0, 2.0], None], samples=2)
    assert first.tolist() == [0.0, 0.0, 2.0] and second.tolist() == [0.0, 1.0]


def test_one_array_per_sample_is_needed():
    with pytest.raises(PluginError) as caught:
        weights([[0.0, 0.0, 1.0]], samples=2)
    assert str(caught.value) == (
        "env 'e': observation_weights gave 1 arrays, expected one for each of the rollout's "
        "2 samples"
    )


@pytest.mark.parametrize(
    ("column", "shape"),
    [([0.0, 1.0], "(2,)"), ([[0.0, 0.0, 1.0]], "(1, 3)"), ([0, 0, -1.0], "(3,)"),
     ([0, 0, float("nan")], "(3,)"), ([0, 0, float("inf")], "(3,)")],
)  # fmt: skip
def test_weights_must_be_one_finite_number_not_below_zero_per_token(column, shape):
    with pytest.raises(PluginError) as caught:
        weights([column])
    assert str(caught.value) == (
        "env 'e': observation_weights must give one finite weight >= 0 per token: "
        f"got shape {shape}, expected (3,)"
    )
