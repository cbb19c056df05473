"""The reporter: the metrics of a step for the monitors, and the hooks of a step."""

from pathlib import Path

import pytest

from prime_rl import Monitor, PluginConfig, hookimpl
from prime_rl.orchestrator.buffer import Batch
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.plugins.manager import Hooks
from prime_rl.testing import make_rollout


class Inline(Monitor):
    """Keeps every call; wants the rollouts of even steps."""

    name = "inline"

    def __init__(self):
        super().__init__(PluginConfig(), Path("."))
        self.steps, self.tables = [], []

    def log(self, step, metrics):
        self.steps.append(step)
        self.last = dict(metrics)

    def wants_rollouts(self, step):
        return step % 2 == 0

    def log_rollouts(self, step, rollouts, dropped):
        self.tables.append((step, len(rollouts), dropped))


def test_rollouts_are_logged_to_a_monitor_that_wants_them():
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor], 9)
    for step in (1, 2, 3, 4):
        reporter.batch_sent(Batch(step))
    assert [step for step, _, _ in monitor.tables] == [2, 4]


def test_the_metrics_of_a_step_of_two_envs():
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor], 9)
    a = [make_rollout(reward, env="a", group_id=0) for reward in (1.0, 0.0)]
    b = [make_rollout(reward, env="b", group_id=1) for reward in (1.0, 1.0)]
    for rollout in a:
        rollout.policy_version = 1
    for rollout in b:
        rollout.policy_version = 2
    reporter.group_scored(a, version=2)  # version 2 came while it was sampled
    reporter.group_scored(b, version=2)
    batch = Batch(4, kept=[*a, b[0]], seen=[*a, *b], dropped={id(b[1]): "post_batch_filters"})
    reporter.sources.append(lambda: {"more": 1.0})
    reporter.batch_sent(batch)
    last = monitor.last
    assert monitor.steps == [4] and last["more"] == 1.0
    # batch 4 trains version 3: a is 2 behind, one of them in flight; b is 1 behind, in the queue
    assert last["off_policy/mean"] == pytest.approx(5 / 3)
    assert last["off_policy/in_flight/mean"] == pytest.approx(2 / 3)
    assert last["off_policy/in_queue/mean"] == 1.0
    assert last["off_policy/behind/2"] == pytest.approx(2 / 3)
    assert last["train/a/effective/solved_some"] == last["train/b/effective/solved_all"] == 1.0
    assert last["train/agg/effective/solved_all"] == 0.5
    assert last["train/a/all/solved_some"] == 1.0 and last["train/b/all/solved_all"] == 1.0
    assert last["train/b/all/reward/mean"] == 1.0 and last["batch/b"] == pytest.approx(1 / 3)
    assert (last["batch/b/seen"], last["batch/b/trainable"]) == (2.0, 1.0)
    assert last["train/agg/all/is_completed/mean"] == 1.0
    assert monitor.tables == [(4, 4, [None, None, None, "post_batch_filters"])]


def test_the_trainers_times_have_names_of_their_own():
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor], 9)
    reporter.step_trained(3, {"time/step": 2.0, "time/wait_for_batch": 0.5, "loss/mean": 0.1})
    assert monitor.last == {
        "time/trainer/step": 2.0,
        "time/trainer/wait_for_batch": 0.5,
        "wait/trainer/orchestrator": 0.5,
        "loss/mean": 0.1,
    }


def test_the_hooks_of_a_step_are_called():
    class Plugin:
        calls = []

        @hookimpl
        def step_finished(self, step, metrics):
            self.calls.append((step, metrics))

        @hookimpl
        def weights_published(self, version):
            self.calls.append(version)

    hooks = Hooks()
    hooks.register(Plugin(), "x")
    reporter = Reporter(hooks, [], 9)
    reporter.step_trained(3, {"time/step": 2.0})
    reporter.version_served(3)
    assert Plugin.calls == [(3, {"time/step": 2.0}), 3]
