"""Monitors that are slow, or broken: they run in the background."""

import threading
from pathlib import Path

from waiting import LIMIT

from prime_rl import Monitor, PluginConfig
from prime_rl.orchestrator.background import MAX_WAITING_ROLLOUTS, Background
from prime_rl.orchestrator.reporter import in_background
from prime_rl.testing import make_rollout


class Recorder(Monitor):
    """Records its calls; waits for ``gate``; fails at the steps ``fails``."""

    name = "recorder"

    def __init__(self, fails=()):
        super().__init__(PluginConfig(), Path("."))
        self.gate, self.fails = threading.Event(), fails
        self.gate.set()
        self.steps, self.tables, self.threads, self.closed = [], [], set(), False

    def log(self, step, metrics):
        self.gate.wait(LIMIT)
        self.threads.add(threading.get_ident())
        if step in self.fails:
            raise OSError("no disk")
        self.steps.append(step)

    def wants_rollouts(self, step):
        return step % 2 == 0

    def log_rollouts(self, step, rollouts, dropped):
        self.gate.wait(LIMIT)
        self.tables.append((step, len(rollouts), dropped))

    def close(self):
        self.closed = True


def test_a_monitor_runs_in_its_own_thread_in_order():
    recorder = Recorder()
    monitor = in_background(recorder)
    for step in range(20):
        monitor.log(step, {})
    monitor.log_rollouts(3, [make_rollout()], [None])
    monitor.close()
    assert recorder.steps == list(range(20)) and recorder.closed
    assert recorder.tables == [(3, 1, [None])]
    assert recorder.threads and threading.get_ident() not in recorder.threads
    assert monitor.name == "recorder"


def test_a_failing_monitor_is_reported_once_and_still_called(caplog):
    recorder = Recorder(fails={1, 2, 3})
    monitor = in_background(recorder)
    for step in range(1, 6):
        monitor.log(step, {})
    monitor.close()
    assert recorder.steps == [4, 5]
    assert caplog.messages == [
        "monitor 'recorder' failed at step 1; the run goes on: OSError: no disk",
        "monitor 'recorder' failed 3 times in all",
    ]


def test_a_slow_monitor_blocks_nothing_and_loses_lines(caplog):
    recorder = Recorder()
    recorder.gate.clear()
    monitor = Background(recorder, max_waiting=5)
    for step in range(1, 20):
        monitor.log(step, {})
        monitor.log_rollouts(step, [], [])
    assert recorder.steps == []  # and we are here
    recorder.gate.set()
    monitor.close()
    assert recorder.steps[0] == 1 and len(recorder.steps) < 19
    assert len(recorder.tables) == MAX_WAITING_ROLLOUTS
    assert caplog.messages[0].startswith("monitor 'recorder' is slower than the run: 5 lines wait")
    lost = 19 - len(recorder.steps)
    assert caplog.messages[1] == f"monitor 'recorder' was too slow: {lost} lines are missing"


def test_a_monitor_that_hangs_does_not_block_the_end_of_the_run(monkeypatch, caplog):
    monkeypatch.setattr("prime_rl.orchestrator.background.CLOSE_SECONDS", 0.05)
    recorder = Recorder()
    recorder.gate.clear()
    monitor = in_background(recorder)
    monitor.log(1, {})
    monitor.log(2, {})
    monitor.close()
    assert "monitor 'recorder' is not done" in caplog.messages[0]
    recorder.gate.set()
