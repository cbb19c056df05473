"""Metrics: names and reductions by hand, and the monitors they end in."""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Monitor, PluginConfig
from prime_rl.monitor.background import MAX_WAITING_ROLLOUTS, Background, in_background
from prime_rl.monitor.console import Console
from prime_rl.monitor.file import FileMonitor
from prime_rl.monitor.metrics import (
    Progress,
    batch_metrics,
    describe,
    group_metrics,
    off_policy_metrics,
    outcome_metrics,
    rollout_metrics,
    solved_metrics,
    timing_metrics,
)
from prime_rl.monitor.waiting import LAG_SECONDS, EventLoopLag, Stopwatch
from prime_rl.orchestrator.batch import Batch
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.versions import write_versions
from prime_rl.plugins.manager import load_plugins
from prime_rl.testing import make_rollout
from prime_rl.testing.rollouts import make_sample


def test_describe_by_hand():
    # sorted 0 1 2 3 10: p10 lies 0.4 of the way from 0 to 1, p90 0.6 of the way from 3 to 10
    assert describe([3, 1, 2, 0, 10], "x") == pytest.approx(
        {"x/mean": 3.2, "x/max": 10, "x/min": 0, "x/p10": 0.4, "x/p90": 7.2}
    )
    assert describe([], "x") == {}
    assert describe([7], "x")["x/p10"] == describe([7], "x")["x/p90"] == 7


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_percentiles_are_numpys(values):
    found = describe(values, "x")
    p10, p90 = np.percentile(values, (10, 90))
    assert (found["x/p10"], found["x/p90"]) == pytest.approx((p10, p90), rel=1e-9, abs=1e-6)


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
    assert metrics["train/agg/all/metrics/len/p90"] == pytest.approx(3.8)
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


def test_groups_by_what_they_solved_in_each_env():
    metrics = solved_metrics([("a", [1, 1]), ("a", [0, 0]), ("b", [1, 0]), ("b", [0, 0])])
    assert metrics["train/agg/all/solved_none"] == 0.5
    assert metrics["train/a/all/solved_all"] == 0.5 and metrics["train/a/all/solved_some"] == 0.0
    assert metrics["train/b/all/solved_all"] == 0.0 and metrics["train/b/all/solved_some"] == 0.5


def test_off_policy():
    assert off_policy_metrics([0, 1, 2, 1]) == {
        "off_policy/mean": 1.0,
        "off_policy/max": 2.0,
        "off_policy/behind/0": 0.25,
        "off_policy/behind/1": 0.5,
        "off_policy/behind/2": 0.25,
    }
    assert off_policy_metrics([]) == {}


def test_versions_behind_split_by_where_they_passed():
    # three rollouts 3, 1 and 2 behind; of these 1, 0 (and nobody knows) passed while sampled
    metrics = off_policy_metrics([3, 1, 2], [1, 0, None])
    assert metrics["off_policy/mean"] == 2.0
    assert (metrics["off_policy/in_flight/mean"], metrics["off_policy/in_flight/max"]) == (0.5, 1.0)
    assert (metrics["off_policy/in_queue/mean"], metrics["off_policy/in_queue/max"]) == (1.5, 2.0)


def test_what_became_of_rollouts_by_env():
    metrics = outcome_metrics(
        {"a": {"finished": 3, "error/TaskError": 1}, "b": {"error/TaskError": 2}},
        {"a": 1, "c": 1},
    )
    assert metrics == {
        "train/agg/all/is_completed/mean": 3 / 8,
        "train/agg/all/has_error/mean": 3 / 8,
        "train/agg/all/cancelled/mean": 2 / 8,
        "train/agg/all/error/TaskError": 3.0,
        "train/a/all/is_completed/mean": 3 / 5,
        "train/a/all/has_error/mean": 1 / 5,
        "train/a/all/cancelled/mean": 1 / 5,
        "train/a/all/error/TaskError": 1.0,
        "train/b/all/is_completed/mean": 0.0,
        "train/b/all/has_error/mean": 1.0,
        "train/b/all/cancelled/mean": 0.0,
        "train/c/all/is_completed/mean": 0.0,
        "train/c/all/has_error/mean": 0.0,
        "train/c/all/cancelled/mean": 1.0,
        "train/b/all/error/TaskError": 2.0,
    }
    assert outcome_metrics({}) == {}


def test_a_mixed_batch_by_env():
    seen = [make_rollout(env=env) for env in "aaab"]
    assert batch_metrics(seen, [seen[0], seen[3]]) == {
        "batch/agg/seen": 4.0,
        "batch/agg/trainable": 2.0,
        "batch/a": 0.5,
        "batch/a/seen": 3.0,
        "batch/a/trainable": 1.0,
        "batch/b": 0.5,
        "batch/b/seen": 1.0,
        "batch/b/trainable": 1.0,
    }


