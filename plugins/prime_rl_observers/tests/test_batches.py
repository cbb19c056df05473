"""The metrics of a batch, and its line in the log."""

import logging
from types import SimpleNamespace

import pytest

from prime_rl import ObserverHost, PluginConfig
from prime_rl.env.episode import RolloutResult
from prime_rl.orchestrator.buffer import LEFT_OUT, REJECTED, STALE
from prime_rl.rollout import Batch
from prime_rl.testing import make_rollout
from prime_rl_observers.batches import BatchMetrics, ConsoleLine


@pytest.fixture
def observer():
    config = SimpleNamespace(max_steps=9)
    shared = SimpleNamespace(run=SimpleNamespace(config=config))
    host = ObserverHost(shared, None, None, None, scored_alone=lambda env: env == "alone")
    return BatchMetrics(PluginConfig(), host)


async def test_the_metrics_of_a_step_of_two_envs(observer):
    a = [make_rollout(reward, env="a", group_id=0) for reward in (1.0, 0.0)]
    b = [make_rollout(reward, env="b", group_id=1) for reward in (1.0, 1.0)]
    for rollout in a:
        rollout.policy_version = 1
    for rollout in b:
        rollout.policy_version = 2
    observer.group_scored(a, version=2)  # version 2 came while it was sampled
    observer.group_scored(b, version=2)
    batch = Batch(4, kept=[*a, b[0]], seen=[*a, *b], dropped={id(b[1]): "post_batch_filters"})
    await observer.batch_taken(batch)
    last = observer.take_metrics()
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
    assert observer.take_metrics() == {}


async def test_what_does_not_train_is_counted_by_how_it_ended_and_by_filter(observer):
    a = [make_rollout(1.0, env="a") for _ in range(6)]
    b = [make_rollout(1.0, env="b") for _ in range(2)]
    batch = Batch(
        1,
        kept=a[:1],
        seen=[*a, *b],
        dropped={
            id(a[1]): STALE,
            id(a[2]): LEFT_OUT,
            id(a[3]): REJECTED,
            id(a[4]): "pre_batch_filters",
            id(a[5]): "pre_batch_filters",
            id(b[0]): "post_batch_filters",
            id(b[1]): STALE,
        },
        objections={
            id(a[3]): {REJECTED: "seen before"},
            id(a[4]): {"long": "9 tokens", "odd": "token 7"},
            id(a[5]): {"long": "8 tokens"},
            id(b[0]): {"long": "7 tokens"},
        },
    )
    await observer.batch_taken(batch)
    metrics = observer.take_metrics()
    assert {name: value for name, value in metrics.items() if "/dropped/" in name} == {
        "batch/agg/dropped/left_out": 1.0,
        "batch/agg/dropped/post_batch_filters/long": 1.0,
        "batch/agg/dropped/pre_batch_filters/long": 2.0,
        "batch/agg/dropped/pre_batch_filters/odd": 1.0,
        "batch/agg/dropped/sampler": 1.0,
        "batch/agg/dropped/stale": 2.0,
        "batch/a/dropped/left_out": 1.0,
        "batch/a/dropped/pre_batch_filters/long": 2.0,
        "batch/a/dropped/pre_batch_filters/odd": 1.0,
        "batch/a/dropped/sampler": 1.0,
        "batch/a/dropped/stale": 1.0,
        "batch/b/dropped/post_batch_filters/long": 1.0,
        "batch/b/dropped/stale": 1.0,
    }


async def test_groups_whose_members_come_alone_are_not_counted_as_solved(observer):
    for reward in (1.0, 0.0):
        observer.group_scored([make_rollout(reward, env="alone", group_id=3)], version=0)
    group = [make_rollout(reward, env="a", group_id=4) for reward in (1.0, 0.0)]
    observer.group_scored(group, version=0)
    alone = make_rollout(1.0, env="alone", group_id=3)
    await observer.batch_taken(Batch(1, kept=[*group, alone], seen=[*group, alone]))
    metrics = observer.take_metrics()
    assert not [name for name in metrics if name.startswith("train/alone/") and "solved" in name]
    assert metrics["train/agg/all/solved_some"] == metrics["train/a/all/solved_some"] == 1.0
    assert metrics["train/alone/all/reward/mean"] == 1.0


