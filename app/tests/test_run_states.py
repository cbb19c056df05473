"""Runs from another terminal: list, status and stop. Real processes stand in for a run."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from disks import SharedDisk
from typer.testing import CliRunner
from waiting import LIMIT, Clock, eventually, exists

from prime_rl import ConfigError, RunError
from prime_rl.rundir.control import Supervisor
from prime_rl.rundir.status import Status
from prime_rl_app import run_states
from prime_rl_app.cli.app import app
from prime_rl_app.run_states import find_run, last_batch, list_runs, run_info, state_of, stop
from prime_rl_tools.commands.runs import age

REWARD = "train/agg/all/reward/mean"
TOKENS = "progress/total_tokens"

RUN = """
import signal, sys, time
from pathlib import Path
from prime_rl_app.children import sigterm_is_ctrl_c
from prime_rl.rundir.control import supervised
try:
    with supervised(Path(sys.argv[1])), sigterm_is_ctrl_c():
        if sys.argv[2] == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(3600)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def make(tmp_path):
    """Makes run directories; ``start`` puts a process into one."""
    started = []

    class Maker:
        folder = tmp_path

        def run(self, name="r", steps=0, max_steps=10, age=0.0):
            run_dir = tmp_path / name
            (run_dir / "configs").mkdir(parents=True)
            (run_dir / "status").mkdir()
            config = run_dir / "configs" / "run.json"
            config.write_text(json.dumps({"max_steps": max_steps}))
            os.utime(config, (time.time() - age,) * 2)
            rows = [{"step": s, REWARD: s / 10, TOKENS: s} for s in range(1, steps + 1)]
            rows += [{"step": steps, "loss/mean": 0.5}] if steps else []
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (run_dir / "metrics.jsonl").write_text(text)
            return run_dir

        def start(self, run_dir, how="normal"):
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(run_dir), how], stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout.readline() == "up\n"
            return process

    yield Maker()
    for process in started:
        process.kill()
        process.communicate()


def prime_rl(*arguments, width=80):
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(width)})


# -- state ------------------------------------------------------------------------------------


def test_a_supervisor_that_was_killed_has_died(make):
    run_dir = make.run()
    process = make.start(run_dir)
    assert state_of(run_dir) == "running"
    process.kill()
    eventually(lambda: not exists(process.pid))
    assert state_of(run_dir) == "died"


def test_the_state_of_a_run_on_another_machine_is_unknown(make):
    run_dir = make.run()
    Supervisor(1, "elsewhere", 1.0).write(run_dir)
    assert state_of(run_dir) == "unknown"
    with pytest.raises(RunError, match="on another machine, 'elsewhere': stop it there"):
        stop(run_dir, 1.0)


def test_runs_without_a_supervisor_record(make):
    run_dir = make.run()
    assert state_of(run_dir) == "unknown"
    (run_dir / "summary.json").touch()
    assert state_of(run_dir) == "done"
    (run_dir / ".dry-run").touch()
    assert state_of(run_dir) == "dry run"


def test_a_folder_with_another_run_json_is_no_run(make):
    run_dir = make.run()
    (run_dir / "configs" / "run.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"is no run directory: .*run\.json"):
        run_info(run_dir)


# -- how far --------------------------------------------------------------------------------------


def test_the_last_batch_is_found_before_other_and_incomplete_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_batch(path) == {}
    path.write_text(
        "".join(
            json.dumps({"step": step, REWARD: step / 10, TOKENS: step}) + "\n" for step in (1, 2)
        )
        + json.dumps({"step": 1, "loss/mean": 0.1}) + "\n" + '{"step": 3, "train/ag'
    )  # fmt: skip
    assert last_batch(path)["step"] == 2


@pytest.mark.parametrize("num_lines", [1, 200])
def test_the_last_batch_is_found_before_long_lines(tmp_path, num_lines):
    """Such as the evaluations of a run with hundreds of envs."""
    path = tmp_path / "metrics.jsonl"
    batches = [{"step": step, "progress/total_tokens": 9.0 * step} for step in (1, 2)]
    long = {"step": 2} | {f"eval/env{n}/all/reward/mean": 0.5 for n in range(2_000)}
    rows = [*batches, *[long] * num_lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 60_000 * num_lines
    assert last_batch(path)["step"] == 2


def test_a_file_without_a_batch_has_no_last_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = {"step": 0} | {f"eval/env{n}/all/reward/mean": 0.5 for n in range(10_000)}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    assert last_batch(path) == {}


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_states, "TAIL_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": s, REWARD: 0.5, TOKENS: 1}) + "\n" for s in range(500))
    )
    assert last_batch(path)["step"] == 499


