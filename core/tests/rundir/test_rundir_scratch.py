"""Temporary folders do not stay, however their process ends."""

import subprocess
import sys
from pathlib import Path

from prime_rl.rundir.scratch import Scratch

HOLD = """
import sys, time
from pathlib import Path
from prime_rl.rundir.scratch import Scratch
scratch = Scratch("mine-", sys.argv[1])
(scratch.path / "large").write_text("x")
print(scratch.path, flush=True)
time.sleep(600)
"""


def holder(parent):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_one(tmp_path):
    killed, left = holder(tmp_path)
    living, used = holder(tmp_path)
    (tmp_path / "mine-file").touch()
    (tmp_path / "others-folder").mkdir()
    try:
        killed.kill()
        killed.communicate()
        assert (left / "large").exists()
        with Scratch("mine-", tmp_path) as scratch:
            assert not left.exists()
            assert (used / "large").exists()
            assert scratch.path.is_dir()
        assert {each.name for each in tmp_path.iterdir()} == {
            used.name,
            "mine-file",
            "others-folder",
        }
    finally:
        living.kill()
        living.communicate()


def test_a_folder_that_was_renamed_stays_and_its_new_name_is_not_removed(tmp_path):
    with Scratch(".model-", tmp_path) as scratch:
        (scratch.path / "config.json").touch()
        scratch.path.rename(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    Scratch(".model-", tmp_path).remove()
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_folder_is_removed_once(tmp_path):
    first = Scratch("mine-", tmp_path)
    first.remove()
    again = Scratch("mine-", tmp_path)
    first.remove()  # closes no descriptor of another folder
    assert again.path.is_dir()
    again.remove()
    assert not again.path.exists()


def test_a_prefix_is_no_pattern(tmp_path):
    (tmp_path / "abc").mkdir()
    Scratch("[ab]", tmp_path).remove()
    assert (tmp_path / "abc").is_dir()
