"""The supervisor: which deaths end a run, the error, a stop, and the clean-up."""

import os
import shutil
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from disks import SharedDisk
from resolved_parts import resolved_with
from waiting import Clock

from prime_rl import RunError
from prime_rl.config.run import RunConfig
from prime_rl.errors import ProcessFailed
from prime_rl.plugins.status import read_status
from prime_rl.rundir.checkpoints import CHECKSUMS, finished
from prime_rl.rundir.control import STOP, Stop
from prime_rl.rundir.directory import new_attempt
from prime_rl.rundir.status import DONE, Status
from prime_rl_app import children, supervisor
from prime_rl_app.supervisor import _watch

FOREVER = "import time; time.sleep(600)"


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


def test_a_child_that_dies_on_a_full_disk_ends_the_run_with_the_disk_as_the_reason(
    spawn, view, monkeypatch
):
    """Neither its log nor its status has room for it."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3 * 2**19))
    names = ("inference", "trainer", "orchestrator")
    children = [spawn("raise SystemExit(1)" if n == "trainer" else FOREVER, n) for n in names]
    with pytest.raises(RunError) as caught:
        _watch(children, view)
    assert str(caught.value).splitlines()[1:] == [
        "",
        f"The disk of {view.run_dir} is full: 1.5 MiB are free. Free space; `prime-rl run "
        "--resume` continues.",
    ]


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
            (folder / CHECKSUMS).touch()
    names = ("inference", "trainer", "orchestrator")
    children = [spawn("raise SystemExit(1)" if n == "trainer" else FOREVER, n) for n in names]
    with pytest.raises(RunError, match=r"\n--resume continues from the checkpoint of step 10\.$"):
        _watch(children, view)


def test_an_error_is_not_hidden_by_a_disk_that_refuses_to_show_checkpoints(
    spawn, view, monkeypatch
):
    names = ("inference", "trainer", "orchestrator")
    children = [spawn("raise SystemExit(1)" if n == "trainer" else FOREVER, n) for n in names]
    disk = SharedDisk(monkeypatch, view.run_dir)
    with disk.refusing(), pytest.raises(ProcessFailed, match=r"^trainer exited with code 1\."):
        _watch(children, view)


def test_an_engine_that_exits_with_code_0_ends_the_run(spawn, view):
    children = [
        spawn("pass", "inference"),
        spawn(FOREVER, "trainer"),
        spawn(FOREVER, "orchestrator"),
    ]
    with pytest.raises(RunError, match=r"^inference exited with code 0 before it was done\."):
        _watch(children, view)


@pytest.mark.parametrize("name", ["model", "trainer", "orchestrator"])
def test_a_process_that_ends_without_a_status_is_not_done(spawn, view, name):
    """A signal or ``sys.exit()`` of a plugin may end it before its first status."""
    (view.run_dir / "status" / f"{name}.json").unlink()
    names = ("model", "inference", "trainer", "orchestrator")
    children = [spawn("pass" if each == name else FOREVER, each) for each in names]
    with pytest.raises(ProcessFailed, match=f"^{name} exited with code 0 before it was done"):
        _watch(children, view)


def test_another_node_of_the_trainer_has_no_status_and_may_be_done(spawn, view):
    _watch([spawn("pass", each) for each in ("trainer", "trainer_1", "orchestrator")], view)


def test_a_status_comes_back_when_its_folder_is_removed(view):
    folder = view.run_dir / "status"
    shutil.rmtree(folder)
    Status(folder / "trainer.json").report(DONE)
    assert read_status(folder / "trainer.json").state == DONE


@pytest.mark.parametrize("code", [143, -signal.SIGTERM])
def test_a_process_that_a_signal_ended_is_named_with_the_signal(spawn, view, code):
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)" if code < 0 else "exit(143)"
    children = [spawn(ends, "trainer"), spawn(FOREVER, "orchestrator")]
    with pytest.raises(ProcessFailed, match=r"^trainer was ended by SIGTERM\. The end of its log"):
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


def test_a_trainer_that_gives_signs_of_life_after_the_last_step_is_waited_for(
    spawn, view, monkeypatch
):
    """It writes a large model: each beat starts the time again. Its tenth ends it here."""
    clock, beats = Clock(), []
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "TRAINER_GRACE", 10.0)
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 6.0)
    path = view.run_dir / "status" / "trainer.json"
    enough = view.run_dir / "enough"

    def refresh():
        beats.append(None)
        os.utime(path, ns=(0, len(beats) * 10**9))
        if len(beats) == 10:
            enough.touch()
        if len(beats) > 10:
            children[1].process.wait()

    view.refresh = refresh
    until = f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.02)"
    children = [spawn("pass", "orchestrator"), spawn(until, "trainer")]
    children[0].process.wait()
    _watch(children, view)
    assert len(beats) >= 10


def test_a_trainer_that_writes_after_the_last_step_is_waited_for(spawn, view, monkeypatch):
    """It does not beat in one long call: the bytes of a checkpoint are its sign of life."""
    clock, moved = Clock(), []
    enough = view.run_dir / "enough"
    until = f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.02)"
    children = [spawn("pass", "orchestrator"), spawn(until, "trainer")]

    def bytes_moved(process):
        if process is children[0]:
            return 0
        moved.append(len(moved) * (64 << 20))
        if len(moved) == 4:
            enough.touch()
            process.process.wait()
        return moved[-1]

    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "TRAINER_GRACE", 10.0)
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 6.0)
    monkeypatch.setattr(supervisor, "bytes_moved", bytes_moved)
    children[0].process.wait()
    _watch(children, view)
    assert len(moved) == 4 and clock.now > 1030


def test_bytes_that_were_moved_before_the_last_beat_are_no_later_sign(spawn, view, monkeypatch):
    """It has written its checkpoint and beaten, and hangs: one grace is all that it gets."""
    clock, refreshed = Clock(), []
    path = view.run_dir / "status" / "trainer.json"

    def refresh():
        refreshed.append(None)
        if len(refreshed) == 1:  # after the first look
            os.utime(path, ns=(0, 10**9))

    view.refresh = refresh
    children = [spawn("pass", "orchestrator"), spawn(FOREVER, "trainer")]
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "TRAINER_GRACE", 10.0)
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 6.0)
    monkeypatch.setattr(
        supervisor,
        "bytes_moved",
        lambda process: (64 << 20) * bool(refreshed) * (process is children[1]),
    )
    children[0].process.wait()
    with pytest.raises(RunError, match="the trainer is still busy"):
        _watch(children, view)
    assert clock.now == 1018.0  # the beat at 1006, and the first look more than 10 s after it


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
    report.report(DONE, last_step=7)
    waiting = f"while not os.path.exists({str(view.run_dir / STOP)!r}): time.sleep(0.01)"
    asked = f"import os, time\n{waiting}"
    children = [spawn("raise SystemExit(1)", "inference"), spawn(asked, "trainer")]
    stop = stop_of(view.run_dir, said)
    _watch([*children, spawn(asked, "orchestrator")], view, stop=stop)
    assert said == [
        "stopping: finishing the step and saving (a second signal ends the run at once)"
    ]
    assert (stop.result.step, stop.result.trained) == (7, True)


def test_a_trainer_that_was_sent_nothing_is_not_waited_for(spawn, view):
    Status(view.run_dir / "status" / "orchestrator.json").report(DONE, last_step=7)
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


def test_processes_started_before_a_failing_start_are_ended(monkeypatch, tmp_path, spawn):
    """The supervisor must hold each child as soon as it runs."""

    def starting(attempts, checkpoint):
        attempts.processes.append(spawn(FOREVER, "model"))
        raise RuntimeError("the engine plugin failed")

    ended = []
    new_attempt(tmp_path)
    launcher = SimpleNamespace(
        end=ended.extend, close=lambda: ended.append("closed"), is_remote=False
    )
    monkeypatch.setattr(supervisor.Attempts, "start", starting)
    resolved = resolved_with(RunConfig(model={"name": "m"}, max_steps=1), launcher=launcher)
    view = SimpleNamespace(print=print, run_dir=tmp_path)
    with pytest.raises(RuntimeError, match="the engine plugin failed"):
        supervisor.run(resolved, view)
    assert [getattr(each, "name", each) for each in ended] == ["model", "closed"]


def test_a_disk_that_lets_no_run_start_again_does_not_hide_the_failure(
    monkeypatch, tmp_path, spawn
):
    def starting(attempts, checkpoint):
        attempts.processes.append(spawn("raise SystemExit(3)", "trainer"))
        attempts.processes.append(spawn(FOREVER, "orchestrator"))

    new_attempt(tmp_path)
    disk = SharedDisk(monkeypatch, tmp_path / "logs")
    launcher = SimpleNamespace(end=children.end, close=lambda: None, is_remote=False)
    monkeypatch.setattr(supervisor.Attempts, "start", starting)
    monkeypatch.setattr(
        supervisor.Recovery, "allow", lambda *of: refusing.enter_context(disk.refusing())
    )
    resolved = resolved_with(RunConfig(model={"name": "m"}, max_steps=1), launcher=launcher)
    view = SimpleNamespace(print=print, run_dir=tmp_path, refresh=lambda: None)
    with ExitStack() as refusing, pytest.raises(RunError) as caught:
        supervisor.run(resolved, view)
    said = str(caught.value)
    assert said.startswith("trainer exited with code 3.")
    assert "The run cannot start again: [Errno 116] Stale file handle: " in said


def test_a_killed_guard_is_replaced(tmp_path, view):
    new_attempt(view.run_dir)
    said = []
    view.print = said.append
    guard = supervisor.Guard(view)
    first = guard.child
    try:
        guard.keep()
        assert guard.child is first and said == []
        first.kill()
        first.process.wait()
        guard.keep()
        assert guard.child is not first and guard.child.exit_code is None
        assert said == ["the guard was ended by SIGKILL: starting another one"]
    finally:
        supervisor.children.end([first, guard.child], grace=0.0)
