"""What counts as dead, which failures the run survives, and what a late process may write."""

import errno
import json
import os
import signal
import subprocess
import sys
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from types import SimpleNamespace

import pytest
from disks import SharedDisk
from waiting import Clock, eventually, exists

from prime_rl import RunError
from prime_rl.config.run import RecoveryConfig, RunConfig
from prime_rl.errors import ProcessFailed
from prime_rl.plugins.status import EngineFacts, Facts
from prime_rl.rundir.attempts import ORCHESTRATOR, PROCESS, kill_left
from prime_rl.rundir.checkpoints import complete, unfinished
from prime_rl.rundir.directory import new_attempt
from prime_rl.rundir.status import Status, replace_text
from prime_rl_app.recovery import LOG, Liveness, Recovery

FOREVER = "import time; time.sleep(600)"


def failure(cause="trainer was ended by SIGKILL", reported=False):
    return ProcessFailed("the whole story", "trainer", cause, reported)


@pytest.fixture
def run(tmp_path):
    """Two restarts are allowed; ``trained`` writes the last step."""
    new_attempt(tmp_path)
    slept, said = [], []
    config = RunConfig(model={"name": "m"}, max_steps=9, recovery={"max_restarts": 2})
    view = SimpleNamespace(run_dir=tmp_path, print=said.append)
    recovery = Recovery(config, view, slept.append)

    def trained(step):
        (tmp_path / "trainer.jsonl").write_text(json.dumps({"step": step}) + "\n")

    return SimpleNamespace(recovery=recovery, trained=trained, slept=slept, said=said, dir=tmp_path)


