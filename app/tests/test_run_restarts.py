"""Which engines are restarted, how often, and what happens after the limit."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from waiting import LIMIT, Clock, eventually, exists, until

from prime_rl import PluginConfig
from prime_rl.inference.engine import EngineState
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.orchestrator.engines import report_engines
from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.plugins.status import EngineFacts, Facts, read_status
from prime_rl.rundir.machine import free_ports
from prime_rl.rundir.status import Status
from prime_rl.weights.versions import Weights
from prime_rl_app.children import LocalLauncher, Pause, end
from prime_rl_app.restarts import EngineRestarts


class Fake(Process):
    def __init__(self, name):
        self.name, self.log, self.code = name, None, None

    @property
    def exit_code(self):
        return self.code


class Starts(Launcher):
    """Starts nothing, and remembers what it was asked for."""

    name = "starts"

    def __init__(self):
        self.started, self.ended, self.clock = [], [], Clock()

    def start(self, task, command):
        self.started.append((task.name, command.argv))
        return Fake(task.name)

    def end(self, processes):
        self.ended += [process.name for process in processes]


def command(*argv):
    return ProcessCommand(argv, Path("log"))


def serving(version):
    return EngineFacts(version=version, has_served=True)


def silent(number):
    return EngineFacts(has_served=True, silence=number)


def report(status, **engines):
    status.report("as the orchestrator writes it", facts=Facts(engines=engines))


def begin(restarts, task, command):
    restarts.add(task, command)
    return restarts._launcher.start(task, command)


def restart(restarts, processes):
    """As the supervisor does, until the pause of an engine is over."""
    restarts.restart(processes)
    while any(isinstance(each, Pause) for each in processes):
        restarts._launcher.clock.sleep(1)
        restarts.restart(processes)


@pytest.fixture
def run(tmp_path):
    """Two engines that serve, and a trainer."""
    (tmp_path / "status").mkdir()
    printed = []
    launcher = Starts()
    restarts = EngineRestarts(launcher, tmp_path, 2, printed.append, launcher.clock.monotonic)
    processes = [
        begin(restarts, Task("inference", "inference"), command("a")),
        begin(restarts, Task("inference_1", "inference", 1), command("b")),
        begin(restarts, Task("trainer", "trainer"), command("t")),
    ]
    status = Status(tmp_path / "status" / "engines.json")
    report(status, inference=serving(3), inference_1=serving(3))
    restarts._launcher.started.clear()
    return restarts, processes, printed, status


def test_an_engine_that_dies_is_restarted_with_its_own_command(run):
    restarts, processes, printed, _ = run
    processes[1].code = -signal.SIGKILL
    restart(restarts, processes)
    assert restarts._launcher.started == [("inference_1", ("b",))]
    assert [process.name for process in processes] == ["inference", "inference_1", "trainer"]
    assert processes[1].exit_code is None
    assert printed == ["inference_1 was ended by SIGKILL: starting it again (1 of 2 times)"]


def test_an_engine_past_its_limit_is_dropped_while_another_works(run):
    restarts, processes, printed, _ = run
    for _ in range(3):
        next(p for p in processes if p.name == "inference").code = 1
        restart(restarts, processes)
    assert [process.name for process in processes] == ["inference_1", "trainer"]
    assert printed[-1] == "inference exited with code 1: going on without it"
    assert restarts._launcher.ended == ["inference", "inference"]
    assert len(restarts._launcher.started) == 2


def test_the_last_engine_stays_in_the_list_with_its_exit_code(run):
    restarts, processes, _, _ = run
    for _ in range(3):
        for process in [p for p in processes if p.name != "trainer"]:
            process.code = 1
        restart(restarts, processes)
    dead = [process for process in processes if process.exit_code is not None]
    assert len(dead) >= 1 and all(process.name.startswith("inference") for process in dead)


def test_the_engine_of_the_first_weights_is_restarted_too_and_never_dropped(run):
    """Nor does it stand in for the policy's engines."""
    restarts, processes, _, _ = run
    processes.append(begin(restarts, Task("inference_2", "inference", 2), command("i")))
    restarts._launcher.started.clear()
    for _ in range(3):
        next(p for p in processes if p.name == "inference_2").code = 1
        restart(restarts, processes)
    assert restarts._launcher.started == [("inference_2", ("i",))] * 2
    assert processes[-1].exit_code == 1
    for _ in range(3):
        for process in processes[:2]:
            process.code = 1
        restart(restarts, processes)
    assert len([p for p in processes if p.name in ("inference", "inference_1")]) >= 1


