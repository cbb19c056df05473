"""Metric names and reductions, worked out manually."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from prime_rl.orchestrator.context import Stopwatch
from prime_rl.testing import make_rollout
from prime_rl.testing.scoring import make_sample
from prime_rl_observers.rollout_metrics import (
    ProgressCounts,
    batch_metrics,
    describe,
    off_policy_metrics,
    outcome_metrics,
    rollout_metrics,
    solved_metrics,
    timing_metrics,
)


def test_describe_gives_the_worked_out_values():
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
    groups = [("a", each) for each in ([0, 0], [1, 1], [1, 0], [0.5, 1.0])]
    shares = {"none": 0.25, "all": 0.25, "some": 0.5}
    assert solved_metrics(groups) == {
        f"train/{env}/all/solved_{kind}": share
        for env in ("agg", "a")
        for kind, share in shares.items()
    }
    assert solved_metrics([]) == {}


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


def test_staleness_is_split_into_flight_and_queue():
    # three rollouts 3, 1 and 2 behind; 1, 0 and an unknown number of them while sampled
    metrics = off_policy_metrics([3, 1, 2], [1, 0, None])
    assert metrics["off_policy/mean"] == 2.0
    assert (metrics["off_policy/in_flight/mean"], metrics["off_policy/in_flight/max"]) == (0.5, 1.0)
    assert (metrics["off_policy/in_queue/mean"], metrics["off_policy/in_queue/max"]) == (1.5, 2.0)


def test_outcomes_of_rollouts_by_env():
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
    progress = ProgressCounts()
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


def test_seconds_waited_are_taken_and_the_name_stays(monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.context.time", clock := Clock())
    watch = Stopwatch()
    watch.add("wait/orchestrator/trainer", clock.now - 2.0)
    watch.add("wait/orchestrator/trainer", clock.now - 1.0)
    assert watch.take()["wait/orchestrator/trainer"] == 3.0
    assert watch.take() == {"wait/orchestrator/trainer": 0.0}


def test_members_that_a_plugin_stopped_are_a_share_of_their_own():
    """Of eight that ended, two were stopped; an env without any has no such metric."""
    metrics = outcome_metrics(
        {"a": {"finished": 5, "error/X": 1, "stopped": 2}, "b": {"finished": 8}}
    )
    assert metrics["train/a/all/stopped/mean"] == 0.25
    assert metrics["train/a/all/cancelled/mean"] == 0.0
    assert metrics["train/agg/all/stopped/mean"] == 0.125
    assert "train/b/all/stopped/mean" not in metrics
