"""What polls for a file sees it at once on NFS, whose client remembers that a name was absent, and
outlives a read that NFS refuses."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from disks import SharedDisk
from waiting import Clock, until

from prime_rl import PluginConfig, RunView
from prime_rl.orchestrator import engines
from prime_rl.orchestrator.engines import EngineKeeper
from prime_rl.orchestrator.policy import LivePolicy, WeightWatcher
from prime_rl.plugins.launchers import Process
from prime_rl.rundir import polls
from prime_rl.rundir.checkpoints import CHECKSUMS, finished, whole_steps
from prime_rl.rundir.control import STOP, Stop, stop_asked
from prime_rl.rundir.launch import READY, Launch, wait_for_model
from prime_rl.rundir.rows import Tail
from prime_rl.rundir.status import Status
from prime_rl.trainer.publish import Broadcaster
from prime_rl.trainer.published import Publisher
from prime_rl.weights.versions import (
    FILES_WANTED,
    MEMORY,
    STABLE,
    Weights,
    only_in_memory,
    wait_for_files,
)


class Client:
    """Of NFS, with its cache of absent names: a lookup is answered from it, until the folder is
    opened (nfs(5): close-to-open consistency, ``lookupcache``)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.absent: set[str] = set()
        for module, name in ((os, "stat"), (io, "open")):
            monkeypatch.setattr(module, name, self._lookup(getattr(module, name)))
        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, self._opening(getattr(os, name)))

    def _lookup(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def lookup(path: Any, *args: Any, **settings: Any) -> Any:
            if str(path) in self.absent:
                raise FileNotFoundError(2, "absent, as it was before", str(path))
            try:
                return call(path, *args, **settings)
            except FileNotFoundError:
                self.absent.add(str(path))
                raise

        return lookup

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any = ".") -> Any:
            self.absent = {name for name in self.absent if os.path.dirname(name) != str(path)}
            return call(path)

        return opening


def test_the_client_of_this_test_remembers_what_was_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Client(monkeypatch)
    assert not (tmp_path / "late").exists()
    os.close(os.open(tmp_path / "late", os.O_CREAT))
    assert not (tmp_path / "late").exists()
    assert os.listdir(tmp_path) == ["late"] and (tmp_path / "late").exists()


class Loads:
    """A fleet, as the watcher sees it."""

    async def update_weights(self, weight_dir: Path, version: int) -> float:
        return 0.0


async def version_one(run_dir: Path) -> None:
    policy = LivePolicy(0)
    watching = asyncio.create_task(WeightWatcher(run_dir, policy, Loads(), []).run())  # type: ignore[arg-type]
    await policy.wait_for(1)
    watching.cancel()


async def files_of_version_one(run_dir: Path) -> None:
    (run_dir / "broadcasts/step_1").mkdir(parents=True)
    (run_dir / "broadcasts/step_1" / MEMORY).touch()
    await wait_for_files(lambda: Weights(run_dir / "broadcasts/step_1", 1))


async def wanted_files(run_dir: Path) -> None:
    """As rank 0, while it waits for a batch."""
    publisher = Publisher(run_dir / "broadcasts", 1)
    broadcaster = Broadcaster(None, publisher, object(), None)  # type: ignore[arg-type]
    while not broadcaster._files_wanted():
        await asyncio.sleep(0)


each_poll = pytest.mark.parametrize(
    ("poll", "files"),
    [
        (version_one, (f"broadcasts/step_1/{STABLE}",)),
        (files_of_version_one, ("broadcasts/step_1/model.safetensors",)),
        (wanted_files, (f"broadcasts/{FILES_WANTED}",)),
        (stop_asked, (STOP,)),
        (wait_for_model, (READY,)),
    ],
)


@each_poll
async def test_a_file_that_was_absent_is_seen_when_it_comes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    poll: Callable[[Path], Awaitable[None]],
    files: tuple[str, ...],
) -> None:
    (tmp_path / "broadcasts/step_0").mkdir(parents=True)
    client = Client(monkeypatch)
    polling = asyncio.ensure_future(poll(tmp_path))
    for name in files:
        for path in reversed(list((tmp_path / name).parents)):
            if tmp_path in path.parents:
                path.mkdir(exist_ok=True)
                await asyncio.sleep(0.06)  # its folder is there, and polled, before the file is
        await asyncio.sleep(0.06)
        os.close(os.open(tmp_path / name, os.O_CREAT))  # on the server, by another client
    async with asyncio.timeout(60):
        await polling
    assert not any(path.endswith(name) for path in client.absent for name in files)


