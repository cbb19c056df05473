"""A log that is too long keeps its beginning and its end, while processes go on writing."""

import sys

import pytest
from disks import SharedDisk
from waiting import eventually

from prime_rl.rundir.directory import log_dir, new_attempt
from prime_rl_app.children import end, start
from prime_rl_app.logs import MIB, LogLimit

FLOOD = """
import os, subprocess, sys, time
flooded, go = sys.argv[1:]
print("the first line", flush=True)
for number in range(300_000):
    print(f"line {number} " + "x" * 80)
sys.stdout.flush()
os.write(2, b"y" * (3 << 20))  # no line at all
subprocess.run([sys.executable, "-c", "print('of a grandchild\\\\n' * 200_000)"])
open(flooded, "w").close()
while not os.path.exists(go):
    time.sleep(0.01)
print("the last line", flush=True)
"""


@pytest.fixture
def flood(tmp_path):
    """A child that writes 35 MiB to its log."""
    new_attempt(tmp_path)
    flags = [str(tmp_path / "flooded"), str(tmp_path / "go")]
    command = [sys.executable, "-c", FLOOD, *flags]
    child = start("orchestrator", command, {}, log_dir(tmp_path) / "a.log")
    yield child
    end([child], grace=0)


def test_a_flood_of_prints_ends_in_a_log_with_its_first_and_last_lines(flood, tmp_path):
    limit = LogLimit(tmp_path, max_mib=1)
    eventually((tmp_path / "flooded").exists, flood.process)
    # What is written during a cut may be lost, so the last line comes after the last cut.
    limit.close()
    (tmp_path / "go").touch()
    assert flood.process.wait(120) == 0
    text = flood.log.read_text()
    assert len(text) <= MIB
    lines = text.splitlines()
    assert lines[0] == "the first line" and lines[1].startswith("line 0 ")
    assert [line for line in lines if line][-1] == "the last line"
    (note,) = (line for line in lines if line.startswith("[prime-rl]"))
    left = float(note.split()[1])
    assert note == (
        f"[prime-rl] {left:.1f} MiB are left out here: a log has 1 MiB at most (log.max_mib)"
    )


def test_bytes_that_are_left_out_are_counted_over_all_cuts(tmp_path):
    new_attempt(tmp_path)
    log, limit = log_dir(tmp_path) / "trainer.log", LogLimit(tmp_path, max_mib=1)
    limit.close()  # no thread: the test looks
    for _ in range(5):
        with log.open("ab") as file:
            file.write(b"z" * 1023 + b"\n" + (b"w" * 1023 + b"\n") * 1023)
        limit.look()
    with log.open("ab") as file:
        file.write(b"short\n")
    limit.look()  # not too long: unchanged
    *_, last = (lines := log.read_text().splitlines())
    assert last == "short" and lines[0][0] == "z"
    (note,) = (line for line in lines if line.startswith("[prime-rl]"))
    assert len(log.read_bytes()) < MIB
    # 5 MiB were written; a quarter stays at each end, and what came after the last cut.
    kept = (len(log.read_bytes()) - len(note) - 1 - len("short\n")) / MIB
    assert float(note.split()[1]) == pytest.approx(5 - kept, abs=0.06)


def test_a_log_is_cut_when_the_disk_answers_again(tmp_path, monkeypatch):
    new_attempt(tmp_path)
    log = log_dir(tmp_path) / "trainer.log"
    log.write_bytes(b"x" * 2 * MIB)
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        limit = LogLimit(tmp_path, max_mib=1)
        eventually(lambda: disk.refused > 1)  # more than one look, so the thread goes on
    limit.close()
    assert log.stat().st_size <= MIB


def test_the_thread_that_cuts_the_logs_may_be_the_one_that_ends_them(tmp_path, monkeypatch):
    """Where the garbage collector runs in it."""
    begun, ended = [], []

    def look(limit):
        if not begun:
            begun.append(limit)
            limit.close()
            ended.append(limit)

    monkeypatch.setattr(LogLimit, "look", look)
    limit = LogLimit(tmp_path, max_mib=1)
    eventually(lambda: ended)
    limit.close()
