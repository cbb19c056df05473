"""Real child processes: logs, termination, and the error when a child dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import LIMIT, eventually

from prime_rl import RunError
from prime_rl.run import supervisor
from prime_rl.run.children import (
    end,
    first_signal_asks,
    free_ports,
    sigterm_is_ctrl_c,
    start,
    uninterrupted,
)
from prime_rl.run.supervisor import _watch
from prime_rl.rundir.checkpoints import STABLE, finished
from prime_rl.rundir.control import exists
from prime_rl.rundir.status import DONE, Status
from prime_rl.rundir.stop import STOP, Stop, report_stopped

FOREVER = "import time; time.sleep(600)"


@pytest.fixture
def spawn(tmp_path):
    children = []

    def python(code, name="child", **env):
        argv = [sys.executable, "-c", code]
        children.append(start(name, argv, env, tmp_path / f"{name}.log"))
        return children[-1]

    yield python
    end(children, grace=0)


def whole(path):
    """The text of a file once it ends in a newline."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text()


# -- one child ------------------------------------------------------------------------------


def test_both_streams_go_to_the_childs_own_log(spawn):
    one = spawn("import sys; print('out', flush=True); print('err', file=sys.stderr)", "one")
    two = spawn("print('two')", "two")
    assert one.process.wait(LIMIT) == two.process.wait(LIMIT) == 0
    assert one.log.read_text() == "out\nerr\n" and two.log.read_text() == "two\n"


def test_the_last_lines_of_a_log(spawn):
    child = spawn("for i in range(40): print(i)")
    child.process.wait(LIMIT)
    assert child.last_lines(2) == ["38", "39"] and len(child.last_lines()) == 15
    child.log.unlink()
    assert child.last_lines() == []


def test_invalid_utf8_does_not_hide_the_log(spawn):
    child = spawn(r"import sys; sys.stdout.buffer.write(b'\xff bad\n')")
    child.process.wait(LIMIT)
    assert child.last_lines()[-1].endswith(" bad")


def test_a_childs_environment(spawn, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    names = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MINE", "PRIME_RL_PARENT_PID"
    child = spawn(f"import os; print(*(os.environ[n] for n in {names}))", MINE="here")
    child.process.wait(LIMIT)
    assert child.log.read_text() == f"3 PASSIVE here {os.getpid()}\n"  # what the user set stays


def test_a_child_has_its_own_session(spawn):
    child = spawn(FOREVER)
    assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)


# -- ending them ----------------------------------------------------------------------------


def test_end_sends_sigterm_first(spawn):
    child = spawn(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(3)))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    whole(child.log)
    end([child], grace=LIMIT)
    assert child.exit_code == 3 and child.log.read_text() == "up\nbye\n"


