"""Broadcasts that some or all workers refuse, without vLLM."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from prime_rl.rundir.status import Status
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys
from prime_rl_vllm.admin import Admin
from prime_rl_vllm.state import State

MEETING = BroadcastGroup(
    directory="m", group="g", backend="gloo", rank=1, world_size=3, timeout=1.0, loopback=True
)


class Workers:
    """A fake ``AsyncLLM`` with two data-parallel engines of a worker each. ``answers`` are the
    workers' results of a broadcast."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = answers
        self.held = False
        self.engine_core = self

    async def call_utility_all_async(
        self, call: str, method: str, timeout: float | None, args: object, kwargs: object
    ) -> list[list[str | None]]:
        assert (call, method) == ("collective_rpc", "prime_rl_receive") and self.held
        return [[answer] for answer in self.answers]

    async def pause_generation(self, **_: object) -> None:
        self.held = True

    async def resume_generation(self) -> None:
        self.held = False

    async def update_weight_version(self, version: str) -> None:
        pass


async def receive(workers: Workers) -> State:
    state = State("m", "m", 64, Keys("admin"), Status(None), engine=workers)
    admin = Admin(state)
    await admin._hold()
    await admin._receive(MEETING, 1)
    return state


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    return signals


async def test_weights_that_all_workers_accept_are_the_new_version(ended: list[int]) -> None:
    assert (await receive(Workers(None, None))).version == 1 and not ended


async def test_weights_that_all_workers_refuse_leave_the_old_version(ended: list[int]) -> None:
    workers = Workers("called off", "called off")
    with pytest.raises(RequestError, match="still serving version 0: called off"):
        await receive(workers)
    assert not ended and not workers.held


async def test_an_update_that_makes_no_sense_is_refused() -> None:
    """Before the workers hear of it: of a version below 0, or with a meeting outside of the run."""
    state = State("m", "m", 64, Keys("admin"), Status(None), weights_roots=[Path("/run")])
    parallel = SimpleNamespace(data_parallel_size=1, world_size=2, local_engines_only=False)
    device = SimpleNamespace(device_type="cpu")
    config = SimpleNamespace(parallel_config=parallel, device_config=device)
    state.engine = SimpleNamespace(vllm_config=config)

    async def refusal(**change: object) -> str:
        async def body() -> AsyncIterator[bytes]:
            yield msgspec.json.encode({"weight_dir": "/run/broadcasts/step_1"} | change)

        http: Any = SimpleNamespace(stream=body)
        with pytest.raises(RequestError) as caught:
            await Admin(state).update_weights(http)
        return str(caught.value)

    assert "version is -5; it must be in [0, 2147483647]" in await refusal(version=-5)
    inside = msgspec.structs.replace(MEETING, directory="/run/m", group="/run/g")
    assert "this engine has 2 workers" in await refusal(
        meeting=msgspec.structs.replace(inside, rank=2)
    )
    assert "meeting.directory: m lies outside" in await refusal(meeting=MEETING)
    parallel.data_parallel_size = 2
    assert "this engine has 4 workers" in await refusal(meeting=inside)
    parallel.local_engines_only = True
    assert "takes weights from files only" in await refusal(meeting=inside)


async def test_workers_of_two_versions_end_the_server(ended: list[int]) -> None:
    """One worker has loaded the new weights, the other lost its connection just before."""
    workers = Workers(None, "the broadcast broke off")
    with pytest.raises(RequestError, match="failed half-way, so the server ends: one of 2 workers"):
        await receive(workers)
    assert ended == [signal.SIGTERM] and workers.held
