"""``python -m prime_rl_app.agent RUN_DIR --ranks N``: the trainer's ranks, as one process.

On one machine the agent starts them itself. They find one another through a file and talk over
loopback, while torchrun's rendezvous would listen on every address. On several machines it is
torchrun, started on each with the same ``--endpoint``::

    python -m prime_rl_app.agent RUN_DIR --ranks 16 --nodes 2 --endpoint trainer-0:29500

The ranks write to the agent's own output. When one fails, the agent ends the others and names the
failed rank last.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prime_rl.rundir.attempts import identity
from prime_rl.rundir.launch import NODE_ADDRESS, PARENT_PID, STORE
from prime_rl.rundir.processes import exit_with_parent, lasting_imports
from prime_rl.rundir.scratch import Scratch
from prime_rl.rundir.status import Status

TICK_SECONDS = 0.1
LINGER_SECONDS = 600.0
"""How long some ranks may go on when others are done: all end with the same collective, and then
only free their memory and close their files."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
MODULE = "prime_rl.trainer"
FAILED = "failed"
ENDED = 128 + signal.SIGTERM
"""Exit code of an agent that was asked to end before its ranks were done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them; 0 if all are done, and only then."""
    parser = argparse.ArgumentParser(prog="prime_rl_app.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--ranks", type=int, required=True, help="of all machines together")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--endpoint", help="HOST:PORT of one of the machines, the same for all")
    parser.add_argument("--id", default="prime-rl", help="name of the run, the same for all")
    options = parser.parse_args(arguments)
    if options.nodes > 1 and not options.endpoint:
        parser.error("several --nodes need an --endpoint to meet at")
    if options.ranks % options.nodes:
        parser.error(f"{options.ranks} ranks do not divide over {options.nodes} nodes")
    exit_with_parent()
    os.environ[PARENT_PID] = str(os.getpid())  # of the ranks
    try:
        if options.nodes == 1:
            return run_here(options.run_dir, options.ranks)
        return run_torchrun(options)
    except Exception as error:
        _report_failure(options.run_dir, error)
        raise


def _report_failure(run_dir: Path, error: Exception) -> None:
    """Report the error as the trainer does, so that the run does not retry. A rank's own error is
    kept, because torchrun's error only counts ranks."""
    ours = identity(os.environ)
    of_ranks = type(error).__name__ in ("ChildFailedError", "SignalException")
    if ours is None or of_ranks:
        return
    reasons = [error]
    while isinstance(reasons[-1].__cause__, Exception):
        reasons.append(reasons[-1].__cause__)
    text = ": ".join(f"{type(each).__name__}: {each}" for each in reasons)
    said = f"the ranks of this machine could not start: {text}"
    Status(run_dir / "status" / f"{ours[1]}.json").report(FAILED, error=said)


def run_torchrun(options: argparse.Namespace) -> int:
    """This machine's ranks by torchrun. Raises torchrun's error when one fails."""
    with lasting_imports():
        from torch.distributed.run import main as torchrun

    # Else torchrun resolves our host name, perhaps to loopback or another network.
    address = os.environ.get(NODE_ADDRESS)
    addresses = []
    if address:
        hosts = int(options.endpoint.rpartition(":")[0].strip("[]") == address)
        addresses = [f"--local-addr={address}", f"--rdzv-conf=is_host={hosts}"]

    torchrun(
        [
            *addresses,
            f"--nnodes={options.nodes}",
            f"--nproc-per-node={options.ranks // options.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={options.endpoint}",
            f"--rdzv-id={options.id}",
            "--max-restarts=0",
            *("--no-python", sys.executable, "-P", "-u", "-m", MODULE),
            str(options.run_dir),
        ]
    )
    return 0


def run_here(run_dir: Path, num_ranks: int) -> int:
    """All ranks on this machine, until all are done, one fails, or SIGTERM arrives."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: signals.append(received))
    with Scratch("prime-rl-ranks-") as folder:
        shared = os.environ | {"WORLD_SIZE": str(num_ranks), STORE: str(folder.path / "store")}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(run_dir)],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(num_ranks)
        ]
        try:
            return _watch(ranks, lambda: bool(signals))
        finally:
            _end(ranks)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], stopped: Callable[[], bool]) -> int:
    deadline: float | None = None
    while not stopped():
        codes = [process.poll() for process in ranks]
        if any(codes):
            time.sleep(TICK_SECONDS)  # ranks that fail because of it may have exited before it
            return ENDED if stopped() else _report([process.poll() for process in ranks])

        if all(code == 0 for code in codes):
            return 0
        if 0 in codes:
            deadline = deadline or time.monotonic() + LINGER_SECONDS
            if time.monotonic() > deadline:
                done = codes.index(0)
                left = codes.index(None)
                print(f"trainer rank {done} is done, and rank {left} does not end", file=sys.stderr)
                return 1

        time.sleep(TICK_SECONDS)

    return 0 if all(process.poll() == 0 for process in ranks) else ENDED


def _report(codes: Sequence[int | None]) -> int:
    """Name the rank that failed; not 0. A rank that a signal ended goes before ranks that exited:
    they may have failed because of it."""
    failed = [(-(_signal(code) or 0), code, rank) for rank, code in enumerate(codes) if code]
    _, code, rank = min(failed)
    ending = _signal(code)
    how = f"was ended by {ending.name}" if ending else f"exited with code {code}"
    print(f"trainer rank {rank} of {len(codes)} {how}", file=sys.stderr)
    return 1


def _signal(code: int) -> signal.Signals | None:
    """The signal that ended a process (-N), or that it ended itself for (128 + N). None for other
    codes, such as 255, which is -1."""
    with suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128)
    return None


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate all ranks, then kill."""
    for process in ranks:
        with suppress(ProcessLookupError):
            process.terminate()

    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
