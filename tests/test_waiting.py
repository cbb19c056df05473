"""What the tests stand on when the machine is slow: their waits, their servers, the busy check."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from aiohttp import web
from loopback import listening
from waiting import LIMIT, Clock, eventually, exists, skipping

BUSY = Path(__file__).with_name("busy.py")


def test_a_wait_for_what_a_process_brings_about_fails_when_the_process_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(AssertionError, match="the process ended with 3 before"):
        eventually(lambda: False, process)


def test_a_loop_that_skips_waits_for_no_timer_and_keeps_their_order() -> None:
    clock, seen = Clock(), []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, clock.now - 1000))

    async def main() -> None:
        await asyncio.gather(*map(sleeper, (3600, 60, 0)))

    skipping(clock, main)
    assert seen == [(0, 0), (60, 60), (3600, 3600)]


@pytest.mark.parametrize("turns", range(6))
def test_a_server_closes_a_connection_however_late_it_was_accepted(turns: int) -> None:
    """``turns`` of the event loop before the server ends: at 2, asyncio is setting it up."""

    async def connect() -> None:
        async with listening(web.Application()) as url:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
                for _ in range(turns):
                    await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(connect())
        gc.collect()
    assert [str(each.message) for each in caught] == []


# -- the busy check ------------------------------------------------------------------------------


def busy(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The check beside two loops, of one test that never ends."""
    (folder / "test_long.py").write_text(
        "import pathlib, time\n"
        "def test_long():\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(3600)\n"
    )
    options = ["--runs", "1", "--loops", "2", "-p", "no:cacheprovider", "--rootdir", "."]
    return subprocess.Popen(
        [sys.executable, BUSY, *options, *arguments, "test_long.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
def test_tests_that_take_too_long_are_ended_and_said(tmp_path: Path) -> None:
    output = busy(tmp_path, "--minutes", "0.02").communicate(timeout=LIMIT)[0]
    assert "ended: the tests have taken 0.02 minutes (--minutes)" in output
    assert output.endswith("pytest's exit codes: [124]\n")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_busy_loop_outlives_the_check(tmp_path: Path, end: signal.Signals) -> None:
    process = busy(tmp_path)
    eventually((tmp_path / "begun").exists, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    *loops, tests = map(int, children.split())
    assert len(loops) == 2 and all(map(exists, loops))
    process.send_signal(end)
    process.wait(LIMIT)
    eventually(lambda: not any(map(exists, loops)))
    if end == signal.SIGKILL:  # only the loops look after themselves
        os.kill(tests, signal.SIGKILL)
    eventually(lambda: not exists(tests))
    process.communicate()
