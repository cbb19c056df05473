"""Python processes whose imports are done when they start.

A run has four processes, and three of them import torch, transformers or verifiers: four to five
CPU seconds each. ``warm.Popen`` is used like ``subprocess.Popen`` and asks the nursery, one process
for all of a session's tests, which has imported everything once and forks::

    nursery -> prime-rl run -> engine, trainer, orchestrator

The nursery is a fork server (``prime_rl_app.forkserver``), as runs have one for engine and trainer
and one for workers. It forks whole command lines, those of the other two among them. Where core is
alone, ``Popen`` starts an ordinary process.

Process id, signals, session, files, environment, working directory, ``sys.path``, command line and
exit code are those of an ordinary child. Not so: interpreter options except ``-W``, the hash seed
(forks share one), what imports do, and plugins that are installed for the test. Tests of these use
``subprocess``, and so do some whole runs.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

try:
    from prime_rl_app import forkserver
except ImportError:  # core is alone
    forkserver = None  # type: ignore[assignment]

IMPORTS = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers", "transformers.models.qwen3.modeling_qwen3", "verifiers.v1", "matplotlib"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "rich.live", "uvicorn"),
    *("prime_rl_app.cli.app", "prime_rl_app.supervisor", "prime_rl_app.models"),
    *("prime_rl.orchestrator.build", "prime_rl.orchestrator.loop", "prime_rl_tools.view.live"),
    *("prime_rl.trainer.loop", "prime_rl.trainer.checkpoint", "prime_rl.trainer.parallel"),
    *("prime_rl.trainer.model", "prime_rl_embedded.loop", "prime_rl_embedded.model"),
    *("prime_rl_environments.tiny.make", "prime_rl_environments.tiny.chat", "zmq", "pytest"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""What libraries read while they are imported."""
ADDRESS = "PRIME_RL_TEST_NURSERY"
"""Where the nursery listens: an environment variable, for all processes of pytest. Without one,
and elsewhere than on Linux, ``Popen`` starts an ordinary process."""


class Popen(subprocess.Popen[Any]):
    """A Python process that is forked, by the nursery or, in a fork, by this process."""

    _nursery: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        names = "executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell "
        names += "stdin to_stdin from_stdout stdout from_stderr stderr restore_signals "
        names += "gid gids uid umask start_new_session process_group"
        given = dict(zip(names.split(), rest, strict=True))
        argv = [os.fspath(argument) for argument in args]
        can_fork = can_fork_here(argv) if _is_fork else ADDRESS in os.environ
        if argv[0] != sys.executable or not can_fork:
            return super()._execute_child(args, *rest)  # type: ignore[misc]
        request = {
            "id": "",  # a connection has one
            "argv": argv,
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
        }
        pipes = [given[name] for name in ("stdin", "stdout", "stderr")]
        files = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        if _is_fork:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if not self.pid:
                for name in ("to_stdin", "from_stdout", "from_stderr"):
                    if given[name] != -1:  # else our standard input never ends
                        os.close(given[name])
                forkserver.become(request, files, run_here)
        else:
            self._nursery = connect()
            forkserver.ask(self._nursery, request, files)
            self.pid = json.loads(self._nursery.recv(forkserver.LARGEST))["pid"]
        self._child_created = True
        ends = "stdin to_stdin from_stdout stdout from_stderr stderr"
        self._close_pipe_fds(*(given[name] for name in ends.split()))  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._nursery is None:
            return super()._try_wait(flags)  # type: ignore[misc, no-any-return]
        self._nursery.setblocking(not flags & os.WNOHANG)
        try:
            answer = self._nursery.recv(forkserver.LARGEST)
        except BlockingIOError:
            return 0, 0
        self._nursery.close()
        # Nothing: the nursery has ended.
        code = json.loads(answer)["status"] if answer else -signal.SIGKILL
        return self.pid, code << 8 if code >= 0 else -code

    def _internal_poll(self, *args: Any, **given: Any) -> int | None:
        if self._nursery is None:
            return super()._internal_poll(*args, **given)  # type: ignore[misc, no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(
    argv: Sequence[Any], timeout: float | None = None, **given: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with captured output, as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | given
    with Popen([*map(os.fspath, argv)], **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": Popen})
"""For code that starts a process, in place of its module ``subprocess``."""


def can_fork_here(argv: Sequence[str]) -> bool:
    """Whether a process of a run starts another, and has no threads, which would be missing: but
    the supervisor's own, whose work is in the supervisor."""
    option, module, *_ = [*(part for part in argv[1:] if part != "-P"), "", ""]
    threads = {thread.name for thread in threading.enumerate()} - {"MainThread", "log limit"}
    return option == "-m" and module.startswith("prime_rl") and not threads


_is_fork = False


def connect() -> socket.socket:
    """A connection to the nursery."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[ADDRESS])
    return connection


@contextmanager
def nursery() -> Iterator[None]:
    """Start the nursery, which imports nothing before it is asked for a process."""
    with (
        tempfile.TemporaryDirectory(prefix="nursery-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        os.environ[ADDRESS] = os.path.join(folder, "socket")
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, __file__, forkserver.ROOM],
            env=os.environ | ENVIRONMENT,
            stdin=listener.fileno(),
            start_new_session=True,  # Ctrl-C is for pytest, which ends it
        )
        with process:
            try:
                yield
            finally:
                process.terminate()
        del os.environ[ADDRESS]


def import_installed() -> None:
    """What is installed."""
    plugins = [*entry_points(group="prime_rl"), *entry_points(group="prime_rl.trainer")]
    for name in (*IMPORTS, *(plugin.module for plugin in plugins)):
        with suppress(ImportError):
            importlib.import_module(name)


def run_here(argv: Sequence[str]) -> None:
    """As Python does: ``[-W FILTER] [-P] (-m MODULE | -c CODE | FILE) ARGUMENTS``."""
    global _is_fork
    _is_fork = True
    _, *arguments = argv
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.path[0] = ""
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    while arguments[0] == "-W":
        warnings._setoption(arguments[1])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    if arguments[0] == "-P":
        del sys.path[0]
        arguments = arguments[1:]
    option, *words = arguments
    if option == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *words[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(words[0], vars(main))
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(option)
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    forkserver.main(import_installed, keeps=True, run=run_here)