def test_end_kills_a_child_that_ignores_sigterm(spawn):
    child = spawn(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    whole(child.log)
    end([child], grace=0.1)
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("parent", ["time.sleep(600)", "sys.exit(0)"])
def test_end_kills_grandchildren_even_if_the_child_has_ended(spawn, parent):
    child = spawn(
        "import subprocess, sys, time\n"
        f"other = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\n"
        f"print(other.pid, flush=True); {parent}"
    )
    grandchild = int(whole(child.log))
    if "exit" in parent:
        child.process.wait(LIMIT)
    assert exists(grandchild)
    end([child], grace=5)
    eventually(lambda: not exists(grandchild))


def test_end_may_be_called_twice_or_without_children(spawn):
    child = spawn("pass")
    end([child])
    end([child])
    end([])


# -- dying with the parent --------------------------------------------------------------------


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    """SIGKILL gives the parent no chance to clean up: the kernel has to."""
    log = tmp_path / "child.log"
    child = (
        "import os, time; from prime_rl.rundir.processes import exit_with_parent\n"
        "exit_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import sys, time; from pathlib import Path; from prime_rl.run.children import start\n"
        f"start('c', [sys.executable, '-c', {child!r}], {{}}, Path({str(log)!r})); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        pid = int(whole(log))
        assert exists(pid)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not exists(pid))


def test_a_child_whose_parent_has_already_died_exits_at_once(tmp_path):
    code = "from prime_rl.rundir.processes import exit_with_parent; exit_with_parent(); print('on')"
    env = {**os.environ, "PRIME_RL_PARENT_PID": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# -- watching -------------------------------------------------------------------------------


@pytest.fixture
def view(tmp_path):
    """Stands in for the live view; every process named here has reported that it is done."""
    (tmp_path / "status").mkdir()
    for name in ("model", "trainer", "orchestrator"):
        Status(tmp_path / "status" / f"{name}.json").report(DONE)
    return SimpleNamespace(refresh=lambda: None, run_dir=tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 0.02)


def test_a_run_is_over_when_orchestrator_and_trainer_are(spawn, view):
    children = [spawn("pass", "model"), spawn(FOREVER, "inference")]
    children += [spawn("pass", "trainer"), spawn("import time; time.sleep(0.3)", "orchestrator")]
    _watch(children, view)
    assert children[1].exit_code is None  # the engine is ended by the supervisor


@pytest.mark.parametrize("name", ["model", "inference", "trainer", "orchestrator"])
def test_a_child_that_dies_ends_the_run_with_name_code_and_last_lines(spawn, view, name):
    dying = "import sys; print('loading'); sys.exit('the reason')"
    names = ("model", "inference", "trainer", "orchestrator")
    children = [spawn(dying if each == name else FOREVER, each) for each in names]
    with pytest.raises(RunError) as caught:
        _watch(children, view)
    log = children[names.index(name)].log
    message = str(caught.value)
    assert message.splitlines()[0] == f"{name} exited with code 1. The end of its log ({log}):"
    assert sorted(message.splitlines()[1:]) == ["    loading", "    the reason"]


def test_the_error_names_the_signal_that_killed_a_child(spawn, view):
    names = ("inference", "trainer", "orchestrator")
    children = [spawn(FOREVER, name) for name in names]
    os.kill(children[1].process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"^trainer was ended by SIGKILL\. The end of its log"):
        _watch(children, view)


def test_the_error_names_the_checkpoint_to_resume_from(spawn, view):
    for step, whole in ((2, True), (10, True), (12, False)):
        folder = finished(view.run_dir, step).directory
        folder.mkdir(parents=True)
        if whole:
            (folder / STABLE).touch()
    names = ("inference", "trainer", "orchestrator")
    children = [spawn("raise SystemExit(1)" if n == "trainer" else FOREVER, n) for n in names]
    with pytest.raises(RunError, match=r"\n--resume continues from the checkpoint of step 10\.$"):
        _watch(children, view)


def test_an_engine_that_exits_with_code_0_ends_the_run(spawn, view):
    children = [
        spawn("pass", "inference"),
        spawn(FOREVER, "trainer"),
        spawn(FOREVER, "orchestrator"),
    ]
    with pytest.raises(RunError, match=r"^inference exited with code 0 before it was done\."):
        _watch(children, view)


@pytest.mark.parametrize("name", ["trainer", "orchestrator"])
def test_a_process_that_exits_without_reporting_done_ends_the_run(spawn, view, name):
    Status(view.run_dir / "status" / f"{name}.json").report("training")
    names = ("inference", "trainer", "orchestrator")
    children = [spawn("pass" if each == name else FOREVER, each) for each in names]
    with pytest.raises(RunError, match=f"^{name} exited with code 0 before it was done"):
        _watch(children, view)


def test_a_trainer_that_never_ends_is_named(spawn, view, monkeypatch):
    monkeypatch.setattr(supervisor, "TRAINER_GRACE", 0.2)
    children = [
        spawn(FOREVER, "inference"),
        spawn(FOREVER, "trainer"),
        spawn("pass", "orchestrator"),
    ]
    with pytest.raises(RunError, match="the trainer is still busy 0 s after the last step"):
        _watch(children, view)


def test_the_view_is_refreshed_while_the_run_goes_on(spawn, view):
    """The run ends at its third refresh, and not before."""
    refreshed, enough = [], view.run_dir / "enough"

    def refresh():
        refreshed.append(None)
        if len(refreshed) == 3:
            enough.touch()

    view.refresh = refresh
    until = f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.02)"
    _watch(
        [spawn(FOREVER, "inference"), spawn("pass", "trainer"), spawn(until, "orchestrator")], view
    )
    assert len(refreshed) >= 3


def test_engines_end_last_so_that_their_end_does_not_look_like_a_failure():
    names = ("model", "inference", "inference_1", "trainer_1", "orchestrator")
    ended = []
    launcher = SimpleNamespace(
        end=lambda processes: ended.append([each.name for each in processes]),
        close=lambda: ended.append("closed"),
    )
    supervisor._end(launcher, [SimpleNamespace(name=name) for name in names])
    assert ended == [
        *(["model", "trainer_1", "orchestrator"], ["inference", "inference_1"], "closed"),
    ]


# -- a stop -------------------------------------------------------------------------------


def stop_of(run_dir, said, first_step=1):
    return Stop(run_dir, first_step, lambda: True, said.append)


def test_a_stop_is_requested_once_and_needs_no_engine(spawn, view):
    said, report = [], Status(view.run_dir / "status" / "orchestrator.json")
    report_stopped(report, 7)
    waiting = f"while not os.path.exists({str(view.run_dir / STOP)!r}): time.sleep(0.01)"
    asked = f"import os, time\n{waiting}"
    children = [spawn("raise SystemExit(1)", "inference"), spawn(asked, "trainer")]
    stop = stop_of(view.run_dir, said)
    _watch([*children, spawn(asked, "orchestrator")], view, stop=stop)
    assert said == ["stopping: saving weights (again: now)"]
    assert (stop.result.step, stop.result.trained) == (7, True)


def test_a_trainer_that_was_sent_nothing_is_not_waited_for(spawn, view):
    report_stopped(Status(view.run_dir / "status" / "orchestrator.json"), 7)
    children = [spawn(FOREVER, "trainer"), spawn("pass", "orchestrator")]
    stop = stop_of(view.run_dir, [], first_step=8)
    _watch(children, view, stop=stop)
    assert children[0].exit_code is None and not stop.result.trained


def test_a_trainer_that_dies_while_it_saves_is_named(spawn, view):
    children = [spawn("raise SystemExit(1)", "trainer"), spawn(FOREVER, "orchestrator")]
    with pytest.raises(RunError, match=r"^trainer exited with code 1"):
        _watch(children, view, stop=stop_of(view.run_dir, []))


def test_a_run_that_finished_every_step_was_not_stopped(view):
    assert stop_of(view.run_dir, []).result is None


# -- signals --------------------------------------------------------------------------------


def test_sigterm_acts_like_ctrl_c_inside_the_block_only():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LIMIT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(number):
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), first_signal_asks() as asked:
            assert not asked()
            signal.raise_signal(number)
            assert asked()
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with first_signal_asks() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_do_not_interrupt_the_clean_up():
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGINT) is before


