"""What polls for a file sees it at once on NFS, whose client remembers that a name was absent."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.orchestrator.policy import LivePolicy, WeightWatcher
from prime_rl.rundir.control import STOP, stop_asked
from prime_rl.rundir.launch import READY, wait_for_model
from prime_rl.trainer.publish import Broadcaster
from prime_rl.trainer.published import Publisher
from prime_rl.weights.versions import FILES_WANTED, MEMORY, STABLE, Weights, wait_for_files


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


@pytest.mark.parametrize(
    ("poll", "files"),
    [
        (version_one, (f"broadcasts/step_1/{STABLE}",)),
        (files_of_version_one, ("broadcasts/step_1/model.safetensors",)),
        (wanted_files, (f"broadcasts/{FILES_WANTED}",)),
        (stop_asked, (STOP,)),
        (wait_for_model, (READY,)),
    ],
)
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