def test_a_hung_engine_is_restarted_once_per_reported_hang(run):
    restarts, processes, printed, status = run
    away = EngineFacts(has_served=True)
    for how in (silent(1), silent(1), EngineFacts(), away, silent(2), silent(2)):
        report(status, inference=serving(4), inference_1=how)
        restart(restarts, processes)
    assert restarts._launcher.started == [("inference_1", ("b",))] * 2
    assert printed == [
        "inference_1 answers nothing: starting it again (1 of 2 times)",
        "inference_1 answers nothing: starting it again (2 of 2 times)",
    ]
    report(status, inference=serving(4), inference_1=silent(3))
    restart(restarts, processes)
    assert printed[2:] == ["inference_1 answers nothing: going on without it"]
    assert restarts._launcher.ended == ["inference_1", "inference_1"]
    assert [process.name for process in processes] == ["inference", "trainer"]


def test_a_stale_report_does_not_end_the_restarted_engine(run):
    restarts, processes, printed, status = run
    report(status, inference=serving(4), inference_1=silent(1))
    processes[1].code = 1
    for _ in range(3):
        restart(restarts, processes)
    assert printed == ["inference_1 exited with code 1: starting it again (1 of 2 times)"]


def test_the_last_engine_that_hangs_past_its_limit_is_kept(run):
    restarts, processes, printed, status = run
    processes.pop(0)
    for number in (1, 2, 3, 3):
        report(status, inference_1=silent(number))
        restart(restarts, processes)
    assert len(printed) == 2
    assert [process.name for process in processes] == ["inference_1", "trainer"]


def test_an_engine_that_exits_before_it_has_served_is_restarted_once_beside_another(run):
    restarts, processes, printed, status = run
    report(status, inference=serving(0), inference_1=EngineFacts())
    for _ in range(2):
        processes[1].code = 1
        restart(restarts, processes)
    assert [process.name for process in processes] == ["inference", "trainer"]
    assert printed == [
        "inference_1 exited with code 1: starting it again (1 of 1 times)",
        "inference_1 exited with code 1: going on without it",
    ]


def test_an_engine_that_exits_before_it_has_served_and_is_alone_ends_the_run(run):
    restarts, processes, printed, status = run
    status.report("0 of 1 serve", inference="starting")
    del processes[1]
    processes[0].code = -signal.SIGKILL  # by someone else: it may start the next time
    restart(restarts, processes)
    assert processes[0].exit_code is None and len(printed) == 1
    processes[0].code = 1
    restart(restarts, processes)
    assert processes[0].exit_code == 1 and len(printed) == 1


def test_pauses_grow_and_a_newer_version_gives_all_restarts_back(run):
    restarts, processes, printed, status = run
    for pauses in (0, 1):
        processes[1].code = 1
        before = restarts._launcher.clock.now
        restart(restarts, processes)
        assert restarts._launcher.clock.now - before == pauses
    assert restarts._launcher.ended == ["inference_1"]  # its children do not outlive a pause
    report(status, inference=serving(4), inference_1=serving(4))
    processes[1].code = 1
    restart(restarts, processes)
    assert printed[-1].endswith("(1 of 2 times)")


