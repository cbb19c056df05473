"""Checks of weights that come from the trainer's memory, which this process is for the while."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from prime_rl.errors import WeightsError
from prime_rl.testing.report import Broken, NotApplicable
from prime_rl_broadcast.meeting import Meeting, call_off
from prime_rl_devkit.engines.checkpoints import read
from prime_rl_devkit.engines.routes import refused
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.engines.weights import REFUSED, other_weights, serves

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl_broadcast.group import Attendance

SECONDS = 60.0


class Trainer:
    """Sends an engine to meetings over gloo, and attends them as rank 0."""

    def __init__(self, engine: EngineSubject) -> None:
        """Skips the check if the engine says that it receives nothing."""
        from prime_rl_broadcast.group import Attendance

        engine.need_admin()
        receives = engine.ok(engine.http.get("/health")).get("receives")
        if not receives:
            raise NotApplicable("GET /health lists no receives: the engine reads files alone")
        try:
            self._workers, backends = int(receives["workers"]), list(receives["backends"])
        except (KeyError, TypeError, ValueError) as error:
            raise Broken(
                f'/health has receives {receives}; expected {{"workers": 1, "backends": ["gloo"]}}'
            ) from error
        if "gloo" not in backends:
            raise NotApplicable(f"the engine receives by {backends}, the kit sends by gloo")
        self._engine, self._attendance = engine, Attendance()
        self._folder = engine.new_folder("meetings")
        self._group = self.new_folder()

    def new_folder(self) -> Path:
        folder = self._folder / secrets.token_hex(4)
        folder.mkdir(parents=True)
        return folder

    def pass_on(self, tensors: Mapping[str, Tensor]) -> httpx.Response:
        """The engine's answer to a broadcast of ``tensors``."""
        meeting = self._meeting()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send, meeting, tensors, self._attendance)
            answer = self._invite(meeting)
            with suppress(WeightsError):  # the engine has said why
                sending.result()
        return answer

    def stay_away(self) -> httpx.Response:
        """The engine's answer to a meeting that is called off while it waits."""
        meeting = self._meeting()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._invite, meeting)
            here = Path(meeting.directory) / "here_1"
            self._engine.wait(here.exists, "the engine does not come to a meeting")
            call_off(Path(meeting.directory), "nobody came")
            return answer.result()

    def _meeting(self) -> Meeting:
        return Meeting(
            directory=str(self.new_folder()),
            group=str(self._group),
            backend="gloo",
            rank=0,
            world_size=1 + self._workers,
            timeout=SECONDS,
            loopback=True,
        )

    def _invite(self, meeting: Meeting) -> httpx.Response:
        body: dict[str, Any] = {
            "weight_dir": meeting.directory,
            "version": self._engine.version + 1,
            "meeting": msgspec.to_builtins(meeting.attended_by(1)),
        }
        self._engine.pause()
        answer = self._engine.admin("/update_weights", body)
        self._engine.version += answer.is_success
        self._engine.resume()
        return answer

    @staticmethod
    def _send(meeting: Meeting, tensors: Mapping[str, Tensor], attendance: Attendance) -> None:
        import torch

        from prime_rl_broadcast.group import header_of

        with attendance.at(meeting, torch.device("cpu")) as group:
            group.send(header_of(tensors, {}), tensors.values())


def broadcast(engine: EngineSubject) -> str:
    """Weights from the trainer's memory serve like those of a folder, one broadcast after another
    over the same connections."""
    trainer = Trainer(engine)
    with other_weights(engine, seed=7) as folder:
        engine.ok(trainer.pass_on(read(folder)))
        gap = serves(engine, folder, "after a broadcast")
    engine.ok(trainer.pass_on(read(engine.model_folder)))
    serves(engine, engine.model_folder, "after a broadcast back", 1)
    return f"largest gap {gap:.2g}"


def refused_broadcast(engine: EngineSubject) -> None:
    """Weights that do not fit are refused before they come, and a meeting that is called off is
    left; the old weights serve on."""
    sound = read(engine.model_folder)
    name = max(name for name, tensor in sound.items() if tensor.dim() == 2)
    without = {key: tensor for key, tensor in sound.items() if key != name}
    for number, (what, tensors) in enumerate(
        (("a missing tensor", without), ("another shape", without | {name: sound[name][:-1]}))
    ):
        answer = Trainer(engine).pass_on(tensors)
        refused(answer, f"a broadcast with {what}", REFUSED, name)
        serves(engine, engine.model_folder, f"after a broadcast with {what}", number)
    refused(Trainer(engine).stay_away(), "a meeting that was called off", REFUSED, "nobody came")
    serves(engine, engine.model_folder, "after a meeting that was called off", 2)
