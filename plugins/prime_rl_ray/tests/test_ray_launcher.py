"""The launcher on a real Ray cluster: two nodes, which are local processes on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from disks import SharedDisk
from local_cluster import processes_with, ray_cluster, with_default_signals
from pydantic import ValidationError
from waiting import LIMIT, eventually, exists

from prime_rl import RunError, Task
from prime_rl_ray import RayConfig, RayLauncher, register_launchers
from prime_rl_ray.agent import _appears

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

SMALL = [
    *("--model.warmup_exact", "0.0"),  # creating an untrained policy takes a second
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "8"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]


@pytest.fixture(scope="module")
def cluster():
    """A cluster with two nodes of two cores, shared by this file's tests."""
    with ray_cluster(cpus=2) as found:
        yield found


@pytest.fixture
def address(cluster):
    return cluster.address


# -- without a cluster ----------------------------------------------------------------------


def test_registering_it_does_not_import_ray():
    code = (
        "import sys, prime_rl_ray; prime_rl_ray.register_launchers(); print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert [cls.name for cls in register_launchers()] == ["ray"]


async def test_leftovers_of_a_dead_process_end_before_the_next_starts(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    from prime_rl_ray.agent import Agent

    sleeper = f"300.{os.getpid()}"
    leave = f"import subprocess; subprocess.Popen(['sleep', '{sleeper}'])"
    where = (str(tmp_path / "engine.log"), str(tmp_path), [], 1.0)
    agent = Agent()
    assert await agent.run("inference", [sys.executable, "-c", leave], {}, *where) == 0
    assert processes_with(sleeper)
    touch = "import pathlib; pathlib.Path('here').touch()"
    assert await agent.run("inference", [sys.executable, "-c", touch], {}, *where) == 0
    eventually(lambda: not processes_with(sleeper))
    assert (tmp_path / "here").exists()  # it ran in the folder of the run command


def test_settings_are_checked():
    with pytest.raises(ValidationError, match="strategy"):
        RayConfig(strategy="STRICT_PACK")


def test_a_missing_cluster_is_an_immediate_error():
    pytest.importorskip("ray", reason="ray is not installed")
    launcher = RayLauncher(RayConfig(address="127.0.0.1:1"))
    with pytest.raises(RunError, match=r"no Ray cluster at 127\.0\.0\.1:1: .*refused"):
        launcher.place([Task("trainer", "trainer")], Path(), print)
    launcher.close()


# -- places and processes -------------------------------------------------------------------

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from prime_rl import ProcessCommand, RunError, Task
from prime_rl_ray import RayConfig, RayLauncher

folder = Path(sys.argv[2])
config = RayConfig(address=sys.argv[1], timeout=float(sys.argv[3]), forward_env=("MINE",))
launcher = RayLauncher(config)
env = {"GIVEN": "given"}

def start(task, code, needs=()):
    argv = [sys.executable, "-c", code]
    return launcher.start(task, ProcessCommand(argv, folder / f"{task.name}.log", env, needs))

def wait(process):
    while process.exit_code is None:
        time.sleep(0.02)
    return process.exit_code, process.last_lines()
"""


def drive(script: str, address: str, folder: Path, timeout: float = LIMIT) -> dict:
    """Run a script in a separate driver. Returns its ``found``. ``timeout``: the launcher's."""
    code = f"{DRIVER}\nfound = {{}}\ntry:\n"
    code += "".join(f"    {line}\n" for line in script.strip().splitlines())
    code += "finally:\n    launcher.close()\nprint('FOUND', json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", code,
         address, str(folder), str(timeout)],
        env=os.environ | {"MINE": "mine"}, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


PROCESSES = """
FOREVER = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
tasks = [Task("inference", "inference", num_ports=1), Task("trainer", "trainer", apart=True),
         Task("trainer_1", "trainer", apart=True, num_ports=2)]
told = []
found["gpus"] = launcher.num_gpus()
places = launcher.place(tasks, folder, told.append)
found["told"] = told
found["addresses"] = [place.address for place in places.values()]
found["ports"] = [len(set(place.ports)) for place in places.values()]

import ray
found["nodes"] = ray.get([
    launcher._connected._agents[name].__ray_call__.remote(
        lambda self: ray.get_runtime_context().get_node_id())
    for name in ("trainer", "trainer_1")])

code = "import os; print(os.environ['MINE'], os.environ['GIVEN'], os.getcwd()); raise SystemExit(3)"
found["ended"] = wait(start(tasks[0], code))
found["again"] = wait(start(tasks[0], "print('again')"))
import prime_rl_ray.cluster
prime_rl_ray.cluster.SEE_SECONDS = 0.2
found["unseen"] = wait(start(tasks[0], "pass", [folder / "not" / "there"]))

def pid_of(task):
    log = folder / f"{task.name}.log"
    while not (log.exists() and log.read_text().endswith("\\n")):
        time.sleep(0.02)
    return int(log.read_text().split()[1])

ended, dying = start(tasks[1], FOREVER), start(tasks[2], FOREVER)
found["pids"] = [pid_of(tasks[1]), pid_of(tasks[2])]
launcher.end([ended])
found["told_to_end"] = wait(ended)[0]
import psutil
actor = psutil.Process(found["pids"][1]).ppid()
os.kill(actor, signal.SIGKILL)
found["died"] = wait(dying)
found["replaced"] = wait(start(tasks[2], "raise SystemExit(5)"))[0]
moved = launcher.place(tasks[1:], folder, told.append)
found["moved"] = [(name, place.address, len(place.ports)) for name, place in moved.items()]
found["after"] = [wait(start(task, "raise SystemExit(6)"))[0] for task in tasks[1:]]
"""


@pytest.mark.slow
def test_tasks_get_places_and_processes_and_a_dead_actor_ends_its_process(address, tmp_path):
    found = drive(PROCESSES, address, tmp_path)
    assert found["gpus"] == 0
    assert found["told"] == [
        "Ray cluster (room for trainer, trainer_1)",
        "Ray cluster (room for inference)",
    ]
    assert found["addresses"] == ["127.0.0.1"] * 3 and found["ports"] == [1, 0, 2]
    assert len(set(found["nodes"])) == 2  # two nodes for the trainer
    assert found["ended"] == [3, [f"mine given {os.getcwd()}"]]
    assert found["again"][0] == 0 and found["again"][1][-1] == "again"
    assert found["unseen"][0] == 1
    assert "not/there does not exist on node" in found["unseen"][1][-1]
    assert found["told_to_end"] == -signal.SIGTERM
    code, lines = found["died"]
    assert code == -signal.SIGKILL
    assert found["replaced"] == 5  # by a new actor in the same place
    assert found["moved"] == [["trainer", "127.0.0.1", 0], ["trainer_1", "127.0.0.1", 2]]
    assert found["after"] == [6, 6]
    assert lines[0].startswith("pid ") and lines[-1].startswith("its Ray actor is gone: ")
    eventually(lambda: not exists(found["pids"][0]))


NO_ROOM = """
try:
    launcher.place([Task("trainer", "trainer", num_cpus=3)], folder, lambda what: None)
except RunError as error:
    found["error"] = str(error)
"""


@pytest.mark.slow
def test_the_error_about_missing_room_lists_the_resources(address, tmp_path):
    error = drive(NO_ROOM, address, tmp_path, timeout=3)["error"]
    assert error.startswith("the Ray cluster had no room for {'trainer': {'CPU': 3.0}} within 3 s")
    assert "Its nodes have [{'CPU': 2.0, 'GPU': 0.0}, {'CPU': 2.0, 'GPU': 0.0}]" in error


# -- a whole run ----------------------------------------------------------------------------


def start_run(address: str, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "from prime_rl_app.cli import main; main()",
        "run",
        str(CONFIG),
    ]
    command += [*SMALL, "--max_steps", "100000", "--output_dir", str(folder), "--run.name", "ray"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*command, "--launcher", "ray", "--launcher.address", address, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=with_default_signals,
        )


@pytest.mark.slow
def test_a_run_trains_on_the_cluster_and_ctrl_c_leaves_nothing_behind(address, tmp_path):
    process = start_run(address, tmp_path)
    run_dir = tmp_path / "ray"
    try:
        steps = run_dir / "trainer.jsonl"
        eventually(lambda: steps.exists() and steps.read_bytes().count(b"\n") >= 1, process)
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
    output = (tmp_path / "output").read_text()
    assert process.returncode == 130, output
    assert "Stopped at step" in output
    assert (run_dir / "weights" / "model.safetensors").exists()
    assert {path.name for path in (run_dir / "logs" / "latest").iterdir()} == {
        *("model.log", "inference.log", "trainer.log", "orchestrator.log")
    }
    eventually(lambda: not processes_with(str(run_dir)))


@pytest.mark.slow
def test_a_run_goes_on_after_the_death_of_actors_and_of_a_node(cluster, tmp_path):
    run_dir = tmp_path / "ray"
    process = start_run(cluster.address, tmp_path, "--ckpt.interval", "1", "--ckpt.keep_last", "2")

    def pid_of(name):
        return json.loads((run_dir / "status" / f"{name}.json").read_text())["pid"]

    def trained():
        file = run_dir / "trainer.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)

    def restarts():
        file = run_dir / "recoveries.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def goes_on():
        before = trained()
        eventually(lambda: trained() > before + 1, process)

    try:
        eventually(lambda: trained(), process)
        os.kill(psutil.Process(pid_of("trainer")).ppid(), signal.SIGKILL)
        eventually(lambda: restarts() == 1, process)
        goes_on()
        engine = pid_of("inference")
        os.kill(psutil.Process(engine).ppid(), signal.SIGKILL)
        eventually(lambda: pid_of("inference") != engine, process)
        goes_on()
        assert restarts() == 1  # the others went on
        cluster.tell("add")  # room for what the lost node had
        names = ("inference", "trainer", "orchestrator")
        raylets = {psutil.Process(pid_of(name)).parent().ppid() for name in names}
        cluster.tell((raylets - {cluster.head}).pop())
        goes_on()
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
    output = (tmp_path / "output").read_text()
    assert process.returncode == 130, output
    eventually(lambda: not processes_with(str(run_dir)))


async def test_a_file_that_the_disk_refuses_to_show_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").touch()
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        assert not await _appears(tmp_path / "model", deadline=0.0)
    assert disk.refused == 1
    assert await _appears(tmp_path / "model", deadline=0.0)
