"""The agent of several ranks: no rank outlives it, and the failed rank is named.

Ranks that only wait stand in for the trainer's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from waiting import LIMIT, eventually, exists

from prime_rl import ConfigError
from prime_rl.errors import ProcessFailed
from prime_rl.plugins.status import read_status
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.launch import PARENT_PID, STORE, Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer.rank import Rank
from prime_rl_app import agent
from prime_rl_app.commands import trainer_command
from prime_rl_app.supervisor import _failed

RANK = """
import os, pathlib, signal, sys, time
from prime_rl.rundir.processes import exit_with_parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
exit_with_parent()
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".new").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
path.with_suffix(".new").rename(path)
while not pathlib.Path(sys.argv[1], "done").exists():
    time.sleep(0.02)
"""
START = "import sys; from prime_rl_app import agent; agent.MODULE = 'prime_rl_waiting_rank'; " \
    "sys.exit(agent.main(sys.argv[1:]))"  # fmt: skip


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The agent and its two ranks, which have begun."""
    (tmp_path / "prime_rl_waiting_rank.py").write_text(RANK)
    process = warm.Popen(
        [sys.executable, "-c", START, str(tmp_path), "--ranks", "2"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    eventually(lambda: all(path.exists() for path in files), process)
    assert [path.read_text().split()[1] for path in files] == ["2", "2"]
    yield process, [int(path.read_text().split()[0]) for path in files]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_when_all_ranks_are_done_so_is_the_agent(ranks: tuple, tmp_path: Path) -> None:
    process, _ = ranks
    (tmp_path / "done").touch()
    assert process.communicate(timeout=LIMIT) == (None, "")
    assert process.returncode == 0


def test_a_rank_that_is_killed_ends_the_others_and_is_named(ranks: tuple) -> None:
    process, (first, second) = ranks
    os.kill(second, signal.SIGKILL)
    _, said = process.communicate(timeout=LIMIT)
    assert (process.returncode, said) == (1, "trainer rank 1 of 2 was ended by SIGKILL\n")
    assert not exists(first)


class Ended:
    """A rank that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def test_of_ranks_that_fail_together_the_one_that_was_killed_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others have lost their connection to it."""
    ranks: list[Any] = [Ended(1), Ended(-9), Ended(1)]
    assert agent._watch(ranks, lambda: False) == 1
    assert capsys.readouterr().err == "trainer rank 1 of 3 was ended by SIGKILL\n"


def exited(*codes: int | None) -> list[Any]:
    """Stand-ins for ranks; None: still running."""
    return [SimpleNamespace(poll=lambda code=code: code) for code in codes]


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((1, 143, 1), "trainer rank 1 of 3 was ended by SIGTERM"),
        ((1, 143, -9), "trainer rank 1 of 3 was ended by SIGTERM"),
        ((3, 1, None), "trainer rank 1 of 3 exited with code 1"),
        ((255, 0, None), "trainer rank 0 of 3 exited with code 255"),
        ((0, None, 0), "trainer rank 0 is done, and rank 1 does not end"),
    ],
)
def test_the_rank_that_the_agent_names(
    codes: tuple[int | None, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several: the one that a signal ended, that failed first, that does not end."""
    monkeypatch.setattr(agent, "LINGER_SECONDS", 0.0)
    assert agent._watch(exited(*codes), lambda: False) == 1
    assert capsys.readouterr().err == f"{said}\n"


def test_ranks_that_end_after_a_signal_to_the_agent_have_not_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor are they done."""
    stopped = iter([False, True])
    assert agent._watch(exited(143, 143), lambda: next(stopped)) == 143
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, None), 143), ((None, None), 143)])
def test_an_agent_that_gets_a_signal_is_done_if_all_its_ranks_are(
    codes: tuple[int | None, ...], code: int
) -> None:
    assert agent._watch(exited(*codes), lambda: True) == code


def test_ranks_end_when_their_agent_is_killed(ranks: tuple) -> None:
    process, pids = ranks
    process.kill()
    process.wait()
    eventually(lambda: not any(map(exists, pids)))


def test_sigterm_ends_the_agent_and_its_ranks_and_they_are_not_done(ranks: tuple) -> None:
    process, pids = ranks
    process.terminate()
    assert process.wait(LIMIT) == 143
    assert not any(map(exists, pids))