def test_restarts_are_counted_from_the_furthest_step(run):
    run.trained(4)
    for _ in range(2):
        run.recovery.allow(failure(), 1)
    run.trained(3)  # no further than before
    with pytest.raises(ProcessFailed, match="the whole story"):
        run.recovery.allow(failure(), 1)
    run.trained(5)
    run.recovery.allow(failure(), 1)
    assert run.slept == [0.0, 1.0, 0.0]
    assert run.said[1].startswith(
        "trainer was ended by SIGKILL, after step 4: starting again from the start (2 of 2 times; "
    )
    lines = [json.loads(line) for line in (run.dir / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 4, 5] and lines[0]["lost_seconds"] >= 0


def test_a_cause_that_is_a_sentence_reads_on(run):
    run.trained(4)
    run.recovery.allow(failure("orchestrator exited with code 1: no group. Add some."), 1)
    assert run.said[0].startswith("orchestrator exited with code 1: no group. Add some, after step")


def test_an_error_that_a_process_reports_ends_a_run_that_has_trained_nothing(run):
    with pytest.raises(ProcessFailed):
        run.recovery.allow(failure("trainer exited with code 1: no GPU", reported=True), 1)
    run.recovery.allow(failure(), 1)  # nothing says that it would come again


def test_on_a_full_disk_the_run_ends_with_the_cause(run):
    (run.dir / LOG).symlink_to("/dev/full")
    with pytest.raises(ProcessFailed, match="the whole story") as raised:
        run.recovery.allow(failure(), 1)
    assert raised.value.__cause__.errno == errno.ENOSPC


def test_a_disk_that_refuses_to_show_checkpoints_keeps_no_run_from_going_on(run, monkeypatch):
    (run.dir / "checkpoints").mkdir()
    disk = SharedDisk(monkeypatch, run.dir / "checkpoints")
    with disk.refusing():
        run.recovery.allow(failure(), 1)
    assert disk.refused
    assert "starting again from the start" in run.said[0]


def test_a_disk_that_refuses_the_line_of_a_restart_does_not_hide_the_cause(run, monkeypatch):
    run.recovery.allow(failure("first"), 1)
    disk = SharedDisk(monkeypatch, run.dir / LOG)
    with disk.refusing(), pytest.raises(ProcessFailed) as raised:
        run.recovery.allow(failure("second"), 1)
    assert raised.value.cause == "second"
    causes = [json.loads(line)["cause"] for line in (run.dir / LOG).read_text().splitlines()]
    assert causes == ["first"]


def test_a_restart_that_a_full_disk_took_in_part_tears_no_later_line(run):
    run.recovery.allow(failure("first"), 1)
    path = run.dir / LOG
    limits = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(ProcessFailed):
            run.recovery.allow(failure("second"), 1)
    finally:
        setrlimit(RLIMIT_FSIZE, limits)
    run.recovery.allow(failure("third"), 1)
    causes = [json.loads(line)["cause"] for line in path.read_text().splitlines()]
    assert causes == ["first", "third"]


def test_an_error_that_comes_back_at_the_same_step_ends_the_run(run):
    same = failure("orchestrator exited with code 1: plugin 'a' failed", reported=True)
    run.trained(4)
    run.recovery.allow(same, 1)
    with pytest.raises(ProcessFailed):
        run.recovery.allow(same, 1)
    run.trained(6)
    run.recovery.allow(same, 1)  # at another step


def test_a_stopped_process_and_a_silent_loop_are_found_and_named(spawn, tmp_path):
    clock = Clock()
    status = Status(tmp_path / "status" / "orchestrator.json")
    status.path.parent.mkdir()
    status.report("sampling batch 3", waiting_for="inference")
    config = RecoveryConfig(stopped_timeout=10, hang_timeout=30)
    liveness = Liveness(tmp_path, config, clock.monotonic)
    trainer, orchestrator = spawn(FOREVER, "trainer"), spawn(FOREVER, "orchestrator")

    def look(seconds, beats=True):
        for _ in range(seconds):
            clock.sleep(1)
            if beats:
                os.utime(status.path, ns=(0, int(clock.now * 1e9)))
            if found := liveness.look([trainer, orchestrator]):
                return found
        return None

    assert look(60) is None
    os.kill(trainer.process.pid, signal.SIGSTOP)
    eventually(lambda: stopped(trainer.process.pid))
    clock.sleep(3600)  # we were stopped ourselves: that counts as one look
    assert look(4) is None
    process, why = look(20)
    assert process is trainer
    assert why == (
        f"has been stopped for 10 s (recovery.stopped_timeout): process {trainer.process.pid}"
    )
    trainer.kill()
    trainer.process.wait()
    process, why = look(40, beats=False)
    assert process is orchestrator
    assert why == (
        "has given no sign of life for 30 s (recovery.hang_timeout): sampling batch 3, "
        "waiting for inference"
    )


def test_a_silent_process_that_reads_a_large_model_is_not_taken_for_dead(spawn, tmp_path):
    """One call reads it: nothing beats meanwhile."""
    clock, model = Clock(), tmp_path / "model"
    (tmp_path / "status").mkdir()
    Status(tmp_path / "status" / "trainer.json").report("loading weights")
    model.write_bytes(bytes(80 << 20))
    order = tmp_path / "order"
    code = (
        "import time, pathlib\n"
        f"model, order = pathlib.Path({str(model)!r}), pathlib.Path({str(order)!r})\n"
        "while True:\n"
        "    if order.exists():\n"
        "        model.read_bytes()\n"
        "        order.unlink()\n"
        "    time.sleep(0.01)\n"
    )
    trainer = spawn(code, "trainer")
    liveness = Liveness(tmp_path, RecoveryConfig(hang_timeout=30), clock.monotonic)

    def look():
        clock.sleep(1)
        return liveness.look([trainer])

    for _ in range(6):
        for _ in range(20):
            assert look() is None
        order.touch()
        eventually(lambda: not order.exists())
    while (found := look()) is None:
        assert clock.now < 1000 + 600
    assert found[1].startswith("has given no sign of life for 30 s")


FOR_BATCH = Facts(waits_for="orchestrator")


def serving(*versions):
    engines = [EngineFacts(version=version, has_served=True) for version in versions]
    return Facts(engines={f"inference_{n}": each for n, each in enumerate(engines)})


def test_weights_that_vanish_before_an_engine_loads_them_are_named(spawn, tmp_path):
    """Else trainer and orchestrator wait for each other for ever, and both give signs of life."""
    clock, trainer = Clock(), spawn(FOREVER, "trainer")
    (tmp_path / "status").mkdir()
    engines = Status(tmp_path / "status" / "engines.json")
    engines.report("2 of 2 serve", facts=serving(4, 3))
    status = Status(tmp_path / "status" / "trainer.json")
    status.report("waiting", facts=FOR_BATCH, step=6.0, announced=5.0)
    version = tmp_path / "broadcasts" / "step_5"
    version.mkdir(parents=True)
    (version / "STABLE").touch()
    liveness = Liveness(tmp_path, RecoveryConfig(lost_timeout=10), clock.monotonic)

    def look(seconds):
        for _ in range(seconds):
            clock.sleep(1)
            if found := liveness.look([trainer]):
                return found
        return None

    assert look(30) is None
    (version / "STABLE").unlink()
    version.rmdir()
    assert look(8) is None
    engines.report("2 of 2 serve", facts=serving(5, 4))
    assert look(30) is None  # loaded: the version is needed no longer
    status.report("waiting", facts=FOR_BATCH, step=7.0, announced=6.0)
    process, why = look(30)
    assert process is trainer
    assert why == (
        "waits for the next batch, and the weights of step 6 that it announced are gone for 10 s "
        "(recovery.lost_timeout) before an engine has loaded them: "
        f"{tmp_path / 'broadcasts' / 'step_6'}"
    )
    status.report("training", step=7.0)
    assert look(30) is None


@pytest.mark.parametrize(
    "waits",
    [
        # The version of the step before is being written, or will be.
        {"state": "waiting", "facts": FOR_BATCH, "announced": 4.0},
        {"state": "writing weights version 5", "waiting_for": "disk", "announced": 4.0},
        # Resumed after step 5: an engine that was kept loads the checkpoint's weights.
        {"state": "waiting", "facts": FOR_BATCH, "announced": -1.0},
        # Nothing says what it has announced.
        {"state": "waiting", "facts": FOR_BATCH},
    ],
)
def test_weights_that_were_not_announced_are_not_gone(spawn, tmp_path, waits):
    clock, trainer = Clock(), spawn(FOREVER, "trainer")
    (tmp_path / "status").mkdir()
    Status(tmp_path / "status" / "engines.json").report("1 of 1 serve", facts=serving(4))
    Status(tmp_path / "status" / "trainer.json").report(**waits, step=6.0)
    liveness = Liveness(tmp_path, RecoveryConfig(), clock.monotonic)
    for _ in range(150):
        clock.sleep(10)
        assert liveness.look([trainer]) is None


def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def test_a_process_of_an_earlier_attempt_writes_nothing_more(tmp_path, monkeypatch):
    new_attempt(tmp_path)
    monkeypatch.setenv(PROCESS, f"2:trainer:{tmp_path}")
    unfinished(tmp_path, 3).weights.mkdir(parents=True)
    path = tmp_path / "status" / "trainer.json"
    Status(path).report("training")
    assert new_attempt(tmp_path) == 3
    Status(path).report("woke up")
    assert json.loads(path.read_text())["state"] == "training"
    for write in (lambda: complete(tmp_path, 3), lambda: replace_text(tmp_path / "x", "y")):
        with pytest.raises(
            RunError, match=r"trainer is of attempt 2, and attempt 3 of .* has begun"
        ):
            write()
    assert not (tmp_path / "checkpoints" / "step_3").exists()
    monkeypatch.setenv(PROCESS, f"2:inference_1:{tmp_path}")  # engines serve several attempts
    Status(path).report("serves")
    assert json.loads(path.read_text())["state"] == "serves"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_orchestrator_that_hides_its_environment_is_found_by_its_command_line(tmp_path):
    def hidden(run_dir):
        argv = [sys.executable, "-c", f"print(flush=True); {FOREVER}", "-m", ORCHESTRATOR]
        return subprocess.Popen(
            [*argv, str(run_dir)], stdout=subprocess.PIPE, env={}, start_new_session=True
        )

    (tmp_path / "other").mkdir()
    everyone = [hidden(tmp_path), hidden(tmp_path / "other")]
    try:
        for process in everyone:
            process.stdout.readline()
        kill_left(tmp_path, kept={"orchestrator"})
        assert [exists(process.pid) for process in everyone] == [True, True]
        kill_left(tmp_path)
        assert [exists(process.pid) for process in everyone] == [False, True]
    finally:
        for process in everyone:
            process.kill()
            process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_left_its_session_is_found_by_its_environment_and_other_runs_are_left_alone(tmp_path):
    def daemon(name, run_dir):
        code = f"import os, time; print(os.getpid(), flush=True); {FOREVER}"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, PROCESS: f"1:{name}:{run_dir}"},
            start_new_session=True,
        )

    (tmp_path / "other").mkdir()
    ours, engine = daemon("orchestrator", tmp_path), daemon("inference", tmp_path)
    other = daemon("orchestrator", tmp_path / "other")
    everyone = (ours, engine, other)
    try:
        for process in everyone:
            process.stdout.readline()
        os.kill(ours.pid, signal.SIGSTOP)
        kill_left(tmp_path, kept={"inference"})
        assert [exists(process.pid) for process in everyone] == [False, True, True]
        kill_left(tmp_path)
        assert [exists(process.pid) for process in everyone] == [False, False, True]
    finally:
        for process in everyone:
            process.kill()
            process.communicate()
