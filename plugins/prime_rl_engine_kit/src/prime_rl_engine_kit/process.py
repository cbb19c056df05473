"""A server process: its command line, its log and status, and its end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from prime_rl.errors import PrimeRLError
from prime_rl.rundir.launch import READY
from prime_rl.rundir.logs import set_up_logging
from prime_rl.rundir.processes import exit_with_parent
from prime_rl.rundir.status import Status, names_seen

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


def command_line(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The options for the fields of ``EngineLaunch``. No key is among them: argument lists are
    public."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a local Hugging Face folder")
    add("--served-model-name", help="default: the folder's name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--max-model-len", type=int, required=True, help="prompt and completion, in tokens")
    add("--seed", type=int, default=0, help="of requests without a seed")
    add("--policy-version", type=int, default=0, help="of the weights in the folder")
    add("--status-path", type=Path)
    add("--weights-root", type=Path, action="append", help="weight updates lie in one of these")
    add("--wait-for-model", action="store_true", help=f"until the folder holds {READY}")
    return parser


def run_server(args: argparse.Namespace, serve: Callable[[argparse.Namespace, Status], int]) -> int:
    """Serve until a signal, or until the parent is gone. Returns the exit code."""
    set_up_logging()
    exit_with_parent()
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, _exit_cleanly)
    status = Status(args.status_path)
    try:
        return serve(args, status)
    except (SystemExit, KeyboardInterrupt) as stop:  # a signal, at any point
        code = int(stop.code or 0) if isinstance(stop, SystemExit) else 0
        status.report("failed" if code else "stopped")
        return code
    except PrimeRLError as error:
        status.report(f"failed: {error}")
        log.error("%s", error)
        return 1


def wait_for_model(path: Path, status: Status) -> None:
    """Return when the folder is complete."""
    status.report("waiting for the model", waiting_for=f"{path.name}/{READY}")
    # Not `exists`: see `names_in` of prime_rl.rundir.status.
    while not {READY, "config.json"} <= {*names_seen(path)}:
        time.sleep(_POLL_SECONDS)


def exit_now(code: int) -> NoReturn:
    """End the process at once: unloading torch would take most of a second."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _exit_cleanly(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