async def test_rollouts_that_no_batch_gets_are_counted_by_what_ended_them(observer):
    """Of env a four finished, two failed and two were cancelled: 8 ended."""
    group = [make_rollout(reward, env="a") for reward in (1.0, 0.0, 0.0, 0.0)]
    observer.group_scored(group, version=0)
    observer.rollouts_lost("a", "error/TimeoutError", 1)
    observer.rollouts_lost("a", "error/TimeoutError", 1)
    observer.rollouts_lost("a", "cancelled", 2)
    await observer.batch_taken(Batch(1, kept=group, seen=group))
    metrics = observer.take_metrics()
    assert metrics["train/a/all/is_completed/mean"] == 0.5
    assert metrics["train/a/all/has_error/mean"] == 0.25
    assert metrics["train/a/all/cancelled/mean"] == 0.25
    assert metrics["train/a/all/error/TimeoutError"] == 2.0
    assert metrics["off_policy/dropped"] == 2.0


async def test_what_is_lost_is_compared_with_what_was_dispatched(observer):
    """Of env a: two of 3 tokens train, one of 9 is too old, one of 5 timed out after two turns, one
    was cancelled in flight: no length. Of env b: one trains."""
    a = [make_rollout(1.0, env="a", completion=length) for length in (3, 3, 9)]
    (b,) = [make_rollout(0.0, env="b", completion=1)]
    nodes = [SimpleNamespace(sampled=s, mask=[s] * 5) for s in (False, True)]
    trace = SimpleNamespace(nodes=nodes)
    result = RolloutResult(ok=False, error_type="TimeoutError", num_turns=2, trace=trace)
    observer.rollout_failed("a", "TimeoutError", result.num_sampled, result.num_turns)
    observer.rollouts_lost("a", "cancelled", 1)
    await observer.batch_taken(Batch(1, kept=[*a[:2], b], seen=[*a, b], dropped={id(a[2]): STALE}))
    metrics = observer.take_metrics()
    found = {k: v for k, v in metrics.items() if k.startswith(("lost/a/", "dispatched/a/"))}
    assert found == {
        "lost/a/age": 2 / 5,
        "lost/a/failure": 0.0,
        "lost/a/time": 1 / 5,
        "lost/a/output_tokens/mean": (9 + 5) / 2,
        "dispatched/a/output_tokens/mean": (3 + 3 + 9 + 5) / 4,
        "lost/a/turns/mean": (1 + 2) / 2,
        "dispatched/a/turns/mean": (1 + 1 + 1 + 2) / 4,
        "lost/a/reward/mean": 1.0,
        "dispatched/a/reward/mean": 1.0,
    }
    assert metrics["lost/agg/age"] == 2 / 6 and metrics["lost/b/age"] == 0.0


def test_the_console_line(caplog):
    name = "train/agg/all"
    metrics = {"time/step": 0.714, f"{name}/reward/mean": 0.612, f"{name}/num_turns/mean": 1.5,
               f"{name}/num_branches/mean": 1.25, "off_policy/max": 2.0, "batch/agg/seen": 16.0,
               "batch/agg/trainable": 12.0, f"{name}/has_error/mean": 0.0625,
               f"{name}/is_truncated/mean": 0.5, "train/a/all/reward/mean": 0.25,
               "batch/a/seen": 4.0, "batch/a/trainable": 4.0}  # fmt: skip
    with caplog.at_level(logging.INFO):
        ConsoleLine(180).step(3, metrics, ["a"])
        ConsoleLine(180).step(3, metrics, ["a", "b"])
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