def test_samples_and_stops_of_a_mixed_batch():
    """What a hand-over cuts in two counts two samples; a demonstration's stop tells nothing."""
    one, two, shown = make_rollout(env="a"), make_rollout(env="b"), make_rollout(env="b")
    two.samples.append(make_sample(prompt=1, completion=2))
    one.stop_condition, two.stop_condition = "done", "max_turns"
    shown.source, shown.stop_condition = "dataset", "shown"
    metrics = rollout_metrics([one, two, shown], "all")
    assert metrics["train/agg/all/samples_per_rollout/mean"] == pytest.approx(4 / 3)
    assert metrics["train/b/all/samples_per_rollout/mean"] == 1.5
    assert metrics["train/b/all/num_output_tokens/max"] == 5.0  # 3 and 2
    stops = {key: v for key, v in metrics.items() if "stop_condition" in key}
    assert stops == {
        "train/agg/all/stop_condition/done": 0.5,
        "train/agg/all/stop_condition/max_turns": 0.5,
        "train/a/all/stop_condition/done": 1.0,
        "train/b/all/stop_condition/max_turns": 1.0,
    }


def test_seconds_by_stage():
    stages = {"setup": 1.0, "agent": 2.0, "agent/model": 1.5, "scoring": 0.5}
    metrics = timing_metrics([("a", stages), ("b", {"setup": 3.0})])
    assert metrics["train/agg/all/timing/setup/mean"] == 2.0
    assert metrics["train/a/all/timing/total/mean"] == 3.5  # the model's are the agent's
    assert metrics["train/a/all/timing/agent/model/max"] == 1.5
    assert metrics["train/b/all/timing/total/mean"] == 3.0
    assert "train/b/effective/timing/total/mean" in timing_metrics([("b", stages)], "effective")


def test_progress_counts_each_example_once():
    progress = Progress()
    first = [make_rollout(prompt=2, completion=3) for _ in range(2)]
    assert progress.step(first) == {
        "progress/tokens": 10.0, "progress/total_tokens": 10.0,
        "progress/input_tokens": 4.0, "progress/total_input_tokens": 4.0,
        "progress/output_tokens": 6.0, "progress/total_output_tokens": 6.0,
        "progress/rollouts": 2.0, "progress/total_rollouts": 2.0,
        "progress/tasks": 1.0, "progress/total_tasks": 1.0,
    }  # fmt: skip
    other = make_rollout()
    other.example_id = 7
    again = progress.step([first[0], other])
    assert (again["progress/tasks"], again["progress/total_tasks"]) == (2.0, 2.0)
    assert again["progress/total_rollouts"] == 4.0


def test_seconds_waited_are_taken_and_the_name_stays():
    watch = Stopwatch()
    watch.add("wait/orchestrator/trainer", time.perf_counter() - 2.0)
    watch.add("wait/orchestrator/trainer", time.perf_counter() - 1.0)
    assert watch.take()["wait/orchestrator/trainer"] == pytest.approx(3.0, abs=0.5)
    assert watch.take() == {"wait/orchestrator/trainer": 0.0}


async def test_what_blocks_the_event_loop_is_seen():
    lag = EventLoopLag()
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(LAG_SECONDS + 0.2)  # nobody runs meanwhile
    await asyncio.sleep(0.01)
    task.cancel()
    found = lag.take()
    assert found["event_loop_lag/max"] >= 0.19
    assert found["event_loop_lag/n"] >= 1
    assert lag.take() == {}


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


def test_what_a_full_disk_refuses_comes_with_the_next_line_and_half_a_line_never_stays(tmp_path):
    monitor = FileMonitor(PluginConfig(), tmp_path)
    monitor.log(1, {"a": 0.5})
    size, limits = (tmp_path / "metrics.jsonl").stat().st_size, getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (size + 20, limits[1]))  # takes 20 bytes of the next line
    try:
        with pytest.raises(OSError, match="too large"):
            monitor.log(2, {"a": 0.25})
    finally:
        setrlimit(RLIMIT_FSIZE, limits)
    assert [row["step"] for row in lines(tmp_path)] == [1]
    monitor.log(3, {})
    monitor.close()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_the_console_line(caplog):
    name = "train/agg/all"
    metrics = {"time/step": 0.714, f"{name}/reward/mean": 0.612, f"{name}/num_turns/mean": 1.5,
               f"{name}/num_branches/mean": 1.25, "off_policy/max": 2.0, "batch/agg/seen": 16.0,
               "batch/agg/trainable": 12.0, f"{name}/has_error/mean": 0.0625,
               f"{name}/is_truncated/mean": 0.5, "train/a/all/reward/mean": 0.25,
               "batch/a/seen": 4.0, "batch/a/trainable": 4.0}  # fmt: skip
    with caplog.at_level(logging.INFO):
        Console(180).step(3, metrics, ["a"])
        Console(180).step(3, metrics, ["a", "b"])
    line = (
        "Step 3/180 | 0.71s | Reward 0.6120 | Trainable 12/16 (75.0%) | Turns 1.5 | Branches 1.2 | "
        "Max Off-Policy 2 | Error 6.2% | Cancelled 0.0% | Truncation 50.0%"
    )
    assert caplog.messages == [
        line,
        line,
        "  |-- a | Reward 0.2500 | Trainable 4/4 (100.0%) | Turns 0.0 | Branches 0.0 | Error 0.0% "
        "| Truncation 0.0%",
        "  |-- b | Reward nan | Trainable 0/0 (0.0%) | Turns 0.0 | Branches 0.0 | Error 0.0% | "
        "Truncation 0.0%",
    ]


