"""Engines receive new weights from the trainer's memory; an engine that cannot loads files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from loopback import listening
from safetensors.torch import load_file, save_file
from waiting import LIMIT, Clock, until

from prime_rl import EngineError, Weights, WeightsError
from prime_rl.inference import timing
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.inference.timing import RetryPolicy
from prime_rl.weights import versions
from prime_rl.weights.versions import FILES_WANTED, MEMORY, STABLE, has_files
from prime_rl_broadcast.connection import Member, header_of
from prime_rl_broadcast.delivery import BroadcastDelivery
from prime_rl_broadcast.group import BroadcastGroup, decline, opened

CPU = torch.device("cpu")


class Engine:
    """Receives weights both ways. Its weights are one number."""

    def __init__(self, receives: Any = None) -> None:
        self.version, self.value, self.ways = 0, 0.0, list[str]()
        self.receives = receives or {"workers": 1, "backends": ["gloo"]}
        self.refuses = self.away = False
        self.member = Member()

    async def handle(self, request: web.Request) -> web.Response:
        if self.away:
            assert request.transport is not None
            request.transport.abort()
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path == "/health":
            return web.json_response({"version": self.version, "receives": self.receives})
        if request.path == "/update_weights":
            body = await request.json()
            try:
                self.value = await asyncio.to_thread(self.take, body)
            except (WeightsError, RuntimeError) as error:
                status = 400 if isinstance(error, WeightsError) else 500
                return web.Response(status=status, text=str(error))
            self.version = body["version"]
        return web.json_response({"status": "ok"})

    def take(self, body: dict[str, Any]) -> float:
        if self.refuses:
            raise WeightsError("no memory")
        if "meeting" not in body:
            self.ways.append("file")
            return float(load_file(Path(body["weight_dir"]) / "model.safetensors")["w"])
        got: dict[str, torch.Tensor] = {}
        group = msgspec.convert(body["meeting"], BroadcastGroup)
        with self.member.join(group, CPU) as connection:
            connection.receive(lambda header: None, got.update)
        self.ways.append("memory")
        return float(got["w"])


class Trainer:
    """Behaves like the trainer's publisher. The weights are one number."""

    def __init__(self, broadcasts: Path) -> None:
        self.broadcasts, self.member = broadcasts, Member()
        self.groups: list[str] = []

    def announce(self, version: int) -> Weights:
        directory = self.broadcasts / f"step_{version}"
        directory.mkdir(parents=True)
        (directory / MEMORY).touch()
        return Weights(directory, version)

    async def pass_on(self, weights: Weights) -> None:
        while (group := opened(weights.directory)) is None:
            wanted = self.broadcasts / FILES_WANTED
            if wanted.exists() and decline(weights.directory):
                return self.write(weights)
            await asyncio.sleep(0.005)
        self.groups.append(group.group)
        try:
            await asyncio.to_thread(self.send, group, float(weights.version))
        except WeightsError:
            self.write(weights)

    def send(self, group: BroadcastGroup, value: float) -> None:
        tensors = {"w": torch.tensor(value)}
        with self.member.join(group, CPU) as connection:
            connection.send(header_of(tensors, {}), tensors.values())

    def write(self, weights: Weights) -> None:
        save_file({"w": torch.tensor(float(weights.version))}, weights.directory / ".new")
        (weights.directory / ".new").rename(weights.directory / "model.safetensors")
        (self.broadcasts / FILES_WANTED).unlink(missing_ok=True)


Run = Callable[..., Any]