def test_runs_are_listed_the_newest_last(make):
    make.run("old", steps=3, age=7200)
    make.run("new", steps=5, max_steps=5)
    (make.run("dry") / ".dry-run").touch()
    (make.run("half") / "configs" / "run.json").write_text('{"max_st')
    assert [(run.name, run.step, run.max_steps, run.reward) for run in list_runs(make.folder)] == [
        ("old", 3, 10, 0.3), ("new", 5, 5, 0.5)
    ]  # fmt: skip


def test_a_run_by_name_or_by_path(make, tmp_path):
    run_dir = make.run("mine")
    assert find_run("mine", tmp_path) == find_run(str(run_dir), tmp_path / "other") == run_dir
    with pytest.raises(ConfigError, match=r"no run 'mime'.*Did you mean 'mine'\?"):
        find_run("mime", tmp_path)
    with pytest.raises(ConfigError, match="--output-dir names another folder"):
        find_run("mine", tmp_path / "other")
    with pytest.raises(ConfigError, match="is no run directory"):
        run_info(tmp_path)


# -- stop ---------------------------------------------------------------------------------------


def test_latest_is_the_newest_run_that_is_no_dry_run(make, tmp_path):
    with pytest.raises(ConfigError, match="latest: there is no run in"):
        find_run("latest", tmp_path)
    make.run("old", steps=2, age=60)
    new = make.run("new", steps=3, age=30)
    (make.run("dry") / ".dry-run").touch()
    assert find_run("latest", tmp_path) == new
    said = CliRunner().invoke(app, ["status", "latest", "--json", "--output-dir", str(tmp_path)])
    assert json.loads(said.stdout)["name"] == "new"


def test_stop_ends_the_run_and_waits_until_it_is_gone(make):
    run_dir = make.run()
    process = make.start(run_dir)
    assert stop(run_dir, timeout=LIMIT)
    assert not exists(process.pid)
    assert process.wait(LIMIT) == 130
    assert state_of(run_dir) == "stopped"
    assert not stop(run_dir, timeout=LIMIT)  # it does not run any more


def test_stop_names_processes_that_do_not_end(make):
    run_dir = make.run()
    process = make.start(run_dir, "stubborn")
    with pytest.raises(RunError, match=rf"processes {process.pid} have not ended within 0 s"):
        stop(run_dir, timeout=0.3)


def test_stop_waits_for_a_child_that_outlives_its_supervisor(make, monkeypatch):
    """Half a second begins when the supervisor has gone, however long that takes."""
    run_dir = make.run()
    supervisor = make.start(run_dir)
    child = subprocess.Popen(["sleep", "3600"])
    status = run_dir / "status" / "trainer.json"
    Status(status).report("training")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"pid": child.pid}))

    class AfterSupervisor(Clock):
        def sleep(self, seconds):
            eventually(lambda: not exists(supervisor.pid))
            super().sleep(seconds)

    monkeypatch.setattr(run_states, "time", AfterSupervisor())
    try:
        with pytest.raises(RunError, match=f"processes {child.pid} have not ended"):
            stop(run_dir, timeout=0.5)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


# -- the commands ---------------------------------------------------------------------------------


def test_the_list_fits_80_columns(make):
    make.run("a-run-with-a-very-long-name-" + "x" * 60, steps=7, age=62)
    done = prime_rl("runs", "--output-dir", make.folder)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "7/10" in lines[1] and "0.700" in lines[1] and "1 min" in lines[1]
    assert "no runs in" in prime_rl("runs", "--output-dir", make.folder / "none").output


