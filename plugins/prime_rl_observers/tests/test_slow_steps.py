"""Slow steps are reported, and long waits."""

from __future__ import annotations

import pytest

from prime_rl import PluginConfig
from prime_rl_observers import SlowSteps


def test_a_step_of_ten_times_the_median_says_where_the_time_went(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = SlowSteps(PluginConfig())

    def step(number: int, waited: float, trained: float, saving: float = 0.0) -> None:
        parts = {"time/wait_for_batch": waited, "time/forward_backward": trained}
        whole = {"time/step": waited + trained, "time/save_ckpt": saving}
        slow.step_done(number, parts | whole)

    step(1, 90.0, 1.0)  # nothing to compare with yet
    for number in range(2, 7):
        step(number, 0.5, 0.5)
    step(7, 8.0, 1.0)
    assert not caplog.records
    step(8, 27.0, 1.0, saving=2.0)
    assert caplog.messages == [
        "step 8 took 30.0 s, the median is 1.0 s: 27.0 s waiting for the orchestrator's batch, "
        "2.0 s handing over a checkpoint, 1.0 s forward and backward, 0.0 s publishing the weights"
    ]


def test_a_missing_batch_is_reported_once_while_it_is_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = SlowSteps(PluginConfig())
    slow.waiting(1, 90.0)  # nothing to compare with yet
    for step in range(1, 6):
        slow.step_done(step, {"time/step": 2.0, "time/save_ckpt": 0.0})
    for seconds in (1.0, 19.0):
        slow.waiting(6, seconds)
    assert not caplog.records
    for seconds in (20.0, 21.0, 300.0):
        slow.waiting(6, seconds)
    assert caplog.messages == [
        "step 6: waiting for the orchestrator's batch for 20.0 s, and a step takes 2.0 s (median). "
        "Its status and log say what it waits for."
    ]
    slow.waiting(7, 25.0)
    assert len(caplog.records) == 2