@asynccontextmanager
async def started(
    tmp_path: Path,
    *engines: Engine,
    attempts: int = 1,
) -> AsyncIterator[tuple[Fleet, Trainer, Run]]:
    """A fleet that serves, and a function that publishes a version while the fleet runs."""
    trainer = Trainer(tmp_path / "broadcasts")
    trainer.broadcasts.mkdir()
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine)) for engine in engines]
        delivery = BroadcastDelivery(trainer.broadcasts, "gloo", timeout=LIMIT)
        policy = RetryPolicy(attempts=attempts, first_wait=0.01)
        first = Weights(tmp_path, 0)
        fleet = Fleet(urls, "k", first, FleetOptions(retry=policy, poll=0.02), delivery)
        stack.push_async_callback(fleet.close)
        await fleet.wait_ready(LIMIT)
        watching = asyncio.create_task(fleet.run())

        async def publish(version: int) -> None:
            weights = trainer.announce(version)
            passing_on = asyncio.create_task(trainer.pass_on(weights))
            await asyncio.wait_for(fleet.update_weights(weights.directory, version), LIMIT)
            await asyncio.wait_for(passing_on, LIMIT)

        try:
            yield fleet, trainer, publish
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    async with listening(app) as url:
        yield url


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the wait for files."""
    clock = Clock()
    monkeypatch.setattr(versions, "time", clock)
    return clock


async def test_versions_use_the_same_connections(tmp_path: Path) -> None:
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b) as (_fleet, trainer, publish):
        for version in (1, 2, 3):
            await publish(version)
            assert [a.value, b.value] == [version] * 2
        assert a.ways == b.ways == ["memory"] * 3
        assert len(set(trainer.groups)) == 1
        assert not has_files(trainer.broadcasts / "step_3")
        left = [p.name[:6] for p in (trainer.broadcasts / "meetings").iterdir()]
        assert left == ["group_"]  # folders of broadcasts are removed


async def test_an_engine_that_refuses_both_ways_is_taken_out_and_the_other_serves(
    tmp_path: Path,
) -> None:
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b) as (fleet, trainer, _publish):
        received = b.take

        def take_and_fail(body: dict[str, Any]) -> float:
            if "meeting" in body:
                received(body)
            raise WeightsError("no memory")

        b.take = take_and_fail  # type: ignore[method-assign]
        weights = trainer.announce(1)
        passing_on = asyncio.create_task(trainer.pass_on(weights))
        updating = asyncio.create_task(fleet.update_weights(weights.directory, 1))
        await passing_on
        trainer.write(weights)  # the broadcast succeeded: the trainer writes files between steps
        await asyncio.wait_for(updating, LIMIT)
        assert a.ways == ["memory"] and [r.serving for r in fleet.engines] == [True, False]


async def test_if_one_engine_refuses_all_get_files_and_the_next_version_is_broadcast(
    tmp_path: Path,
) -> None:
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b) as (fleet, trainer, publish):
        await publish(1)
        b.refuses = True
        await publish(2)
        assert a.value == 2 and a.ways == ["memory", "file"]
        assert b.value == 1 and [r.serving for r in fleet.engines] == [True, False]
        b.refuses = False
        await until(lambda: len(fleet.serving) == 2)
        assert b.value == 2 and b.ways[-1] == "file"
        await publish(3)
        assert [a.value, b.value] == [3, 3] and a.ways[-1] == b.ways[-1] == "memory"
        assert trainer.groups[-1] != trainer.groups[0]


async def test_a_dead_engine_does_not_block_the_others(tmp_path: Path) -> None:
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b) as (fleet, _trainer, publish):
        b.away = True
        await publish(1)
        assert a.value == 1 and fleet.engines[0].serving


async def test_the_trainer_writes_files_for_an_engine_that_returns(tmp_path: Path) -> None:
    """Not during the broadcast: later, when the trainer waits for a batch."""
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b) as (fleet, trainer, publish):
        b.away = True
        await until(lambda: len(fleet.serving) == 1)
        await publish(1)
        assert a.ways == ["memory"] and not has_files(trainer.broadcasts / "step_1")
        b.away = False
        await until((trainer.broadcasts / FILES_WANTED).exists)
        assert not fleet.engines[1].serving
        trainer.write(Weights(trainer.broadcasts / "step_1", 1))
        await until(lambda: len(fleet.serving) == 2)
        assert b.value == 1 and b.ways == ["file"]


async def test_without_engines_the_trainer_waits_for_the_first_that_returns(tmp_path: Path) -> None:
    a = Engine()
    async with started(tmp_path, a) as (fleet, trainer, _publish):
        a.away = True
        await until(lambda: not fleet.serving)
        weights = trainer.announce(1)
        passing_on = asyncio.create_task(trainer.pass_on(weights))
        with pytest.raises(EngineError):
            await fleet.update_weights(weights.directory, 1)
        assert not passing_on.done()
        a.away = False
        await asyncio.wait_for(passing_on, LIMIT)
        await until(lambda: a.value == 1.0 and len(fleet.serving) == 1)
        assert a.ways == ["file"]


async def test_a_wait_for_files_ends_when_the_trainer_has_the_next_version(
    tmp_path: Path,
) -> None:
    """Version 1 was broadcast to all, and an engine's answer was lost; then version 2 appears."""
    a = Engine()
    async with started(tmp_path, a) as (fleet, trainer, _publish):
        a.refuses = True
        one = trainer.announce(1)
        updating = asyncio.create_task(fleet.update_weights(one.directory, 1))
        await until(lambda: opened(one.directory) is not None)
        two = trainer.announce(2)
        await asyncio.sleep(0.1)
        assert not updating.done()  # version 2 is not announced yet: no engine could use it
        (two.directory / STABLE).touch()
        with pytest.raises(EngineError, match="version 1 was never written: the next is there"):
            await asyncio.wait_for(updating, LIMIT)


