"""``python -m prime_rl_env_workers.forkserver DISABLED...``: forks workers that have imported
verifiers, and the plugins that the run has: a plugin may give a taskset its id.

The import takes 4 s of CPU and 190 MB. A fork takes 50 ms and shares the memory, so that a worker
that dies is replaced at once. Requests are lines of JSON on stdin, answers on stdout::

    {"id": "reverse 0 1", "address": "ipc://...", "settings": {...}, "env": {...}}
    {"kill": "reverse 0 1"}
                                             {"id": "reverse 0 1", "pid": 71}
                                             {"id": "reverse 0 1", "status": -11}
                                             {"id": "reverse 0 1", "status": 1, "failed": "..."}

Workers do not have the descriptor of the answers: what an environment writes into a descriptor that
is not its own cannot reach it. A worker that fails says why on a pipe of its own.

It has one thread, and no library here starts another: a fork would lack it. The end of stdin, which
also the kernel brings if the orchestrator is killed, ends all workers and what they have started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.processes import lasting_imports, raise_file_limit

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0
"""How long workers may take to close, before they are killed."""
FIRST_TO_GO = 800
"""``oom_score_adj`` of workers: the kernel kills them before the rest of the run."""


FAILED = b"\0failed: "
"""Before the reason of a worker that could not start, on its pipe."""
MOST_REASON = 2000
"""Characters."""


@dataclass(frozen=True)
class Child:
    """A worker that has not ended."""

    pid: int
    reason: int
    """Its pipe for a reason, which is read when it has ended."""


class ForkServer:
    """The state of this process: its workers by request."""

    def __init__(self, answers: int) -> None:
        """``answers``: file descriptor of the orchestrator's end."""
        self._answers = answers
        self._children: dict[str, Child] = {}
        self._input = b""
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Until stdin ends, or SIGTERM arrives."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        heard: list[int] = []
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        while not heard:
            ready = select.select([0, self._wake], [], [])[0]
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if 0 in ready and not self._read():
                break

        self._end_all()

    def _read(self) -> bool:
        """Handle requests. False: there are no more."""
        data = os.read(0, 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                self._send(request["kill"], signal.SIGKILL)
            else:
                self._fork(request)

        return bool(data)

    def _fork(self, request: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        reason, reason_of_worker = os.pipe()
        for end in (reason, reason_of_worker):
            os.set_blocking(end, False)
        pid = os.fork()
        if pid == 0:
            others = [child.reason for child in self._children.values()]
            for end in (self._wake, self._waker, self._answers, reason, *others):
                os.close(end)
            _become_worker(request, parent, reason_of_worker)

        os.close(reason_of_worker)
        self._children[request["id"]] = Child(pid, reason)
        self._answer(id=request["id"], pid=pid)

    def _answer(self, **fields: Any) -> None:
        """One line. It begins on a line of its own, whatever a plugin in this process has
        written."""
        data = b"\n" + json.dumps(fields).encode() + b"\n"
        with suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._answers, data) :]

    def _send(self, worker: str, number: signal.Signals) -> None:
        if worker in self._children:  # not reaped: the number is still its own
            os.kill(self._children[worker].pid, number)

    def _reap(self) -> None:
        """Report the workers that have ended, and end what they have left."""
        for pid, status in iter(_ended_child, (0, 0)):
            for worker, child in [*self._children.items()]:
                if child.pid == pid:
                    del self._children[worker]
                    _kill_left(marker(worker))
                    code = os.waitstatus_to_exitcode(status)
                    self._answer(id=worker, status=code, failed=_reason(child))

    def _end_all(self) -> None:
        for worker in self._children:
            self._send(worker, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._children and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()

        for worker in self._children:
            self._send(worker, signal.SIGKILL)
        for worker in self._children:
            _kill_left(marker(worker))


def _reason(child: Child) -> str | None:
    """Why a worker that has ended could not start; None: it did not say."""
    try:
        data = os.read(child.reason, 1 << 16)
    except BlockingIOError:  # a process that it has left holds the other end
        data = b""
    finally:
        os.close(child.reason)
    _, mark, text = data.rpartition(FAILED)
    return text.decode(errors="replace") if mark else None


def _ended_child() -> tuple[int, int]:
    """Process id and status of a child that has ended; ``(0, 0)`` without one."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def marker(worker: str) -> str:
    """``PRIME_RL_PROCESS`` of a worker and of what it starts."""
    attempt, _, rest = os.environ.get(PROCESS, "0::").partition(":")
    return f"{attempt}:env worker {worker.replace(':', ' ')}:{rest.partition(':')[2]}"


def _kill_left(mark: str) -> None:
    """Kill what a dead worker has started: it is our child now (``PR_SET_CHILD_SUBREAPER``)."""
    import psutil

    while True:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and child.environ().get(PROCESS) == mark:
                    child.kill()
                    found.append(child)
        if not found:
            return
        psutil.wait_procs(found, timeout=GRACE_SECONDS)


def _become_worker(request: Mapping[str, Any], parent: int, reason: int) -> NoReturn:
    """Serve one environment in this fork, to its end. ``reason``: the pipe that says why it cannot
    start."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["env"])
        os.environ[PROCESS] = marker(request["id"])
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))
        faulthandler.enable()
        from prime_rl_env_workers.server import serve

        serve(request["settings"], request["address"])
        code = 0
    except KeyboardInterrupt:
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:MOST_REASON]
        with suppress(OSError):
            os.write(reason, FAILED + text.encode(errors="replace"))
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import what workers need, then fork them."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    raise_file_limit()
    answers = os.dup(1)
    os.dup2(2, 1)  # what an environment prints goes to the orchestrator's log
    with lasting_imports():
        import renderers  # noqa: F401
        import transformers  # noqa: F401
        import verifiers.v1.serve  # noqa: F401

        import prime_rl_env_workers.server  # noqa: F401

    load_plugins(disabled=sys.argv[1:])
    ForkServer(answers).serve()


if __name__ == "__main__":
    main()