# -- monitors that are slow, or broken ------------------------------------------------------


class Recorder(Monitor):
    """Notes what it is told; waits for ``gate``; fails at the steps it is told to."""

    name = "recorder"

    def __init__(self, fails=()):
        super().__init__(PluginConfig(), Path("."))
        self.gate, self.fails = threading.Event(), fails
        self.gate.set()
        self.steps, self.tables, self.threads, self.closed = [], [], set(), False

    def log(self, step, metrics):
        self.gate.wait(5)
        self.threads.add(threading.get_ident())
        if step in self.fails:
            raise OSError("no disk")
        self.steps.append(step)

    def wants_rollouts(self, step):
        return step % 2 == 0

    def log_rollouts(self, step, rollouts, dropped):
        self.gate.wait(5)
        self.tables.append((step, len(rollouts), dropped))

    def close(self):
        self.closed = True


def test_rollouts_are_only_kept_for_a_monitor_that_wants_them(tmp_path):
    monitor = Inline()
    reporter = Reporter(tmp_path, [monitor], 9, save_rollouts=False)
    for step in (1, 2, 3, 4):
        reporter.step(Batch(step), {})
    assert [step for step, _, _ in monitor.tables] == [2, 4]


def test_a_full_disk_costs_the_rollouts_that_were_to_be_looked_at_and_not_the_run(tmp_path, caplog):
    reporter = Reporter(tmp_path, [], 9, save_rollouts=True)
    (tmp_path / "rollouts").touch()  # no folder can be made there
    reporter.step(Batch(3), {})
    assert "step 3: its rollouts are not kept: " in caplog.text


def test_a_monitor_works_in_a_thread_of_its_own_in_order():
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


def test_a_monitor_that_fails_is_reported_once_and_goes_on_being_told(caplog):
    recorder = Recorder(fails={1, 2, 3})
    monitor = in_background(recorder)
    for step in range(1, 6):
        monitor.log(step, {})
    monitor.close()
    assert recorder.steps == [4, 5]
    assert caplog.messages == [
        "monitor 'recorder' failed at step 1; the run goes on",
        "monitor 'recorder' failed 3 times in all",
    ]


def test_a_slow_monitor_holds_up_nobody_and_loses_lines(caplog):
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


def test_a_monitor_that_hangs_does_not_keep_the_run(monkeypatch, caplog):
    monkeypatch.setattr("prime_rl.monitor.background.CLOSE_SECONDS", 0.05)
    recorder = Recorder()
    recorder.gate.clear()
    monitor = in_background(recorder)
    monitor.log(1, {})
    monitor.log(2, {})
    monitor.close()
    assert "monitor 'recorder' is not done" in caplog.messages[0]
    recorder.gate.set()


# -- the reporter -------------------------------------------------------------------------------


class Inline(Recorder):
    """Called from the loop; keeps every line."""

    in_background = False

    def log(self, step, metrics):
        super().log(step, metrics)
        self.last = dict(metrics)


def test_a_step_of_two_envs_as_it_is_reported(tmp_path):
    monitor = Inline()
    reporter = Reporter(tmp_path, [monitor], 9, save_rollouts=False)
    a = [make_rollout(reward, env="a", group_id=0) for reward in (1.0, 0.0)]
    b = [make_rollout(reward, env="b", group_id=1) for reward in (1.0, 1.0)]
    for rollout in a:
        rollout.policy_version = 1
    for rollout in b:
        rollout.policy_version = 2
    reporter.group_scored(a, version=2)  # version 2 came while it was sampled
    reporter.group_scored(b, version=2)
    batch = Batch(4, kept=[*a, b[0]], seen=[*a, *b], dropped={id(b[1]): "post_batch_filters"})
    reporter.step(batch, {"more": 1.0})
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


def test_the_trainers_times_are_its_own(tmp_path):
    monitor = Inline()
    reporter = Reporter(tmp_path, [monitor], 9, save_rollouts=False)
    reporter.trained(3, {"time/step": 2.0, "time/wait_for_batch": 0.5, "loss/mean": 0.1})
    assert monitor.last == {
        "time/trainer/step": 2.0,
        "time/trainer/wait_for_batch": 0.5,
        "wait/trainer/orchestrator": 0.5,
        "loss/mean": 0.1,
    }


def test_which_versions_ran(tmp_path):
    hooks = load_plugins(disabled=["wandb"])
    write_versions(tmp_path, hooks, disabled=["losses"])
    found = json.loads((tmp_path / "plugins.json").read_text())
    rows = {(row["group"], row["plugin"]): row for row in found["plugins"]}
    assert rows["prime_rl", "core"]["distribution"] == "prime-rl-core"
    assert rows["prime_rl", "core"]["version"] == found["packages"]["prime-rl-core"]
    assert ("prime_rl", "wandb") not in rows and ("prime_rl.trainer", "losses") not in rows
    assert any(group == "prime_rl.trainer" for group, _ in rows)
