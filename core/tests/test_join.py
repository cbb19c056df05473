"""Machines that join a run by hand: the supervisor's side and the machine's, over real files and
processes. The supervisor plays in a thread here, the machine in ours."""

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_rl import ConfigError, ProcessCommand, RunError, Task
from prime_rl.run import agent, meeting
from prime_rl.run.addresses import numeric
from prime_rl.run.join import JoinConfig, JoinLauncher

KEY = "PRIME_RL_ADMIN_KEY"
TRAINERS = [Task("trainer", "trainer", 0, num_ports=2), Task("trainer_1", "trainer", 1)]
SAID = "import os; print('pid', os.getpid(), flush=True); "
FOREVER = SAID + "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(agent, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(agent, "SEE_SECONDS", 0.1)


@pytest.fixture
def program(monkeypatch):
    """What a machine that joins starts, instead of a trainer."""
    told = SimpleNamespace(code="pass")

    class Commands:
        def __init__(self, config, launch, run_dir, engine, keys):
            self.run_dir, self.keys = run_dir, keys

        def of(self, task):
            log = self.run_dir / f"{task.name}.log"
            return ProcessCommand([sys.executable, "-c", told.code], log, self.keys.env)

    monkeypatch.setattr(agent, "Commands", Commands)
    monkeypatch.setattr(agent, "Launch", SimpleNamespace(read=lambda run_dir: None))
    monkeypatch.setattr(agent, "build_engine", lambda *_: None)
    return told