def test_a_frozen_engine_that_outlives_newer_versions_gets_all_restarts_back(run):
    """It serves none, and rollouts of the version before may train without it."""
    restarts, processes, printed, status = run
    processes.append(begin(restarts, Task("inference_2", "inference", 2), command("i")))
    version = 3
    for versions, count in ((0, 1), (1, 2), (2, 1), (5, 1), (1, 2)):
        restart(restarts, processes)  # it is seen to run
        for _ in range(versions):
            version += 1
            report(status, inference=serving(version), inference_1=serving(version))
            restart(restarts, processes)
        processes[-1].code = 1
        restart(restarts, processes)
        assert printed[-1].endswith(f"starting it again ({count} of 2 times)")
    report(status, inference=serving(3), inference_1=serving(3))  # the run went back
    restart(restarts, processes)
    report(status, inference=serving(5), inference_1=serving(5))
    restart(restarts, processes)
    processes[-1].code = 1
    restart(restarts, processes)
    assert printed[-1].endswith("starting it again (1 of 2 times)")


def test_only_engines_are_restarted(run):
    restarts, processes, printed, _ = run
    processes[2].code = 1
    restart(restarts, processes)
    assert processes[2].exit_code == 1 and printed == [] and restarts._launcher.started == []


def test_children_of_a_dead_engine_are_ended_before_its_restart(tmp_path):
    """vLLM's engine is a child of its server: it would keep the GPU's memory."""
    code = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    launcher, task = LocalLauncher(PluginConfig()), Task("inference", "inference")
    asked = ProcessCommand([sys.executable, "-c", code], tmp_path / "inference.log")

    def start(number):
        process = launcher.start(task, asked)
        eventually(lambda: len(asked.log.read_text().splitlines()) == number)
        return process, int(asked.log.read_text().splitlines()[-1])

    first, left_running = start(1)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(LIMIT)
    assert exists(left_running)
    second, _ = start(2)
    try:
        eventually(lambda: not exists(left_running))
    finally:
        launcher.end([first, second])


ENGINE = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        answers = {"/health": {"version": 0}, "/v1/models": {"data": [{"id": "m"}]}}
        self.wfile.write(json.dumps(answers[self.path]).encode())
    def log_message(self, *args): ...
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_process_stopped_by_sigstop_is_detected_and_replaced(tmp_path, monkeypatch):
    """SIGSTOP: it lives, the kernel takes connections for it, and it answers nothing."""
    monkeypatch.setattr("prime_rl_app.children.end", partial(end, grace=0.2))
    monkeypatch.setattr("prime_rl.inference.timing.HEALTH_SECONDS", 0.2)
    clock = Clock()
    for module in ("fleet", "pool", "engine"):
        monkeypatch.setattr(f"prime_rl.inference.{module}.time", clock)
    (port,), printed = free_ports(1), []
    command = ProcessCommand([sys.executable, "-c", ENGINE, str(port)], tmp_path / "log")
    restarts = EngineRestarts(LocalLauncher(PluginConfig()), tmp_path, 2, printed.append)
    first = begin(restarts, Task("inference", "inference"), command)
    processes, url = [first], f"http://127.0.0.1:{port}"
    fleet = Fleet(
        [url], "k", Weights(tmp_path, 0), FleetOptions(model="m", hang_timeout=10, poll=0.05)
    )
    status = tmp_path / "status" / "engines.json"
    status.parent.mkdir()
    fleet.names = {fleet.engines[0].url: "inference"}
    fleet.on_change = partial(report_engines, fleet, Status(status))
    await fleet.wait_ready(LIMIT)
    keeping = asyncio.create_task(fleet.run())
    try:
        os.kill(first.process.pid, signal.SIGSTOP)
        (engine,) = fleet.engines

        def hangs():
            clock.now += 1
            return engine.state is EngineState.HUNG

        await until(hangs, pause=0.05)

        def serves_again():
            restarts.restart(processes)
            return printed and fleet.serving

        await until(serves_again, pause=0.05)
        assert printed == ["inference answers nothing: starting it again (1 of 2 times)"]
        assert first.exit_code == -signal.SIGKILL and processes[0].exit_code is None
        assert read_status(status).detail == {"inference": "version 0"}
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, fleet.close(), return_exceptions=True)
        end(processes, grace=0.2)
