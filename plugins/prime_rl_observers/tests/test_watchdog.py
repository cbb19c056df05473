"""The watchdog ends a run in which nothing moves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_rl import RunError
from prime_rl.orchestrator.policy import LivePolicy
from prime_rl.rundir.status import Status
from prime_rl_observers import watchdog


class World:
    """What the watchdog sees of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.status = Status(None)
        self.policy = LivePolicy(0)
        self.fleet = SimpleNamespace(asleep=False)
        self.scoring = False
        self.inflight = 0
        run = SimpleNamespace(status=self.status, run_dir=run_dir)
        engines = SimpleNamespace(policy=self.policy, fleet=self.fleet)
        self.host = SimpleNamespace(
            shared=SimpleNamespace(run=run, engines=engines),
            num_inflight=lambda: self.inflight,
            is_scoring=lambda: self.scoring,
        )


async def watched(world: World, monkeypatch: pytest.MonkeyPatch, looks: int = 20) -> None:
    """Run the watchdog for some looks of a second each, on a clock of its own."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0)
    clock = iter(float(second) for second in range(10_000))
    watching = watchdog.Watchdog(watchdog.WatchdogConfig(timeout=5), world.host)  # type: ignore[arg-type]
    watching._clock = lambda: next(clock)  # type: ignore[method-assign]
    task = asyncio.create_task(watching.run())
    for _ in range(looks):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_watchdog_ends_a_run_in_which_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.status.report("sampling batch 5", waiting_for="trainer (weights of step 4)")
    with pytest.raises(RunError) as caught:
        await watched(world, monkeypatch)
    assert str(caught.value) == (
        "nothing has moved for 5 s (observers.watchdog.timeout): sampling batch 5, waiting for "
        "trainer (weights of step 4). The engines have version 0. See logs/latest/trainer.log."
    )


@pytest.mark.parametrize("busy", ["scoring", "evaluating", "sampling", "loading", "training"])
async def test_the_watchdog_waits_while_work_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    world = World(tmp_path)
    world.scoring = busy == "scoring"
    world.inflight = int(busy == "sampling")
    world.policy.evaluated = 0.5 if busy == "evaluating" else None
    world.policy.is_loading = busy == "loading"
    if busy == "training":  # a step may take longer than observers.watchdog.timeout
        trainer = Status(tmp_path / "status" / "trainer.json")
        trainer.report("training", step=4.0)
    await watched(world, monkeypatch)


async def test_what_is_in_flight_at_engines_that_sleep_does_not_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.inflight = 3
    world.fleet.asleep = True
    with pytest.raises(RunError, match="nothing has moved for 5 s"):
        await watched(world, monkeypatch)
