"""A run goes on whatever happens to what shows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl import PluginConfig, RunView
from prime_rl.errors import ConfigError
from prime_rl.rundir.directory import log_dir, new_attempt
from prime_rl_app.output import SafeView, counted, say

FAILURES = [
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    SystemExit(1),  # what rich does where nothing reads stdout
    UnicodeEncodeError("ascii", "→", 0, 1, "ordinal not in range"),
    KeyError("step"),
]


class Failing(RunView):
    """A view that fails where it is asked to."""

    def __init__(self, run_dir, where, error):
        super().__init__(PluginConfig(), run_dir, 10)
        self.where, self.error, self.calls = where, error, []

    def _call(self, name):
        self.calls.append(name)
        if name == self.where:
            raise self.error

    def __enter__(self):
        self._call("enter")
        return self

    def __exit__(self, *exc):
        self._call("exit")

    def refresh(self):
        self._call("refresh")

    def print(self, line):
        self._call("print")

    def ended(self):
        self._call("ended")

    def stopped(self, step, saved, command):
        self._call("stopped")


@pytest.fixture
def run_dir(tmp_path):
    new_attempt(tmp_path)
    return tmp_path


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["enter", "exit", "refresh", "print", "ended", "stopped"])
def test_a_view_that_fails_anywhere_does_not_reach_the_run(run_dir, where, error, monkeypatch):
    monkeypatch.setattr("prime_rl_app.output.mute", lambda stream: None)
    view = Failing(run_dir, where, error)
    with SafeView(view) as safe:
        safe.refresh()
        safe.refresh()
        safe.print("a restart")
    safe.ended()
    safe.stopped(3, True, "prime-rl run a.toml")
    log = (log_dir(run_dir) / "view.log").read_text()
    assert f"{type(error).__name__}: " in log
    assert ("a restart" in log) == (where in ("enter", "refresh", "print"))
    assert view.calls[-2:] == ["ended", "stopped"]  # its summary is written
    assert view.calls.count("exit") == (where != "enter")


@pytest.mark.parametrize("where", ["enter", "exit", "refresh", "print", "ended"])
def test_a_second_ctrl_c_in_the_view_ends_the_run(run_dir, where):
    with (
        pytest.raises(KeyboardInterrupt),
        SafeView(Failing(run_dir, where, KeyboardInterrupt())) as safe,
    ):
        safe.refresh()
        safe.print("a restart")
        safe.ended()


def test_a_count_of_one_has_no_plural():
    counts = [counted(number, "key") for number in (0, 1, 2, 1200)]
    assert counts == ["0 keys", "1 key", "2 keys", "1,200 keys"]


def test_a_view_that_cannot_do_what_the_user_asked_for_refuses_at_the_start(run_dir):
    view = Failing(run_dir, "enter", ConfigError("view.watch: no free port"))
    with pytest.raises(ConfigError, match="no free port"), SafeView(view):
        raise AssertionError("it has started")


def test_a_failed_view_is_replaced_by_lines(run_dir, capsys):
    view = SafeView(Failing(run_dir, "refresh", KeyError("step")))
    with view:
        view.refresh()
        (run_dir / "status" / "trainer.json").write_text('{"state": "training"}')
        view.refresh()
        view.print("a restart")
    assert capsys.readouterr().out.splitlines() == ["trainer: training", "a restart"]


SHOW = """
import sys
from pathlib import Path
from prime_rl import PluginConfig, RunView
from prime_rl_app.output import SafeView, say
from prime_rl_tools.view.live import TerminalView

say("before", sys.stdout)
run_dir = Path(sys.argv[2])
cls = {"lines": RunView, "terminal": TerminalView}[sys.argv[1]]
with SafeView(cls(PluginConfig(), run_dir, 3)) as view:
    for number in range(3):
        view.print("x" * 100_000)
    view.refresh()
view.ended()
say("after", sys.stderr)
(run_dir / "went_on").touch()
"""


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("kind", ["lines", "terminal"])
@pytest.mark.parametrize("broken", ["closed pipe", "/dev/full"])
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_program_whose_output_breaks_goes_on_and_ends_with_code_0(run_dir, kind, broken, both):
    descriptor = closed_pipe() if broken == "closed pipe" else os.open(broken, os.O_WRONLY)
    command = [sys.executable, "-c", SHOW, kind, str(run_dir)]
    done = subprocess.run(
        command, stdout=descriptor, stderr=descriptor if both else subprocess.PIPE, text=True
    )
    os.close(descriptor)
    assert (done.returncode, (run_dir / "went_on").exists()) == (0, True), done.stderr
    assert (run_dir / "summary.json").exists() == (kind == "terminal")
    if not both:
        assert done.stderr.splitlines()[-1] == "after"


def test_a_program_without_stdout_and_stderr_goes_on(run_dir):
    command = [sys.executable, "-c", SHOW, "terminal", str(run_dir)]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    assert subprocess.run(closed).returncode == 0
    assert (run_dir / "went_on").exists()


def test_a_line_that_cannot_be_written_is_no_error(tmp_path):
    with Path("/dev/full").open("w") as full:
        say("a line", full)
        full.flush()  # writes to nowhere now
    say("a line", None)
