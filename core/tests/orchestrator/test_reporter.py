"""The reporter: the metrics of a step for the monitors, and the hooks of a step."""

from pathlib import Path
from types import SimpleNamespace

from prime_rl import Monitor, PluginConfig, hookimpl
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Batch
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
    reporter = Reporter(Hooks(), [monitor])
    for step in (1, 2, 3, 4):
        reporter.batch_sent(Batch(step))
    assert [step for step, _, _ in monitor.tables] == [2, 4]


def test_the_metrics_of_a_step_are_its_own_and_those_of_its_sources():
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor])
    rollouts = [make_rollout(1.0), make_rollout(0.0)]
    reporter.sources.append(lambda: {"more": 1.0})
    batch = Batch(4, kept=rollouts[:1], seen=rollouts, dropped={id(rollouts[1]): "a filter"})
    reporter.batch_sent(batch, [b"abc", b"de"])
    assert monitor.last.keys() == {"progress/seconds", "time/step", "wire/bytes", "more"}
    assert monitor.steps == [4] and monitor.last["wire/bytes"] == 5.0
    assert monitor.tables == [(4, 2, [None, "a filter"])]


def test_the_trainers_times_have_names_of_their_own():
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor])
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
    reporter = Reporter(hooks, [])
    reporter.step_trained(3, {"time/step": 2.0})
    reporter.version_served(3)
    assert Plugin.calls == [(3, {"time/step": 2.0}), 3]


async def test_seconds_are_since_the_first_batch_and_since_the_last_one(monkeypatch):
    clock = SimpleNamespace(now=3.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("prime_rl.orchestrator.reporter.time", fake)
    monitor = Inline()
    reporter = Reporter(Hooks(), [monitor])
    clock.now = 10.0
    await reporter.before_training()
    clock.now = 14.0
    reporter.batch_sent(Batch(1))
    assert (monitor.last["progress/seconds"], monitor.last["time/step"]) == (4.0, 4.0)
    clock.now = 20.5
    reporter.batch_sent(Batch(2))
    assert (monitor.last["progress/seconds"], monitor.last["time/step"]) == (10.5, 6.5)