@pytest.fixture
def run(tmp_path):
    """A run directory; ``run.supervise(script)`` plays ``script(launcher, places)`` in a thread."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.json").write_text('{"model": {"name": "m"}, "max_steps": 1}')
    played = SimpleNamespace(dir=tmp_path, told=[], result=None, threads=[])

    def supervise(script, tasks=TRAINERS[:1], **settings):
        launcher = JoinLauncher(JoinConfig(timeout=20, **settings))

        def play():
            try:
                places = launcher.place(tasks, tmp_path, played.told.append)
                played.result = script(launcher, places)
            except Exception as error:
                played.result = error
            finally:
                launcher.close()

        played.threads.append(threading.Thread(target=play))
        played.threads[-1].start()

    def join(part="trainer"):
        lines = []
        try:
            code = agent.join(tmp_path, part, "127.0.0.1", lines.append)
        finally:
            for thread in played.threads:
                thread.join(30)
        return code, lines

    played.supervise, played.join = supervise, join
    yield played
    for thread in played.threads:
        thread.join(30)


def eventually(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def started(launcher, run, task=TRAINERS[0], needs=()):
    return launcher.start(task, ProcessCommand([], run.dir / f"{task.name}.log", needs=needs))


def alive(pid):
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


# -- a machine's life -----------------------------------------------------------------------


def test_a_machine_joins_gets_a_place_runs_its_process_and_leaves_with_the_run(run, program):
    program.code = "import os; print(os.environ['PRIME_RL_ADMIN_KEY']); raise SystemExit(3)"

    def script(launcher, places):
        process = started(launcher, run)
        assert process.exit_code is None
        eventually(lambda: process.exit_code is not None)
        return places, process.exit_code, process.last_lines()

    run.supervise(script)
    code, lines = run.join()
    places, exit_code, log = run.result
    place = places["trainer"]
    assert (place.address, len(set(place.ports))) == ("127.0.0.1", 2)
    assert (exit_code, log) == (3, ["secret"])
    assert code == 3 and lines[1] == "joined as trainer" and lines[-1] == "the run is over"
    assert run.told == [f"machines to join as trainer: prime-rl join {run.dir} PART"]


def test_a_machine_may_come_before_the_run(run, program):
    """And is not taken in by what an earlier run left behind."""
    left = meeting.places_dir(run.dir) / meeting.OPEN
    left.parent.mkdir()
    meeting.write(left, meeting.Open("old", [vars(TRAINERS[0])], beat=7))
    opened = threading.Timer(0.5, run.supervise, (lambda launcher, places: sorted(places),))
    opened.start()
    code, lines = run.join()
    opened.join()
    assert code == 0 and run.result == ["trainer"]
    assert lines[0] == f"waiting for a run with --launcher join in {run.dir}"


def test_a_file_that_is_being_replaced_is_read_again(tmp_path, monkeypatch):
    opened = meeting.Open("m", [], beat=3)
    meeting.write(tmp_path / "open.json", opened)
    whole, said = (tmp_path / "open.json").read_text(), iter(["{", None])

    def read_text(self):
        if text := next(said, whole):
            return text
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert meeting.read(tmp_path / "open.json", meeting.Open) == opened
    monkeypatch.setattr(Path, "read_text", lambda self: "{")
    with pytest.raises(ValueError, match="Expecting"):
        meeting.read(tmp_path / "open.json", meeting.Open)


def test_a_beat_that_the_disk_refuses_is_followed_by_others(tmp_path, monkeypatch):
    launcher, said = JoinLauncher(JoinConfig()), []

    def refuse(path, record):
        said.append(record.beat)
        if len(said) == 3:
            launcher._closed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(meeting, "write", refuse)
    launcher._beat(tmp_path, meeting.Open("m", []))
    assert said == [1, 2, 3]


def test_being_told_to_end_ends_the_process(run, program):
    program.code = FOREVER

    def script(launcher, places):
        process = started(launcher, run)
        eventually(lambda: process.last_lines() != [])
        pid = int(process.last_lines()[0].split()[1])
        assert alive(pid)
        launcher.end([process])
        return pid, process.exit_code

    run.supervise(script)
    assert run.join()[0] == 0
    pid, exit_code = run.result
    assert exit_code == -15 and not alive(pid)


def test_a_process_can_be_started_again(run, program):
    program.code = SAID

    def script(launcher, places):
        for count in (1, 2):
            process = started(launcher, run)
            eventually(lambda process=process: process.exit_code == 0)
            assert len(process.last_lines()) == count

    run.supervise(script)
    run.join()
    assert run.result is None
    assert len(set((run.dir / "trainer.log").read_text().split())) == 3  # pid, and two numbers


def test_a_supervisor_that_is_lost_takes_its_machines_along(run, program, monkeypatch):
    program.code = FOREVER
    monkeypatch.setattr(meeting, "LOST_SECONDS", 0.5)
    pids = []

    def beat_until_started(launcher, places, opened):
        number = 0
        while not pids:
            number += 1
            meeting.write(places / meeting.OPEN, replace(opened, beat=number))
            time.sleep(0.05)

    def script(launcher, places):
        process = started(launcher, run)
        eventually(lambda: process.last_lines() != [])
        pids.append(int(process.last_lines()[0].split()[1]))
        eventually(lambda: not alive(pids[0]))

    monkeypatch.setattr(JoinLauncher, "_beat", beat_until_started)
    run.supervise(script)
    with pytest.raises(RunError, match="the run gives no sign of life for 0 s"):
        run.join()
    assert run.result is None and not alive(pids[0])


def test_a_machine_that_is_lost_is_a_process_that_died(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "LOST_SECONDS", 0.1)
    launcher = JoinLauncher(JoinConfig())
    launcher._directory = tmp_path
    record = meeting.Agent("127.0.0.1", [], "node7", "", order=1)
    meeting.write(tmp_path / "trainer.agent", record)
    process = launcher.start(TRAINERS[0], ProcessCommand([], tmp_path / "trainer.log"))
    assert process.exit_code is None
    eventually(lambda: process.exit_code == 1)
    assert process.last_lines() == ["node7: no sign of life for 0 s"]


def test_a_machine_that_does_not_see_the_model_says_so(run, program):
    def script(launcher, places):
        process = started(launcher, run, needs=[run.dir / "not" / "shared"])
        eventually(lambda: process.exit_code == 1)
        return process.last_lines()

    run.supervise(script)
    with pytest.raises(RunError, match="is not to be seen on"):
        run.join()
    (line,) = run.result
    assert "not/shared is not to be seen on" in line and "a disk that every machine shares" in line


# -- who gets which place -------------------------------------------------------------------


def test_each_machine_takes_a_task_of_its_part_the_first_first(tmp_path):
    tasks = [Task("inference", "inference"), *TRAINERS]
    opened = meeting.Open("m", [vars(task) for task in tasks])
    taken = [agent._take(tmp_path, opened, "trainer").name for _ in range(2)]
    assert taken == ["trainer", "trainer_1"]
    with pytest.raises(ConfigError, match="the run has 2 such places and all are taken"):
        agent._take(tmp_path, opened, "trainer")
    assert agent._take(tmp_path, opened, "inference").name == "inference"


def test_a_part_that_nobody_joins_as_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"as 'inference': machines join this run as trainer$"):
        agent._take(tmp_path, meeting.Open("m", [vars(TRAINERS[0])]), "inference")


def test_of_many_that_claim_a_place_at_once_one_gets_it(tmp_path):
    won = []
    threads = [
        threading.Thread(target=lambda: won.append(meeting.claim(tmp_path / "t.claim")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 15 + [True]


# -- refusals -------------------------------------------------------------------------------


def test_a_run_without_a_key_is_refused_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=f"{KEY} is not set"):
        JoinLauncher(JoinConfig()).place(TRAINERS, tmp_path, print)
    with pytest.raises(ConfigError, match=f"{KEY} is not set"):
        agent.join(tmp_path, "trainer", "127.0.0.1", print)


def test_a_machine_with_another_key_is_refused(run, program, monkeypatch):
    run.supervise(lambda launcher, places: None)
    eventually(lambda: run.told != [])
    os.environ[KEY] = "another"
    run.join()
    assert isinstance(run.result, RunError)
    assert "joined as trainer with another key" in str(run.result)


def test_waiting_ends(tmp_path):
    launcher = JoinLauncher(JoinConfig(timeout=0.2))
    with pytest.raises(RunError, match="as trainer, trainer_1 within 0 s") as caught:
        launcher.place(TRAINERS, tmp_path, print)
    assert f"Start `prime-rl join {tmp_path} PART`" in str(caught.value)
    launcher.close()
    time.sleep(0.2)
    assert not (meeting.places_dir(tmp_path) / meeting.OPEN).exists()


# -- addresses ------------------------------------------------------------------------------


def test_addresses_are_numbers():
    assert numeric("127.0.0.1") == "127.0.0.1"
    assert numeric("localhost") in ("127.0.0.1", "::1")
    assert numeric("auto")[0].isdigit()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_everywhere_is_no_address(address):
    with pytest.raises(ConfigError, match="means every interface"):
        numeric(address)


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"'no such host' cannot be looked up"):
        numeric("no such host")
