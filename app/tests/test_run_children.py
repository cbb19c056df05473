"""Real child processes: logs, termination, signals and ports."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import LIMIT, Clock, eventually, exists

from prime_rl.rundir.machine import free_ports
from prime_rl_app import children
from prime_rl_app.children import (
    Child,
    end,
    first_signal_asks,
    sigterm_is_ctrl_c,
    start,
    uninterrupted,
)

FOREVER = "import time; time.sleep(600)"


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
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    names = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLIBC_TUNABLES", "MINE", "PRIME_RL_PARENT_PID"
    child = spawn(f"import os; print(*(os.environ[n] for n in {names}))", MINE="here")
    child.process.wait(LIMIT)
    ours = "PASSIVE glibc.malloc.hugetlb=1"
    assert child.log.read_text() == f"3 {ours} here {os.getpid()}\n"  # the user's 3 stays


@pytest.mark.parametrize(
    ("inherits", "expected"),
    [((), "None None x"), (("JUDGE_KEY",), "None x x"), (None, "x x x")],
    ids=["settings", "named", "all"],
)
def test_a_child_inherits_no_key_that_is_not_named(tmp_path, monkeypatch, inherits, expected):
    names = ["AWS_SECRET_ACCESS_KEY", "JUDGE_KEY", "NCCL_DEBUG"]
    for name in names:
        monkeypatch.setenv(name, "x")
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    log = tmp_path / "log"
    child = start("child", [sys.executable, "-c", code], {}, log=log, inherits=inherits)
    assert child.process.wait(LIMIT) == 0
    assert log.read_text() == f"{expected}\n"


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


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(8 << 30)  # no memory holds it
        file.seek(0, os.SEEK_END)
        file.write(b"\nfirst\nsecond \xff\n")
    assert Child("trainer", None, log).last_lines(2) == ["first", "second \ufffd"]


# -- dying with the parent --------------------------------------------------------------------


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    """SIGKILL gives the parent no chance to clean up: the kernel has to."""
    log = tmp_path / "child.log"
    child = (
        "import os, time; from prime_rl.rundir.processes import exit_with_parent\n"
        "exit_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import sys, time; from pathlib import Path; from prime_rl_app.children import start\n"
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
    assert (done.returncode, done.stdout) == (143, "")


# -- watching -------------------------------------------------------------------------------


# -- signals --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_act_like_ctrl_c_inside_the_block_only(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
            os.kill(os.getpid(), number)
            time.sleep(LIMIT)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_terminal_that_closes_asks_once_however_often_it_signals():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with first_signal_asks() as asked:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert asked()
        with pytest.raises(KeyboardInterrupt), first_signal_asks():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_to_a_process_and_at_once_to_its_group_is_one_request(clock):
    """As GNU `timeout` sends it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with first_signal_asks() as asked:
            signal.raise_signal(signal.SIGTERM)
            clock.sleep(0.6)
            signal.raise_signal(signal.SIGTERM)
            assert asked()
            clock.sleep(0.6)  # counted from the request, not from its repetition
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(children, "time", Clock())
    return children.time


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(number, clock):
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), first_signal_asks() as asked:
            assert not asked()
            signal.raise_signal(number)
            assert asked()
            clock.sleep(children.SAME_SECONDS)
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
        free_ports(1, "203.0.113.7")  # not an address of this machine
