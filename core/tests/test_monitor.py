"""The monitors: file, console, and those in the background."""

import json
import threading
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest
from waiting import LIMIT

from prime_rl import Monitor, PluginConfig
from prime_rl.orchestrator.background import MAX_WAITING_ROLLOUTS, Background
from prime_rl.orchestrator.reporter import in_background
from prime_rl.testing import make_rollout
from prime_rl_tools.metrics_file import FileConfig, FileMonitor


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_file_has_one_line_per_step_as_soon_as_it_is_logged(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"a/b": 1 / 3, "c": 2})
    (row,) = lines(tmp_path)
    assert (row["step"], row["a/b"], row["c"]) == (1, 1 / 3, 2)
    assert row["time"] > 0
    monitor.log(2, {"a/b": 0.5})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]
    monitor.close()


def test_values_that_are_not_finite_become_null(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"nan": float("nan"), "inf": float("inf"), "fine": 1.0})
    monitor.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (row,) = lines(tmp_path)
    assert (row["nan"], row["inf"], row["fine"]) == (None, None, 1.0)


def test_between_whole_lines_the_means_stay(tmp_path):
    monitor = FileMonitor(FileConfig(interval=10), tmp_path)
    means = {"train/agg/all/reward/mean": 0.5, "loss/mean": 1.0, "eval/e/all/reward/p90": 7.0}
    details = {
        "train/agg/all/reward/p90": 1.0,
        "train/agg/effective/reward/mean": 0.5,
        "train/agg/all/timing/total/mean": 2.0,
        "inference/kv_use/mean": 0.1,
    }
    for step in (9, 10):
        monitor.log(step, means | details)
    monitor.close()
    thin, whole = lines(tmp_path)
    assert thin.keys() == {"step", "time", *means}
    assert whole.keys() == {"step", "time", *means, *details}


def test_a_second_monitor_appends(tmp_path):
    for step in (1, 2):
        monitor = FileMonitor(PluginConfig(), tmp_path)
        monitor.log(step, {})
        monitor.close()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def test_a_line_that_a_full_disk_tears_is_removed(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"a": 0.5})
    size, limits = (tmp_path / "metrics.jsonl").stat().st_size, getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (size + 20, limits[1]))  # takes 20 bytes of the next line
    try:
        with pytest.raises(OSError, match="no room for a line"):
            monitor.log(2, {"a": 0.25})
    finally:
        setrlimit(RLIMIT_FSIZE, limits)
    assert [row["step"] for row in lines(tmp_path)] == [1]
    monitor.log(3, {})
    monitor.close()
    assert [row["step"] for row in lines(tmp_path)] == [1, 3]


# -- monitors that are slow, or broken ------------------------------------------------------


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


def test_the_file_is_written_in_the_loop(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    assert in_background(monitor) is monitor
    monitor.close()


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
