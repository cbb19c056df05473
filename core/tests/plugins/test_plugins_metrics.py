"""``log_metric``: who logs, what a step reports of it, and what is refused."""

import asyncio
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from prime_rl import (
    Algorithm,
    Filter,
    Loss,
    Monitor,
    PluginConfig,
    PluginError,
    hookimpl,
    log_metric,
)
from prime_rl.orchestrator.buffer import FilterSlot
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.scoring import score_group, score_rollout
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch
from prime_rl.testing import logged_metrics, make_group, make_rollout, score


class Spread(Algorithm):
    """Credit is the reward; logs rewards, and the spread of each group weighted by its size."""

    name = "spread"

    @hookimpl
    async def score_rollout(self, rollout):
        await asyncio.sleep(0)
        log_metric("reward", rollout.reward)

    @hookimpl
    def score_group(self, group):
        rewards = [rollout.reward for rollout in group]
        log_metric("rewards/spread", max(rewards) - min(rewards), weight=len(group))
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


class Halve:
    """Wraps every hook that it can: before and after are its own, what it wraps is not."""

    @hookimpl(wrapper=True)
    def score_group(self, group):
        log_metric("members", len(group))
        yield
        for rollout in group:
            rollout.assign_advantages(rollout.advantages / 2)
            log_metric("credit", rollout.advantages[0])

    @hookimpl(wrapper=True)
    def filter_rollout(self, rollout):
        log_metric("asked", rollout.reward)
        reasons = yield
        log_metric("reasons", len(reasons))
        return reasons

    @hookimpl
    def observation_weights(self, rollout):
        log_metric("weighed", 1)

    @hookimpl
    def batch_packed(self, step):
        log_metric("packed", step)

    @hookimpl
    def step_finished(self, step):
        log_metric("finished", step)

    @hookimpl
    def weights_published(self, version):
        log_metric("published", version)


class Low(Filter):
    name = "low"

    @hookimpl
    def filter_rollout(self, rollout):
        log_metric("seen", rollout.reward)
        return "low" if rollout.reward < 0.5 else None


class Lines(Monitor):
    """Keeps every line."""

    name = "lines"

    def __init__(self):
        super().__init__(PluginConfig(), Path("."))
        self.lines = []

    def log(self, step, metrics):
        own = {name: value for name, value in metrics.items() if name.startswith("plugin/")}
        self.lines.append((step, own))


def hooks_of_a_run():
    hooks = Hooks()
    hooks.register(Halve(), "halve")
    return hooks


# -- who logs, and the mean ------------------------------------------------------------------------


def test_an_algorithm_and_a_wrapper_log_under_names_of_their_own():
    with logged_metrics() as metrics:
        for rewards in ([1.0, 0.0, 0.5], [4.0]):
            score(Spread(PluginConfig()), make_group(rewards), Halve())
    assert metrics == pytest.approx({
        "plugin/spread/reward": 5.5 / 4,
        "plugin/spread/rewards/spread": (3 * 1.0 + 1 * 0.0) / 4,
        "plugin/Halve/members": 2.0,  # of two calls: 3 and 1
        "plugin/Halve/credit": (0.5 + 0.0 + 0.25 + 2.0) / 4,
        "plugin/Halve/weighed": 1.0,
    })  # fmt: skip


def test_a_wrapper_logs_under_its_own_name_when_what_it_wraps_fails():
    class Fails(Algorithm):
        name = "fails"

        @hookimpl
        async def score_group(self, group):
            raise KeyError("judge")

    class Counts:
        @hookimpl(wrapper=True)
        def score_group(self, group):
            try:
                yield
            except KeyError:
                log_metric("failures", 1)
                raise

    with logged_metrics() as metrics:
        with pytest.raises(KeyError, match="judge"):
            score(Fails(PluginConfig()), make_group([1.0]), Counts())
        log_metric("after", 2)
    assert metrics == {"plugin/Counts/failures": 1.0, "plugin/test/after": 2.0}


def test_a_filter_and_the_wrapper_around_it():
    slot = FilterSlot("post_batch_filters", hooks_of_a_run(), [(Low(PluginConfig()), True)])
    with logged_metrics() as metrics:
        dropped = [list(slot.objectors(make_rollout(reward))) for reward in (1.0, 0.0, 0.25)]
    assert dropped == [[], ["low"], ["low"]]
    assert metrics == pytest.approx({
        "plugin/low/seen": 1.25 / 3, "plugin/halve/asked": 1.25 / 3, "plugin/halve/reasons": 2 / 3,
    })  # fmt: skip