def test_the_list_as_json(make):
    make.run("one", steps=2)
    (row,) = json.loads(prime_rl("runs", "--output-dir", make.folder, "--json").output)
    assert (row["name"], row["state"], row["step"], row["reward"]) == ("one", "unknown", 2, 0.2)


def test_status_shows_each_process(make):
    run_dir = make.run("one", steps=2)
    make.start(run_dir)
    Status(run_dir / "status" / "trainer.json").report(
        "waiting", waiting_for="orchestrator (batch 3)", step=3
    )
    Status(run_dir / "status" / "orchestrator.json").report("evaluating", progress=0.5, open=7.0)
    done = prime_rl("status", "one", "--output-dir", make.folder)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    for text in ("running", "2/10", "0.200", "orchestrator (batch 3)", "step 3", "evaluating 50%"):
        assert text in done.output, text
    assert "open 7 " in done.output
    found = json.loads(prime_rl("status", "one", "--output-dir", make.folder, "--json").output)
    assert found["processes"]["trainer"]["waiting_for"] == "orchestrator (batch 3)"
    assert found["state"] == "running"
    assert list(found["processes"]) == ["trainer", "orchestrator"]


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_failed_run_says_which_process_ended_it_and_why(make, command):
    run_dir = make.run("one", steps=2)
    (run_dir / "metrics.jsonl").unlink()  # it failed before its first batch
    Status(run_dir / "status" / "trainer.json").report("waiting")
    Status(run_dir / "status" / "orchestrator.json").report("failed", error="no row is left")
    assert "failed  " not in prime_rl(command, "one", "--output-dir", make.folder).output
    Supervisor(1, "elsewhere", 1.0, state="failed").write(run_dir)
    said = prime_rl(command, "one", "--output-dir", make.folder).output
    assert "failed  orchestrator: no row is left\n" in said
    assert "failed  trainer" not in said


def test_status_names_a_full_disk(make, monkeypatch):
    make.run("one", steps=2)
    assert "disk " not in prime_rl("status", "one", "--output-dir", make.folder).output
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3 * 2**19))
    said = prime_rl("status", "one", "--output-dir", make.folder).output
    assert "disk    1.5 MiB are free. Free space; `prime-rl run --resume` continues" in said


def test_stop_from_the_command_line(make):
    run_dir = make.run("one")
    process = make.start(run_dir)
    done = prime_rl("stop", run_dir, "--timeout", LIMIT)
    assert done.exit_code == 0 and done.stdout == f"{run_dir}: stopped\n"
    assert done.stderr == "saving weights; another `prime-rl stop` ends the run at once\n"
    assert process.wait(LIMIT) == 130
    again = prime_rl("stop", "one", "--output-dir", make.folder)
    assert again.exit_code == 0
    assert again.output == f"{run_dir}: does not run (it is stopped)\n"


def test_a_failed_stop_gives_the_reason(make):
    run_dir = make.run("one")
    make.start(run_dir, "stubborn")
    done = prime_rl("stop", run_dir, "--timeout", "0.3")
    assert done.exit_code == 1
    assert "have not ended within 0 s" in done.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59, "59 s"), (95, "1 min"), (7300, "2 h"), (90000, "1 d")]
)
def test_ages(seconds, text):
    assert age(seconds) == text


def test_a_stop_goes_on_waiting_when_the_disk_refuses_a_look(make, monkeypatch):
    run_dir = make.run()
    process = make.start(run_dir, "stubborn")
    disk = SharedDisk(monkeypatch, run_dir)
    read = Supervisor.read

    def refused(run_dir):
        """From the second time on, the disk refuses, and then the run ends."""
        monkeypatch.setattr(Supervisor, "read", ended)
        return read(run_dir)

    def ended(run_dir):
        with disk.refusing():
            process.kill()
            process.wait()
            return read(run_dir)

    monkeypatch.setattr(Supervisor, "read", refused)
    assert stop(run_dir, timeout=LIMIT)
    assert disk.refused
