"""Checks of weights from the trainer's memory. This process plays the trainer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import msgspec

from prime_rl.errors import WeightsError
from prime_rl.rundir.launch import ADMIN_KEY
from prime_rl_broadcast.group import Backend, BroadcastGroup
from prime_rl_devkit.engines.checkpoints import read
from prime_rl_devkit.engines.routes import refused
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.engines.weights import REFUSED, other_weights, serves
from prime_rl_devkit.verdicts import Broken, NotApplicable

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 60.0


SENDS: tuple[Backend, ...] = ("gloo", "ipc")
"""What the kit can send by, without a GPU."""


class TrainerRank:
    """Rank 0 of broadcasts, and the client that sends the engine to them."""

    def __init__(self, engine: EngineSubject, backend: Backend = "gloo") -> None:
        """Raises ``NotApplicable`` if the engine receives nothing by ``backend``."""
        from prime_rl_broadcast.connection import Member

        engine.need_admin()
        receives = engine.ok(engine.http.get("/health")).get("receives")
        if not receives:
            raise NotApplicable("GET /health lists no receives: the engine reads files alone")
        try:
            self._workers = int(receives["workers"])
            backends = list(receives["backends"])
        except (KeyError, TypeError, ValueError) as error:
            raise Broken(
                f'/health has receives {receives}; expected {{"workers": 1, "backends": ["gloo"]}}'
            ) from error

        if backend not in backends:
            raise NotApplicable(f"the engine receives by {backends}, the kit sends by {backend}")
        self.backend = backend
        self._engine = engine
        self._member = Member()
        self._folder = engine.new_folder("meetings")
        self._group = self.new_folder()

    def new_folder(self) -> Path:
        folder = self._folder / secrets.token_hex(4)
        folder.mkdir(parents=True)
        return folder

    def broadcast(self, tensors: Mapping[str, Tensor]) -> httpx.Response:
        """The engine's answer to a broadcast of ``tensors``."""
        group = self._new_group()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send, group, tensors)
            answer = self._update(group)
            with suppress(WeightsError):  # the engine's answer has the reason
                sending.result()
        return answer

    def abort(self) -> httpx.Response:
        """The engine's answer to a broadcast that is aborted while it waits."""
        group = self._new_group()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._update, group)
            ready = Path(group.directory) / "here_1"
            self._engine.wait(ready.exists, "the engine does not join a broadcast")
            group.abort("the trainer is missing")
            return answer.result()

    def _new_group(self) -> BroadcastGroup:
        return BroadcastGroup(
            directory=str(self.new_folder()),
            group=str(self._group),
            backend=self.backend,
            rank=0,
            world_size=1 + self._workers,
            timeout=SECONDS,
            loopback=True,
        )

    def _update(self, group: BroadcastGroup) -> httpx.Response:
        body: dict[str, Any] = {
            "weight_dir": group.directory,
            "version": self._engine.version + 1,
            "meeting": msgspec.to_builtins(group.for_worker(1)),
        }
        self._engine.pause()
        answer = self._engine.admin("/update_weights", body)
        self._engine.version += answer.is_success
        self._engine.resume()
        return answer

    def _send(self, group: BroadcastGroup, tensors: Mapping[str, Tensor]) -> None:
        import torch

        from prime_rl_broadcast.connection import header_of

        # A trainer has the run's key in its environment.
        key = mock.patch.dict(os.environ, {ADMIN_KEY: self._engine.admin_key})
        with key, self._member.join(group, torch.device("cpu")) as connection:
            connection.send(header_of(tensors, {}), tensors.values())


def broadcast(engine: EngineSubject) -> str:
    """Weights from the trainer's memory serve like those of a folder, over several broadcasts on
    the same connections. Checked for each way that the engine lists and that needs no GPU."""
    trainers = [TrainerRank(engine)]
    with suppress(NotApplicable):
        trainers += [TrainerRank(engine, backend) for backend in SENDS[1:]]

    gaps = []
    for number, trainer in enumerate(trainers):
        with other_weights(engine, seed=7) as folder:
            engine.ok(trainer.broadcast(read(folder)))
            gaps.append(serves(engine, folder, what="after a broadcast", number=2 * number))
        engine.ok(trainer.broadcast(read(engine.model_folder)))
        serves(engine, engine.model_folder, what="after a broadcast back", number=2 * number + 1)

    ways = " and ".join(trainer.backend for trainer in trainers)
    return f"by {ways}, largest gap {max(gaps):.2g}"


def refused_broadcast(engine: EngineSubject) -> None:
    """The engine refuses weights that do not fit before they are sent, and leaves an aborted
    broadcast. It continues to serve the old weights."""
    sound = read(engine.model_folder)
    name = max(name for name, tensor in sound.items() if tensor.dim() == 2)
    without = {key: tensor for key, tensor in sound.items() if key != name}
    for number, (what, tensors) in enumerate(
        (("a missing tensor", without), ("another shape", without | {name: sound[name][:-1]}))
    ):
        answer = TrainerRank(engine).broadcast(tensors)
        refused(answer, f"a broadcast with {what}", statuses=REFUSED, word=name)
        serves(engine, engine.model_folder, what=f"after a broadcast with {what}", number=number)

    refused(
        TrainerRank(engine).abort(),
        "an aborted broadcast",
        statuses=REFUSED,
        word="the trainer is missing",
    )
    serves(engine, engine.model_folder, what="after an aborted broadcast", number=2)
