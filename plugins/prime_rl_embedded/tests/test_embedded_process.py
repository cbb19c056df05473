"""The plugin's command, and start and end of the process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import LIMIT, eventually, exists

from prime_rl import Engine, EngineLaunch
from prime_rl_embedded import Embedded, EmbeddedConfig, register_engines, server
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.server import parse
from prime_rl_embedded.testing import Served, free_port, start, wait_healthy, write_model
from prime_rl_engine_kit import process


def launch(**changes: object) -> EngineLaunch:
    fields = {
        "model_path": Path("folder"),
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "port": 1234,
        "max_model_len": 64,
        "seed": 3,
        "admin_key": "secret",
    }
    return EngineLaunch(**fields | changes)  # type: ignore[arg-type]


def test_the_plugin_registers_one_engine_called_embedded() -> None:
    (offered,) = register_engines()
    assert issubclass(offered, Engine) and offered.name == "embedded"


def test_the_command_carries_the_launch_and_the_settings_but_never_the_key() -> None:
    engine = Embedded(EmbeddedConfig(num_slots=5))
    command = engine.command(launch(policy_version=4, wait_for_model=True))
    assert "secret" not in " ".join(command.argv)
    assert command.env["PRIME_RL_ADMIN_KEY"] == "secret"
    assert command.env["OMP_NUM_THREADS"] == "1" and command.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert command.argv[:4] == [sys.executable, "-P", "-m", "prime_rl_embedded.server"]
    args = parse(command.argv[4:])
    assert args.model == Path("folder") and args.wait_for_model
    assert (args.port, args.seed, args.max_model_len, args.policy_version) == (1234, 3, 64, 4)
    assert args.settings.num_slots == 5 and args.served_model_name == "tiny"
    assert not parse(engine.command(launch()).argv[4:]).wait_for_model


def test_importing_the_plugin_is_light() -> None:
    """Every check of a config imports it."""
    code = "import sys, prime_rl_embedded; print([m for m in HEAVY if m in sys.modules])"
    heavy = "HEAVY = ['torch', 'transformers', 'verifiers', 'starlette', 'uvicorn', 'safetensors']"
    out = subprocess.run(
        [sys.executable, "-c", f"{heavy}\n{code}"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_it_waits_for_the_model_serves_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    """The request in flight is answered with 503."""
    folder, status, port = tmp_path / "model", tmp_path / "status.json", free_port()
    folder.mkdir()
    url = f"http://127.0.0.1:{port}"
    process = start(folder, port, max_model_len=512, status_path=status, wait_for_model=True)
    try:
        wait_for_state(status, "waiting for the model", process)
        write_model(folder)
        wait_healthy(url, process)
        wait_for_state(status, "idle", process)
        with httpx.Client(base_url=url, timeout=LIMIT) as http, ThreadPoolExecutor(1) as pool:
            served = Served(url, process, http)
            body = {"token_ids": [1], "sampling_params": {"n": 64}}
            running = pool.submit(served.post, "/inference/v1/generate", body)
            served.wait_for("vllm:num_requests_running", 1)
            served.post("/pause", admin=True)
            process.terminate()
            answer = running.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the engine is shutting down"
        assert process.wait(LIMIT) == 0
        assert json.loads(status.read_text())["state"] == "stopped"
    finally:
        process.kill()
        process.wait()


def wait_for_state(path: Path, state: str, process: subprocess.Popen[Any]) -> None:
    eventually(lambda: path.exists() and json.loads(path.read_text())["state"] == state, process)


@pytest.mark.slow  # two fresh interpreters
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    code = f"""
import os, time
from pathlib import Path
from prime_rl_embedded.testing import start
start(Path({str(tmp_path)!r}), 1, status_path=Path({str(status)!r}), wait_for_model=True,
      env={{"PRIME_RL_PARENT_PID": str(os.getpid())}})
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for_state(status, "importing torch", parent)
    finally:
        parent.kill()
        parent.wait()
    child = json.loads(status.read_text())["pid"]
    eventually(lambda: not exists(child))


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The server's entry point, without its changes to this process's signals."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "exit_with_parent", lambda: None)

    def run(model: Path, port: int, status: Path) -> int:
        options = {"model": model, "port": port, "max-model-len": 64, "status-path": status}
        return server.main([f"--{key}={value}" for key, value in options.items()])

    return run


def test_a_model_that_cannot_be_served_ends_it_with_one_line(
    tmp_path: Path, main: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert main(tmp_path, 1, tmp_path / "status.json") == 1
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "can't be loaded" in record.message and record.exc_info is None
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"].startswith("failed: ")


def test_a_port_that_is_taken_ends_it_with_one_line(
    tmp_path: Path, model_folder: Path, main: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(model_folder, port, tmp_path / "status.json") != 0
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "address already in use" in record.message and str(port) in record.message


def test_an_engine_that_dies_ends_the_process_with_its_traceback(
    tmp_path: Path,
    model_folder: Path,
    main: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failing step would only end its requests; here the thread ends."""

    def step(self: Scheduler) -> None:
        raise MemoryError("boom")

    monkeypatch.setattr(Scheduler, "step", step)
    port, status = free_port(), tmp_path / "status.json"
    url = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(main, model_folder, port, status)
        eventually(
            lambda: (
                code.done()
                or (status.exists() and json.loads(status.read_text())["state"] == "idle")
            )
        )
        answer = httpx.post(f"{url}/inference/v1/generate", json={"token_ids": [1]}, timeout=LIMIT)
        assert code.result() == 1
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine died: MemoryError: boom"
    assert "in step" in (stderr := capsys.readouterr().err) and "MemoryError: boom" in stderr
    assert json.loads(status.read_text())["state"] == "the engine died: boom"