async def test_a_batch_reports_what_was_logged_while_it_was_collected_over_all_envs():
    hooks, monitor = hooks_of_a_run(), Lines()
    envs = [scope(name, hooks, [Spread(PluginConfig())]) for name in ("a", "b")]
    reporter = Reporter(hooks, [monitor])

    async def collect(*groups):
        rollouts = [pair for pairs in groups for pair in pairs]
        # All at once: the tasks of both envs take turns.
        await asyncio.gather(*(score_rollout(env, rollout) for env, rollout in rollouts))
        for (env, _), *_ in groups:
            members = [rollout for each, rollout in rollouts if each is env]
            await score_group(env, members)

    a, b = ([(env, make_rollout(reward)) for reward in (1.0, 0.0)] for env in envs)
    await collect(a, b)
    hooks.batch_packed(1, [])
    reporter.batch_sent(Batch(1))
    await collect([(envs[1], make_rollout(3.0))])
    reporter.step_trained(1, {"loss/mean": 0.5, "plugin/pg/ratio": 2.0})
    reporter.version_served(1)
    reporter.batch_sent(Batch(2))
    reporter.batch_sent(Batch(3))
    first = {
        "plugin/spread/reward": 0.5,
        "plugin/spread/rewards/spread": 1.0,
        "plugin/halve/weighed": 1.0,
        "plugin/halve/members": 2.0,
        "plugin/halve/credit": 0.25,
        "plugin/halve/packed": 1.0,
    }
    second = {
        "plugin/spread/reward": 3.0,
        "plugin/spread/rewards/spread": 0.0,
        "plugin/halve/weighed": 1.0,
        "plugin/halve/members": 1.0,
        "plugin/halve/credit": 1.5,
        "plugin/halve/published": 1.0,
    }
    trained = {"plugin/pg/ratio": 2.0, "plugin/halve/finished": 1.0}
    assert monitor.lines == [(1, first), (1, trained), (2, second), (3, {})]


def test_values_of_weight_0_do_not_count_and_alone_give_no_metric():
    with logged_metrics("mine") as metrics:
        log_metric("x", 5, weight=0)
        log_metric("x", torch.tensor(math.nan), weight=torch.tensor(0))  # a mean over no token
        log_metric("x", 1.0, weight=0.5)
        log_metric("x", np.float32(3.0), weight=1.5)
        log_metric("y", 5, weight=0)
    assert metrics == {"plugin/mine/x": 2.5}  # (0.5 * 1 + 1.5 * 3) / 2


def test_a_tensor_is_logged_as_it_is_at_the_time_of_the_call():
    total = torch.zeros((), requires_grad=True)
    with logged_metrics() as metrics, torch.no_grad():
        for _ in range(3):
            total += 1
            log_metric("total", total)
    assert metrics == {"plugin/test/total": 2.0}


# -- threads ---------------------------------------------------------------------------------------


async def test_a_thread_of_asyncio_keeps_the_plugin_and_another_thread_is_an_error():
    errors = []

    class Threads(Algorithm):
        name = "threads"

        @hookimpl
        async def score_group(self, group):
            await asyncio.gather(*(asyncio.to_thread(log_metric, "x", x) for x in range(5)))
            thread = threading.Thread(target=self.log)
            thread.start()
            thread.join()

        def log(self):
            try:
                log_metric("x", 100)
            except PluginError as error:
                errors.append(str(error))

    with logged_metrics() as metrics:
        await score_group(scope("e", Hooks(), [Threads(PluginConfig())]), make_group([1.0]))
    assert metrics == {"plugin/threads/x": 2.0}
    (error,) = errors
    assert error == (
        "log_metric('x', ...): no hook, wrapper or loss of a plugin is called here. Log inside "
        "one, in threads by asyncio.to_thread, in tests by testing.logged_metrics()."
    )


# -- refused ---------------------------------------------------------------------------------------


def test_outside_of_a_call_it_is_an_error():
    with pytest.raises(PluginError, match=r"log_metric\('x', ...\): no hook, wrapper or loss"):
        log_metric("x", 1.0)


def test_registration_is_no_place_to_log():
    class Eager:
        @hookimpl
        def register_losses(self):
            log_metric("x", 1.0)
            return [Loss]

    hooks = Hooks("prime_rl.trainer")
    hooks.register(Eager(), "eager")
    with pytest.raises(PluginError, match="no hook, wrapper or loss"):
        hooks.hook.register_losses()


FAULT = (
    "expected a name of letters, digits and _.@- between slashes, a finite number or a 0-dim "
    "tensor, a weight >= 0"
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("", 1.0), "('', 1.0, 1.0)"),
        (("a b", 1.0), "('a b', 1.0, 1.0)"),
        (("/a", 1.0), "('/a', 1.0, 1.0)"),
        (("a//b", 1.0), "('a//b', 1.0, 1.0)"),
        ((None, 1), "(None, 1, 1.0)"),
        (("x", math.nan), "('x', nan, 1.0)"),
        (("x", -math.inf), "('x', -inf, 1.0)"),
        (("x", math.nan, 0.0), "('x', nan, 0.0)"),
        (("x", 1.0, -0.5), "('x', 1.0, -0.5)"),
        (("x", 1.0, math.inf), "('x', 1.0, inf)"),
        (("x", "one"), "('x', 'one', 1.0)"),
        (("x", torch.ones(2)), "('x', tensor([1., 1.]), 1.0)"),
    ],
)
def test_a_malformed_call_is_an_error_that_names_the_plugin(arguments, shown):
    class Bad(Algorithm):
        name = "bad"

        @hookimpl
        def score_group(self, group):
            log_metric(*arguments)

    with pytest.raises(PluginError) as caught:
        score(Bad(PluginConfig()), make_group([1.0]))
    assert str(caught.value) == f"plugin 'bad': log_metric{shown}: {FAULT}"


def test_a_negative_weight_in_a_tensor_is_found_when_the_step_is_reduced():
    found = r"plugin/test/x: a weight is -2.0, expected at least 0"
    with pytest.raises(PluginError, match=found), logged_metrics():
        log_metric("x", 1.0, weight=torch.tensor(-2))