@each_poll
async def test_a_read_that_the_disk_refuses_ends_no_poll(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    poll: Callable[[Path], Awaitable[None]],
    files: tuple[str, ...],
) -> None:
    (tmp_path / "broadcasts/step_0").mkdir(parents=True)
    calls = itertools.count(1)
    luck = random.Random(0)  # a fixed period could meet the same call of each look
    for name in ("listdir", "scandir"):
        call = getattr(os, name)

        def at_times(path: Any = ".", call: Any = call) -> Any:
            if str(path).startswith(str(tmp_path)) and next(calls) and luck.random() < 0.5:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return call(path)

        monkeypatch.setattr(os, name, at_times)

    polling = asyncio.ensure_future(poll(tmp_path))
    await until(lambda: next(calls) > 10)
    assert not polling.done()
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    async with asyncio.timeout(60):
        await polling


def test_a_version_that_cannot_be_looked_at_is_not_taken_for_files(tmp_path: Path) -> None:
    """Engines would be asked to load what is not there, and their refusal ends the run."""
    (tmp_path / "step_1").touch()  # not a folder: no names, and no error
    assert not only_in_memory(tmp_path / "step_1")
    too_long = tmp_path / ("n" * 300)  # ENAMETOOLONG, whatever the user may read
    assert only_in_memory(too_long)


def test_a_read_that_keeps_failing_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(polls, "time", clock)
    error = OSError(errno.EIO, "Input/output error")
    for second in range(100):
        polls.poll_failed(tmp_path, error)
        assert len(caplog.messages) == (second >= 30)
        clock.now += 1
    assert caplog.messages == [
        f"{tmp_path}: not readable for 30 s, still trying: [Errno 5] Input/output error"
    ]
    polls.poll_succeeded(tmp_path)
    for _ in range(29):
        polls.poll_failed(tmp_path, error)
        clock.now += 1
    assert len(caplog.messages) == 1


def test_lines_that_cannot_be_read_now_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_text('{"step": 1}\n')
    tail = Tail(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuses)
        assert tail.new_lines() == []
    assert tail.new_lines() == [b'{"step": 1}']


def refuses(*args: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


async def test_the_last_facts_of_the_launch_count_while_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    launch = Launch(
        model_path="m",
        served_model_name="m",
        engine_urls=["http://a"],
        transport_type="zmq",
        transport_host="h",
        transport_ports=[1],
    )
    launch.write(tmp_path)
    followed: list[list[str]] = []
    fleet: Any = SimpleNamespace(follow=lambda urls, names: followed.append(urls))
    run: Any = SimpleNamespace(launch=launch, run_dir=tmp_path, config=None)
    keeper = EngineKeeper(run, SimpleNamespace(fleets=[], fleet=fleet), [])  # type: ignore[arg-type]
    monkeypatch.setattr(engines, "FOLLOW_SECONDS", 0.001)

    refused: list[Path] = []

    def refuse(path: Path) -> bytes:
        refused.append(path)
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        keeping = asyncio.create_task(keeper.run())
        await until(lambda: len(refused) > 3 or keeping.done())
    msgspec.structs.replace(launch, engine_urls=["http://b"]).write(tmp_path)
    await until(lambda: followed or keeping.done())
    assert followed == [["http://b"]] and not keeping.done()
    keeping.cancel()


def test_a_stop_is_passed_on_when_the_disk_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SharedDisk(monkeypatch, tmp_path)
    said: list[str] = []
    stop = Stop(tmp_path, 1, asked=lambda: True, tell=said.append)
    with disk.refusing():
        assert stop.is_asked and said == []
    assert stop.is_asked and stop.is_asked
    assert (tmp_path / STOP).exists()
    assert said == [
        "stopping: finishing the step and saving (a second signal ends the run at once)"
    ]


def test_checkpoints_that_cannot_be_seen_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes back would abandon them."""
    finished(tmp_path, 3).directory.mkdir(parents=True)
    (finished(tmp_path, 3).directory / CHECKSUMS).touch()
    disk = SharedDisk(monkeypatch, tmp_path)
    seen = []
    with disk.refusing(0.5):
        while disk.refused < 20:
            with suppress(OSError):
                seen.append(whole_steps(tmp_path))
    assert seen == [[3]] * len(seen) and seen


def test_a_view_outlives_a_look_that_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = RunView(PluginConfig(), tmp_path, max_steps=9)
    Status(tmp_path / "status" / "trainer.json").report("training")
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        view.refresh()
    view.refresh()
    assert capsys.readouterr().out == "trainer: training\n"


def test_a_log_that_cannot_be_read_has_no_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Process):
        exit_code = 1

    process = Ended()
    process.log = tmp_path / "a.log"
    process.log.write_text("the reason\n")
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        assert process.last_lines() == []
    assert process.last_lines() == ["the reason"]
