"""Colocated engines sleep once they have sampled what needs their version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.orchestrator.context import EarlierEngine
from prime_rl.orchestrator.engines import EngineKeeper
from prime_rl.orchestrator.policy import LivePolicy


class World:
    def __init__(self, tmp_path: Path, colocated: bool = True) -> None:
        self.calls: list[Any] = []

        async def sleep() -> None:
            self.calls.append("sleep")

        async def version_pending(version: int) -> None:
            self.calls.append(("pending", version))

        async def update_weights(folder: Path, version: int) -> None:
            self.calls.append((folder, version))

        self.policy = LivePolicy(1)
        self.awake = SimpleNamespace(
            stop=lambda: self.calls.append("limits stop"),
            go_on=lambda: self.calls.append("limits go on"),
        )
        fleet: Any = SimpleNamespace(update_weights=update_weights)
        engines = SimpleNamespace(
            policy=self.policy,
            awake=self.awake,
            fleet=SimpleNamespace(sleep=sleep),
            earlier={
                "ema": EarlierEngine(fleet, tmp_path / "averages"),
                "initial": EarlierEngine(fleet, tmp_path / "references", interval=4),
            },
        )
        run = SimpleNamespace(
            config=SimpleNamespace(deployment=SimpleNamespace(colocated=colocated)),
            status=SimpleNamespace(
                report=lambda state, waiting_for: self.calls.append((state, waiting_for))
            ),
            waited=SimpleNamespace(add=lambda name, started: self.calls.append(name)),
            run_dir=tmp_path,
        )
        observer: Any = SimpleNamespace(version_pending=version_pending)
        self.keeper = EngineKeeper(run, engines, [observer])  # type: ignore[arg-type]


async def test_before_batch_3_leaves_engines_finish_with_version_2_and_sleep(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    leaving = asyncio.create_task(world.keeper.batch_leaves(3))
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.calls == [("batch 3 is ready", "trainer (weights of step 2)")]
    await world.policy.advance(2)
    await leaving
    asleep = [("pending", 3), "limits stop", "sleep", "time/sleep_engines"]
    assert world.calls[1:] == asleep
    world.keeper.version_served(3)
    assert world.calls[5:] == ["limits go on"]


async def test_engines_with_gpus_of_their_own_do_not_sleep(tmp_path: Path) -> None:
    world = World(tmp_path, colocated=False)
    await world.keeper.batch_leaves(3)
    assert world.calls == []


@pytest.mark.parametrize("version", [1, 3])
async def test_the_engine_of_the_average_loads_the_average_of_a_pending_version(
    tmp_path: Path, version: int
) -> None:
    world = World(tmp_path)
    await world.keeper.version_pending(version)
    assert world.calls == [(tmp_path / "averages" / f"step_{version}", version)]


async def test_the_engine_of_the_reference_loads_every_fourth_version_once(tmp_path: Path) -> None:
    """Also if it hears of version 9 before it has loaded version 8."""
    world = World(tmp_path)
    for version in (3, 4, 5, 9, 10):
        await world.keeper.version_pending(version)
    of_reference = [call for call in world.calls if call[0].parent.name == "references"]
    assert of_reference == [(tmp_path / "references" / f"step_{n}", n) for n in (4, 8)]
