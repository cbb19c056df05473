"""Metrics: names and reductions by hand, and the file they end in."""

import json
import logging

import pytest

from prime_rl import PluginConfig
from prime_rl.monitor.console import Console
from prime_rl.monitor.file import FileMonitor
from prime_rl.monitor.metrics import (
    describe,
    group_metrics,
    off_policy_metrics,
    rollout_metrics,
)
from prime_rl.testing import make_rollout


def test_describe_by_hand():
    # sorted 0 1 2 3 10: p10 lies 0.4 of the way from 0 to 1, p90 0.6 of the way from 3 to 10
    assert describe([3, 1, 2, 0, 10], "x") == pytest.approx(
        {"x/mean": 3.2, "x/max": 10, "x/min": 0, "x/p10": 0.4, "x/p90": 7.2}
    )
    assert describe([], "x") == {}


def test_rollouts_over_all_envs_and_by_env():
    one = make_rollout(1.0, prompt=2, completion=3, env="a")
    two = make_rollout(0.0, prompt=2, completion=1, env="b")
    two.is_truncated, two.num_turns = True, 3
    one.rewards, one.metrics, two.metrics = {"lcs": 0.5}, {"len": 4.0}, {"len": 2.0}
    metrics = rollout_metrics([one, two], "all")
    assert metrics["train/agg/all/reward/mean"] == 0.5
    assert metrics["train/a/all/reward/mean"] == 1.0
    assert metrics["train/b/all/reward/mean"] == 0.0
    assert metrics["train/agg/all/num_total_tokens/mean"] == 4.0
    assert metrics["train/agg/all/num_input_tokens/mean"] == 2.0
    assert metrics["train/agg/all/num_output_tokens/mean"] == 2.0
    assert metrics["train/agg/all/num_output_tokens/max"] == 3.0
    assert metrics["train/agg/all/num_turns/mean"] == 2.0
    assert metrics["train/agg/all/num_branches/mean"] == 1.0
    assert metrics["train/agg/all/is_truncated/mean"] == 0.5
    assert metrics["train/agg/all/rewards/lcs/mean"] == 0.5  # over those that have the term
    assert metrics["train/agg/all/metrics/len/mean"] == 3.0
    assert metrics["train/b/all/metrics/len/mean"] == 2.0
    assert "train/b/all/rewards/lcs/mean" not in metrics


def test_no_rollouts_give_no_metrics():
    assert rollout_metrics([], "effective") == {}


def test_groups_by_what_they_solved():
    groups = [[0, 0], [1, 1], [1, 0], [0.5, 1.0]]
    assert group_metrics(groups, "t") == {
        "t/solved_none": 0.25,
        "t/solved_all": 0.25,
        "t/solved_some": 0.5,
    }
    assert group_metrics([], "t") == {}


def test_off_policy():
    assert off_policy_metrics([0, 1, 2]) == {"off_policy/mean": 1.0, "off_policy/max": 2.0}
    assert off_policy_metrics([]) == {}


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_file_has_one_line_a_step_as_soon_as_it_is_logged(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"a/b": 1 / 3, "c": 2})
    (row,) = lines(tmp_path)
    assert (row["step"], row["a/b"], row["c"]) == (1, 1 / 3, 2)
    assert row["time"] > 0
    monitor.log(2, {"a/b": 0.5})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]
    monitor.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"nan": float("nan"), "inf": float("inf"), "fine": 1.0})
    monitor.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (row,) = lines(tmp_path)
    assert (row["nan"], row["inf"], row["fine"]) == (None, None, 1.0)


def test_a_second_monitor_appends(tmp_path):
    for step in (1, 2):
        monitor = FileMonitor(PluginConfig(), tmp_path)
        monitor.log(step, {})
        monitor.close()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def test_the_console_line(caplog):
    name = "train/agg/all"
    metrics = {"time/step": 0.714, f"{name}/reward/mean": 0.612, f"{name}/num_turns/mean": 1.5,
               "off_policy/max": 2.0, "filters/post_batch_filters/dropped": 0.125,
               f"{name}/is_truncated/mean": 0.5}  # fmt: skip
    with caplog.at_level(logging.INFO):
        Console(180).step(3, metrics)
    assert caplog.messages == [
        "Step 3/180 | 0.71s | Reward 0.6120 | Turns 1.5 | Max Off-Policy 2 | Dropped 12.5% | "
        "Truncation 50.0%"
    ]
