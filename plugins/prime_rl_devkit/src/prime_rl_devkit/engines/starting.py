"""Start an engine by its own ``command()``, as the supervisor does."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from prime_rl.errors import EngineError
from prime_rl.plugins.launchers import Engine, EngineCommand, EngineLaunch
from prime_rl.rundir.launch import ENGINE_KEY, PARENT_PID
from prime_rl.rundir.machine import free_ports
from prime_rl_devkit.engines.models import MAX_MODEL_LEN, write_tiny_model
from prime_rl_devkit.engines.subject import TOLERANCE, EngineSubject

ADMIN = "conformance-admin-key"
SAMPLING = "conformance-sampling-key"
TAIL = 3000
"""Characters of the server's log that an error shows."""


@contextmanager
def started(
    engine: Engine,
    work_folder: Path,
    *,
    model_folder: Path | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    ready_timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
    **facts: Any,
) -> Iterator[EngineSubject]:
    """A server of this engine, ready and under test; ended on leaving.

    Serves a tiny model made in ``work_folder``, or ``model_folder``. ``python`` is
    ``inference.python``: the interpreter of the engine's own environment. ``facts`` are fields of
    ``EngineSubject``: dtype (else what ``engine.config.dtype`` says, or float32), tolerance, lacks,
    timeout. What the class itself declares in an attribute ``lacks`` holds too. The server's output
    is in ``work_folder/engine.log``. Raises ``EngineError`` if it does not become healthy.
    """
    model = model_folder or write_tiny_model(work_folder / "model")
    port = free_ports(1)[0]
    lacks = dict(engine.lacks) | dict(facts.pop("lacks", {}))
    engine.check(python)
    launch = _launch(
        model, port, max_model_len=max_model_len, python=python, can_sleep="sleep" not in lacks
    )
    command = engine.command(launch)
    log = work_folder / "engine.log"
    process = _spawn(command, log, env or {})
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_healthy(url, process, log=log, timeout=ready_timeout)
        facts.setdefault("dtype", _dtype(engine))
        subject = EngineSubject(
            url,
            model,
            work_folder=work_folder,
            admin_key=ADMIN,
            api_key=SAMPLING,
            lacks=lacks,
            process=process,
            argv=command.argv,
            **facts,
        )
        with subject.http:
            yield subject
    finally:
        _end(process)


def _launch(
    model: Path, port: int, max_model_len: int, python: Path | None, can_sleep: bool
) -> EngineLaunch:
    return EngineLaunch(
        model_path=model,
        served_model_name="conformance",
        host="127.0.0.1",
        port=port,
        max_model_len=max_model_len,
        seed=0,
        admin_key=ADMIN,
        python=python,
        can_sleep=can_sleep,
    )


def _dtype(engine: Engine) -> str:
    """The dtype of its settings."""
    dtype = getattr(engine.config, "dtype", None)
    return dtype if dtype in TOLERANCE else "float32"


def _spawn(command: EngineCommand, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    more = {ENGINE_KEY: SAMPLING, PARENT_PID: str(os.getpid())}
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                list(command.argv),
                env=os.environ | more | dict(command.env) | dict(env),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise EngineError(f"its command cannot be started: {error}") from error


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise EngineError(
                f"the server ended with code {process.returncode}. The end of its log:\n"
                f"{_tail(log)}"
            )

        if time.monotonic() > deadline:
            raise EngineError(
                f"the server is not healthy after {timeout:.0f} s. The end of its log:\n"
                f"{_tail(log)}"
            )

        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass

        time.sleep(0.1)


def _tail(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")[-TAIL:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
