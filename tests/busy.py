"""The tests several times beside busy loops: `make test-busy`. Its own arguments, then pytest's.

    python tests/busy.py [--runs 5] [--loops 8] [--minutes 60] [pytest's arguments]

The loops are processes of this script, and end with it: at its end by pid, and by themselves if it
is killed or the minutes of a run are over.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

LOOP = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    pass
"""
GRACE_SECONDS = 60.0
"""For pytest to end its workers and to say what has failed so far."""


@contextmanager
def busy(loops: int, seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """That many processes that compute, at the priority of the tests."""
    command = [sys.executable, "-c", LOOP, str(os.getpid()), str(seconds)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        # In groups of their own: Ctrl-C reaches them through us. Not in sessions: Linux shares the
        # processor among sessions first (autogroup), so each loop would count as much as all tests.
        started += (subprocess.Popen(command, process_group=0) for _ in range(loops))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def run_tests(arguments: Sequence[str], seconds: float) -> int:
    """Pytest's exit code; 124 if it had to be ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        process_group=0,
        # A shell that starts this in the background has it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"ended: the tests have taken {seconds / 60:g} minutes (--minutes)", flush=True)
        return 124
    finally:
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
        finally:  # at the second Ctrl-C too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60.0, help="of one run")
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    codes = []
    for number in range(1, options.runs + 1):
        print(f"run {number} of {options.runs} beside {options.loops} busy loops", flush=True)
        with busy(options.loops, 60 * options.minutes + 2 * GRACE_SECONDS) as loops:
            codes.append(run_tests(arguments, 60 * options.minutes))
            if ended := sum(loop.poll() is not None for loop in loops):
                print(f"{ended} busy loops were ended from outside: this run does not count")
                codes[-1] = codes[-1] or 1
    print(f"pytest's exit codes: {codes}")
    return int(any(codes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
