"""The orchestrator hears how each worker ends, whatever is written where the answers go."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

from prime_rl.env.episode import EnvSettings
from prime_rl_env_workers.environment import to_wire
from prime_rl_env_workers.forks import WorkerFork, WorkerForks

HERE = Path(__file__).parent

FORK_SERVER = """#!{python}
import json, os, socket
connection = socket.socket(fileno=0)
while True:
    message, files, _, _ = socket.recv_fds(connection, 1 << 17, 4)
    if not message:
        break
    request = json.loads(message)
    connection.send(json.loads(os.read(files[0], 1 << 20))["junk"].encode())
    connection.send(json.dumps(dict(id=request["id"], pid=71)).encode())
    connection.send(json.dumps(dict(id=request["id"], status=-11)).encode())
"""

JUNK = {
    "text": "loaded a model\n",
    "no_newline": "50 %",
    "list": "[1, 2]\n",
    "torn": '{"id": "torn',
    "other_types": '{"id": 7, "status": "x"}\n',
    "no_id": '{"status": 0}\n',
    "nested": "[" * 9000 + "\n",
    "longer_than_an_answer": "x" * 150_000,
    "blank_lines": "\n\n",
    "terminal": "\x1b[0m\x00\n",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_what_else_is_written_where_answers_go_loses_no_end_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: str
) -> None:
    script = tmp_path / "forkserver"
    script.write_text(FORK_SERVER.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    forks = WorkerForks()
    for number in (1, 2):
        fork = await forks.start("worker", "ipc://none", {"junk": junk})
        assert await how_it_ended(fork) == "was ended by SIGSEGV"
        assert (fork.id, fork.pid) == (f"worker {number - 1}", 71)
    await forks.close()


async def test_a_bug_in_the_reader_ends_the_fork_server_and_its_workers_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "forkserver"
    script.write_text(FORK_SERVER.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    forks = WorkerForks()

    def bug(packet: bytes) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(forks, "_hear", bug)
        fork = await forks.start("worker", "ipc://none", {"junk": "junk"})
        assert await how_it_ended(fork) == (
            "ended with the process that forks workers, which was ended by SIGKILL"
        )
    assert "cannot be read" in caplog.text
    again = await forks.start("worker", "ipc://none", {"junk": "junk"})
    assert await how_it_ended(again) == "was ended by SIGSEGV"
    await forks.close()


@pytest.mark.slow
async def test_a_worker_that_cannot_start_says_why_and_its_junk_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is 6 times longer as JSON, and the import writes into every descriptor."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    forks = WorkerForks()
    request = {"settings": to_wire(EnvSettings(id="failing_start")), "env": {}}
    workers = [await forks.start("worker", f"ipc://{tmp_path}/{n}", request) for n in (0, 1)]
    for fork in workers:
        assert await how_it_ended(fork) == "exited with code 1"
        assert fork.failure is not None
        assert "üüüüü" in fork.failure
        assert "torn" not in fork.failure
    await forks.close()


async def test_no_file_of_the_working_directory_replaces_a_module_of_the_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes of a run do not search it either. Here Python gets the flags of the fork
    server, and the name of a module that only the working directory has."""
    (tmp_path / "beside.py").write_text("raise SystemExit(9)")
    script = tmp_path / "python"
    server = "prime_rl_env_workers.forked"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"words = ['beside' if word == {server!r} else word for word in sys.argv]\n"
        f"os.execv({sys.executable!r}, words)\n"
    )
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script))
    forks = WorkerForks()
    fork = await forks.start("worker", "ipc://none", {})
    how = await how_it_ended(fork)
    await forks.close()
    assert how == "ended with the process that forks workers, which exited with code 1"


async def how_it_ended(fork: WorkerFork) -> str:
    async with asyncio.timeout(LIMIT):
        return await fork.ended