def test_processes_started_before_a_failing_start_are_ended(monkeypatch, tmp_path, spawn):
    """``_start`` is a generator: the supervisor must hold each child as soon as it runs."""

    def starting(*_):
        yield spawn(FOREVER, "model")
        raise RuntimeError("the engine plugin failed")

    ended = []
    launcher = SimpleNamespace(end=ended.extend, close=lambda: ended.append("closed"))
    monkeypatch.setattr(supervisor, "build_launcher", lambda *_: launcher)
    monkeypatch.setattr(supervisor, "_start", starting)
    config = SimpleNamespace(
        plugins=SimpleNamespace(disabled=()), inference=SimpleNamespace(max_restarts=0)
    )
    view = SimpleNamespace(console=SimpleNamespace(print=print))
    with pytest.raises(RuntimeError, match="the engine plugin failed"):
        supervisor.run(config, tmp_path, view)
    assert [getattr(each, "name", each) for each in ended] == ["model", "closed"]


# -- ports ----------------------------------------------------------------------------------


def test_free_ports_are_free_and_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] not in free_ports(50)


def test_ports_are_distinct_free_and_outside_the_ephemeral_range():
    found = free_ports(50)
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 50 and all(20000 <= port < handed_out for port in found)
    for port in found[:5]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
    with pytest.raises(OSError):
        free_ports(1, "203.0.113.7")  # nobody's here