async def test_a_lost_answer_of_a_broadcast_affects_that_engine_only(
    tmp_path: Path, clock: Clock
) -> None:
    """The trainer has broadcast the version and takes a step, longer than any timeout here. The
    other engine serves meanwhile, and the update is over. A broadcast is not retried."""
    a, b = Engine(), Engine()
    async with started(tmp_path, a, b, attempts=3) as (fleet, trainer, publish):
        received, asked = b.take, list[int]()

        def take_and_fail(body: dict[str, Any]) -> float:
            asked.append(body["version"])
            received(body)
            raise RuntimeError("no memory")  # 500: retried, except in a broadcast

        b.take = take_and_fail  # type: ignore[method-assign]
        await publish(1)
        assert a.ways == b.ways == ["memory"] and asked == [1]
        assert not has_files(trainer.broadcasts / "step_1")
        assert [r.serving for r in fleet.engines] == [True, False]
        b.take = received  # type: ignore[method-assign]
        await until((trainer.broadcasts / FILES_WANTED).exists)
        clock.now += LIMIT + 1
        await until(lambda: "has not written version 1 within" in fleet.engines[1].reason)
        trainer.write(Weights(trainer.broadcasts / "step_1", 1))
        await until(lambda: len(fleet.serving) == 2)
        assert b.ways == ["memory", "file"] and b.value == 1


async def test_a_step_may_take_longer_than_a_broadcast(tmp_path: Path, clock: Clock) -> None:
    """The only engine's answer is lost. The trainer writes files after its step."""
    a = Engine()
    async with started(tmp_path, a) as (fleet, trainer, _publish):
        received = a.take

        def take_and_fail(body: dict[str, Any]) -> float:
            value = received(body)
            if "meeting" in body:
                raise WeightsError("no memory")
            return value

        a.take = take_and_fail  # type: ignore[method-assign]
        weights = trainer.announce(1)
        passing_on = asyncio.create_task(trainer.pass_on(weights))
        updating = asyncio.create_task(fleet.update_weights(weights.directory, 1))
        await passing_on
        await until((trainer.broadcasts / FILES_WANTED).exists)
        clock.now += LIMIT + 1
        await asyncio.sleep(0.1)
        assert not updating.done()
        trainer.write(weights)
        await asyncio.wait_for(updating, LIMIT)
        assert a.ways == ["memory", "file"] and a.value == 1


async def test_an_engine_that_joins_late_and_cannot_receive_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "START_GRACE", 0.0)
    a, b = Engine(), Engine()
    b.away = True
    async with started(tmp_path, a, b) as (fleet, _trainer, publish):
        b.receives, b.away = {"workers": 1, "backends": ["nccl"]}, False
        await until(lambda: "cannot receive weights by gloo" in fleet.engines[1].reason)
        await publish(1)
        assert a.ways == ["memory"] and [r.serving for r in fleet.engines] == [True, False]


async def test_an_engine_that_cannot_receive_is_refused_at_the_start(tmp_path: Path) -> None:
    words = r"cannot receive weights by gloo: its GET /health lists nccl .*'filesystem'"
    with pytest.raises(EngineError, match=words):
        async with started(tmp_path, Engine({"workers": 1, "backends": ["nccl"]})):
            pass


async def test_each_worker_of_an_engine_has_a_rank(tmp_path: Path) -> None:
    """The second engine's rank comes after the two of the first."""
    wide, narrow = Engine({"workers": 2, "backends": ["gloo"]}), Engine()
    ranks: list[tuple[int, int]] = []

    def note(body: dict[str, Any]) -> float:
        if "meeting" in body:
            ranks.append((body["meeting"]["rank"], body["meeting"]["world_size"]))
        raise WeightsError("seen enough")

    wide.take = narrow.take = note  # type: ignore[method-assign]
    async with started(tmp_path, wide, narrow) as (_, _trainer, publish):
        with suppress(EngineError):
            await publish(1)
    assert sorted(ranks) == [(1, 4), (3, 4)]
