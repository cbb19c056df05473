"""Forks of one process are what their commands name. Real processes, with a small import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import eventually

from prime_rl_app.forks import ALLOCATOR, Forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
LIMIT = 60
CHILD = """
    import os, signal, sys, time
    import slow_import
    from prime_rl.rundir.processes import exit_with_parent
    if __name__ == "__main__":
        exit_with_parent()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print(*sys.argv[1:], os.environ.get("PRIME_RL_MINE"), sys.stdin.read() == "", flush=True)
        exec(sys.argv[1])
"""
FOREVER = "time.sleep(600)"


class Starter:
    """``Forks`` that can fork the module ``child``, which imports ``slow_import``."""

    def __init__(self, folder: Path) -> None:
        (folder / "slow_import.py").write_text("print('imported', flush=True)")
        (folder / "child.py").write_text(textwrap.dedent(CHILD))
        self.folder, self.forks = folder, Forks()
        self.forks._modules = {"child": "slow_import"}
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, code: str, log: str = "log", **env: str) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(self.folder), "PRIME_RL_PARENT_PID": str(os.getpid())}
        with (self.folder / log).open("ab") as file:
            process = self.forks(
                [sys.executable, "-P", "-m", "child", code],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **own, **env},
            )
        self.started.append(process)
        return process

    def said(self, log: str = "log") -> list[str]:
        return (self.folder / log).read_text().splitlines()

    @property
    def server(self) -> subprocess.Popen[bytes]:
        assert self.forks._server is not None
        return self.forks._server.process


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    starter = Starter(tmp_path)
    yield starter
    for process in starter.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT)


def adopted(process: subprocess.Popen[bytes], starter: Starter) -> bool:
    return process.poll() is None and process.pid != starter.server.pid


def test_a_fork_is_the_process_that_its_command_names(starter: Starter) -> None:
    name = f"3:trainer:{starter.folder}"
    process = starter(FOREVER, PRIME_RL_MINE="here", PRIME_RL_PROCESS=name)
    eventually(lambda: starter.said()[-1:] == [f"{FOREVER} here True"])
    eventually(lambda: adopted(process, starter))
    shown = psutil.Process(process.pid)
    assert shown.ppid() == os.getpid() and os.getsid(process.pid) == process.pid
    assert shown.cmdline() == [sys.executable, "-P", "-m", "child", FOREVER]
    environ = shown.environ()
    assert (environ["PRIME_RL_PROCESS"], environ["PRIME_RL_MINE"]) == (name, "here")
    assert "PRIME_RL_ROOM" not in environ
    server = psutil.Process(starter.server.pid).environ()
    assert server["PRIME_RL_PROCESS"] == f"3:guard:{starter.folder}"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT) == 7 and process.poll() == 7
    assert starter.server.poll() is None


@pytest.mark.parametrize("differs", ["PRIME_RL_ELSE", "NO_PROXY", *ALLOCATOR])
def test_what_forks_import_is_imported_once_and_each_has_its_log(
    starter: Starter, differs: str
) -> None:
    """They may differ in variables that no import reads."""
    one = starter("print(1)", "one", PRIME_RL_MINE="a")
    two = starter("print(2)", "two", **{differs: "expandable_segments:True"})
    assert one.wait(LIMIT) == two.wait(LIMIT) == 0
    assert starter.said("one") == ["imported", "print(1) a True", "1"]
    assert starter.said("two") == ["print(2) None True", "2"]


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("sys.exit(5)", 5, None),
        ("sys.exit('what is wrong')", 1, "what is wrong"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("os._exit(4)", 4, None),
    ],
)
def test_how_a_fork_ended(starter: Starter, code: str, status: int, last: str | None) -> None:
    assert starter(code).wait(LIMIT) == status
    assert last is None or starter.said()[-1] == last


def test_a_wait_has_a_limit(starter: Starter) -> None:
    process = starter(FOREVER)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)


@pytest.mark.parametrize(
    "env",
    [{"OMP_NUM_THREADS": "7"}, {"CUDA_VISIBLE_DEVICES": "0"}, {"PRIME_RL_LONG": "x" * 40_000}],
)
def test_what_cannot_be_forked_starts_as_before(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    starter("print(1)").wait(LIMIT)
    if name := env.get("CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    process = starter("print(2)", "other", **env)
    assert type(process) is subprocess.Popen and process.wait(LIMIT) == 0
    assert starter.said("other") == ["imported", "print(2) None True", "2"]


def test_a_fork_server_that_dies_is_replaced_and_its_forks_live(starter: Starter) -> None:
    first = starter(FOREVER)
    eventually(lambda: adopted(first, starter))
    server = starter.server
    server.kill()
    server.wait(LIMIT)
    assert starter("print(2)", "two").wait(LIMIT) == 0
    assert starter.said("two")[0] == "imported" and first.poll() is None


@pytest.mark.parametrize("reaped", [False, True])
def test_before_it_is_forked_its_death_is_the_fork_servers(starter: Starter, reaped: bool) -> None:
    """``reaped``: by what kills the leftovers of an attempt."""
    (starter.folder / "slow_import.py").write_text(FOREVER.replace("time", "import time; time"))
    process = starter("print(1)")
    assert process.poll() is None and process.pid == starter.server.pid
    os.killpg(process.pid, signal.SIGKILL)
    if reaped:
        os.waitpid(process.pid, 0)
    assert process.wait(LIMIT) == -signal.SIGKILL


def test_forks_end_with_the_supervisor(starter: Starter) -> None:
    """As if it were killed: it has no chance to end them."""
    code = f"""
        import sys, time
        from pathlib import Path
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        from test_forks import FOREVER, Starter, adopted
        starter = Starter(Path({str(starter.folder)!r}))
        process = starter(FOREVER)
        while not adopted(process, starter):
            time.sleep(0.01)
        print(process.pid, starter.server.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        supervisor.kill()
    assert len(processes) == 2
    eventually(lambda: not any(map(runs, processes)))


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