def launch(num_ranks: int, nodes: int = 1) -> Launch:
    return Launch(
        model_path="m",
        served_model_name="m",
        engine_urls=[],
        transport_type="zmq",
        transport_host="10.0.0.1",
        transport_ports=[1] * num_ranks,
        num_ranks=num_ranks,
        trainer_nodes=nodes,
        rendezvous="10.0.0.2:29500",
    )


def test_how_the_trainer_is_started() -> None:
    run_dir = Path("/runs/a")
    alone = [sys.executable, "-P", "-m", "prime_rl.trainer", "/runs/a"]
    several = [sys.executable, "-P", "-m", "prime_rl_app.agent", "/runs/a", "--ranks"]
    nodes = ["--nodes", "2", "--endpoint", "10.0.0.2:29500", "--id", "a"]
    assert trainer_command(launch(1), run_dir) == alone
    assert trainer_command(launch(4), run_dir) == [*several, "4"]
    assert trainer_command(launch(8, nodes=2), run_dir) == [*several, "8", *nodes]


def test_nodes_become_torchruns_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run

    given: list[list[str]] = []
    monkeypatch.setattr(run, "main", given.append)
    monkeypatch.delenv("PRIME_RL_PARENT_PID", raising=False)
    monkeypatch.setattr(agent, "exit_with_parent", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _, _, _, *arguments = trainer_command(launch(8, nodes=2), Path("/runs/a"))
    assert agent.main(arguments[1:]) == 0
    (said,) = given
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=10.0.0.2:29500"} <= set(said)
    assert said[-7:] == [
        "--no-python",
        sys.executable,
        "-P",
        "-u",
        "-m",
        "prime_rl.trainer",
        "/runs/a",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ranks", "2", "--nodes", "2"], "need an --endpoint"),
        (["--ranks", "3", "--nodes", "2", "--endpoint", "a:1"], "3 ranks do not divide over 2"),
    ],
)
def test_arguments_that_do_not_fit_together(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        agent.main(["run", *arguments])
    assert reason in capsys.readouterr().err


def test_a_process_reads_its_rank_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE):
        monkeypatch.delenv(name, raising=False)
    assert Rank.of_process() == Rank(0, 1, 0)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Rank.of_process() == Rank(5, 8, 1)


def test_another_number_of_ranks_than_planned_is_refused() -> None:
    Rank(1, 2, 1).check(2)
    with pytest.raises(ConfigError) as caught:
        Rank().check(2)
    assert str(caught.value) == (
        "the trainer was started with 1 ranks, configs/launch.json says 2. Give its "
        "agent --ranks 2."
    )


def test_an_agent_that_cannot_start_its_ranks_says_so_and_the_run_does_not_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_meeting(options: object) -> int:
        raise RuntimeError("the rendezvous failed") from TimeoutError("10.0.0.4 does not answer")

    monkeypatch.setattr(agent, "run_torchrun", no_meeting)
    monkeypatch.setenv(PROCESS, f"1:trainer_1:{tmp_path}")
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))  # the agent sets it for its ranks
    arguments = ["--ranks", "2", "--nodes", "2", "--endpoint", "10.0.0.4:1"]
    with pytest.raises(RuntimeError):
        agent.main([str(tmp_path), *arguments])
    (tmp_path / "log").touch()
    ended = SimpleNamespace(name="trainer_1", exit_code=1, log=tmp_path / "log", last_lines=list)
    failure = _failed(ended, tmp_path, "exited with code 1")  # type: ignore[arg-type]
    assert isinstance(failure, ProcessFailed)
    assert failure.reported
    assert failure.cause == (
        "trainer_1 exited with code 1: the ranks of this machine could not start: RuntimeError: "
        "the rendezvous failed: TimeoutError: 10.0.0.4 does not answer"
    )


def test_an_agent_leaves_what_a_rank_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ChildFailedError(Exception):
        """As torchrun's."""

    def failed(options: object) -> int:
        raise ChildFailedError("rank 0 failed")

    monkeypatch.setattr(agent, "run_torchrun", failed)
    monkeypatch.setenv(PROCESS, f"1:trainer:{tmp_path}")
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))  # the agent sets it for its ranks
    status = tmp_path / "status" / "trainer.json"
    Status(status).report("failed", error="out of memory")
    with pytest.raises(ChildFailedError):
        agent.main([str(tmp_path), "--ranks", "2", "--nodes", "2", "--endpoint", "a:1"])
    report = read_status(status)
    assert report is not None
    assert report.detail["error"] == "out of memory"
