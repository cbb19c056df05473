"""``python -m prime_rl.trainer.agent RUN_DIR --ranks N``: the trainer's ranks, as one process.

On one machine it starts them itself. They find one another through a file and talk over loopback;
torchrun's rendezvous would listen on every address. Over several machines it is torchrun, started
on each with the same ``--endpoint``::

    python -m prime_rl.trainer.agent RUN_DIR --ranks 16 --nodes 2 --endpoint trainer-0:29500

What the ranks write goes where the agent's own output goes. The first that fails ends the others,
and the agent's last words say which it was.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prime_rl.rundir.launch import NODE_ADDRESS, PARENT_PID
from prime_rl.rundir.processes import exit_with_parent, lasting_imports
from prime_rl.trainer.place import STORE

TICK_SECONDS = 0.1
LINGER_SECONDS = 60.0
"""How long some ranks may go on when others are done: all end with the same collective."""
GRACE_SECONDS = 5.0
"""Between asking a rank to end and making it."""
MODULE = "prime_rl.trainer"
_SIGNALS = {each.value for each in signal.Signals}


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them; 0 if all are done."""
    parser = argparse.ArgumentParser(prog="prime_rl.trainer.agent")
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
    if options.nodes == 1:
        return run_here(options.run_dir, options.ranks)
    return run_torchrun(options)


def run_torchrun(options: argparse.Namespace) -> int:
    """This machine's ranks by torchrun. Raises what torchrun raises when one fails."""
    with lasting_imports():
        from torch.distributed.run import main as torchrun

    address = os.environ.get(NODE_ADDRESS)  # else torchrun looks up our name: it may lead nowhere
    torchrun(
        [
            *([f"--local-addr={address}"] if address else []),
            f"--nnodes={options.nodes}",
            f"--nproc-per-node={options.ranks // options.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={options.endpoint}",
            f"--rdzv-id={options.id}",
            "--max-restarts=0",
            "--module",
            MODULE,
            str(options.run_dir),
        ]
    )
    return 0


def run_here(run_dir: Path, num_ranks: int) -> int:
    """All ranks on this machine."""
    told = _hear_sigterm()
    with tempfile.TemporaryDirectory(prefix="prime-rl-ranks-") as folder:
        store = str(Path(folder) / "store")
        ranks = [_start(run_dir, rank, num_ranks, store) for rank in range(num_ranks)]
        try:
            return _watch(ranks, told)
        finally:
            _end(ranks)


def _start(run_dir: Path, rank: int, num_ranks: int, store: str) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, STORE: store}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(run_dir)],
        env=os.environ | {name: str(value) for name, value in names.items()},
    )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], told: Callable[[], bool]) -> int:
    """Until all are done, one fails, or we are asked to end."""
    deadline: float | None = None
    while not told():
        codes = [process.poll() for process in ranks]
        if any(codes):
            time.sleep(TICK_SECONDS)  # those that fail without it may have been quicker
            return 0 if told() else _say([process.poll() for process in ranks])
        if all(code == 0 for code in codes):
            return 0
        if 0 in codes:
            deadline = deadline or time.monotonic() + LINGER_SECONDS
            if time.monotonic() > deadline:
                done, left = codes.index(0), codes.index(None)
                print(f"trainer rank {done} is done, and rank {left} does not end", file=sys.stderr)
                return 1
        time.sleep(TICK_SECONDS)
    return 0


def _say(codes: Sequence[int | None]) -> int:
    """Name the rank that failed; not 0. One that a signal ended counts before those that exited,
    which may have failed without it."""
    failed = [(-_signal(code), code, rank) for rank, code in enumerate(codes) if code]
    *_, code, rank = min(failed)
    print(f"trainer rank {rank} of {len(codes)} {_how(code)}", file=sys.stderr)
    return 1


def _signal(code: int) -> int:
    """Which signal ended a process, or made it end itself (code 128 + N); 0: none that has a name
    (code 255 is -1, and no signal)."""
    number = -code if code < 0 else code - 128
    return number if number in _SIGNALS else 0


def _how(code: int) -> str:
    if number := _signal(code):
        return f"was ended by {signal.Signals(number).name}"
    return f"exited with code {code}"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Nobody stays behind."""
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


def _hear_sigterm() -> Callable[[], bool]:
    """Whether anybody has asked us to end."""
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: heard.append(received))
    return lambda: bool(heard)


if __name__ == "__main__":
    sys.exit(main())
