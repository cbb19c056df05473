"""Where the processes of a run find modules."""

import subprocess

from prime_rl_app.commands import PYTHON


def test_the_processes_of_a_run_have_no_working_directory_on_their_path(tmp_path):
    (tmp_path / "asyncio.py").write_text("raise SystemExit(9)")
    command = [*PYTHON, "prime_rl.rundir.control"]  # it imports asyncio
    without = [part for part in command if part != "-P"]
    ended = [subprocess.run(each, cwd=tmp_path).returncode for each in (command, without)]
    assert ended == [0, 9]
