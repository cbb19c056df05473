"""The monitor ``file``: ``metrics.jsonl``."""

import json
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest

from prime_rl import PluginConfig
from prime_rl.orchestrator.build import build_monitors
from prime_rl.orchestrator.reporter import in_background
from prime_rl.registry.manager import load_plugins
from prime_rl_app.config import build_config
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


def test_the_file_is_written_in_the_loop(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    assert in_background(monitor) is monitor
    monitor.close()


def test_the_file_monitor_is_always_there(tmp_path):
    config = build_config({"model": {"name": "m/m"}, "max_steps": 1})
    monitors = build_monitors(config, load_plugins(), tmp_path)
    assert [monitor.name for monitor in monitors] == ["file"]
    for monitor in monitors:
        monitor.close()
