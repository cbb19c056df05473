"""``python -m prime_rl.trainer RUN_DIR``: the trainer process.

Reads ``<run>/configs/run.json`` and ``<run>/configs/launch.json``; logs to stderr; writes what it
does to ``<run>/status/trainer.json``. Ends with code 143 within a second of SIGTERM: code 0 is only
for a trainer that has done everything.

Several ranks are started by ``agent.py``, which sets their numbers in the environment. Rank 0 logs
and reports for all; the others log, after their number, only what is their own. A rank that fails,
or gets SIGTERM, exits at once with a code of its own (``rank.py``): the others, and its own
threads, may be waiting for it in a collective.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

from prime_rl.config.run import RunConfig
from prime_rl.errors import PrimeRLError, Terminated, text_of
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.status import Facts, read_status
from prime_rl.plugins.trainer import Kernel, OptimizerMaker, TrainerObserver, Tuning
from prime_rl.plugins.weight_transports import WeightTransport
from prime_rl.proxies import LOCAL
from prime_rl.registry.calls import exit_refused, facts_of_failure, fault
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import (
    make_kernel,
    make_observers,
    make_optimizer,
    make_transport,
    make_tuning,
)
from prime_rl.rundir import logs
from prime_rl.rundir.directory import read_config
from prime_rl.rundir.launch import PARENT_PID, Launch
from prime_rl.rundir.processes import exit_with_parent, lasting_imports
from prime_rl.rundir.status import DONE, Status
from prime_rl.trainer.rank import ENDED, FAILED, FOLLOWED, Rank

logger = logging.getLogger("prime_rl.trainer")

GRACE_SECONDS = 0.5
LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited")
"""In errors of gloo and NCCL when the process at the other end is gone."""
RANK_GONE = "another rank has ended"
GONE = f"{RANK_GONE}; the trainer's log says how"


def main(arguments: list[str]) -> int:
    """Run the trainer; its exit code."""
    if len(arguments) != 1:
        print("usage: python -m prime_rl.trainer RUN_DIR", file=sys.stderr)
        return 2

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent, and not the supervisor
        os.environ.pop(PARENT_PID, None)
    exit_with_parent()

    rank = Rank.of_process()
    exit_on_signal(at_once=rank.size > 1)
    run_dir = Path(arguments[0])
    status = Status(run_dir / "status" / "trainer.json")

    try:
        try:
            run(run_dir, status if rank.number == 0 else Status(None), rank)
        except SystemExit as end:
            # A plugin has called sys.exit: the process must not end as if the run were done.
            if isinstance(end, Terminated):
                raise
            raise exit_refused(end) from end
    except Exception as error:
        code = report_failure(error, status, rank)
        if rank.size > 1:
            leave(code)
        return code

    return 0


def report_failure(error: Exception, status: Status, rank: Rank) -> int:
    """Log why the trainer fails and write it into its status; the exit code.

    Of several ranks the first one writes the status: the others are likely to fail because of it.
    A rank that was killed logs nothing; ``agent.py`` does.
    """
    is_ours = isinstance(error, PrimeRLError)
    reason = fault(error) or (
        str(error) if is_ours else f"{type(error).__name__}: {text_of(error)}"
    )

    before = read_status(status.path) if status.path and rank.size > 1 else None
    first = before is None or before.state != "failed"
    followed = not first or (rank.size > 1 and LOST.search(reason) is not None)

    if followed:
        logger.error("%s, and so this one cannot go on: %.200s", RANK_GONE, reason)
    else:
        if not is_ours:
            logger.error("the trainer failed", exc_info=error)
        logger.error("%s", reason)

    if first:
        facts = Facts(fault="other_rank") if followed else facts_of_failure(error)
        status.report("failed", facts=facts, error=GONE if followed else reason)
    return FOLLOWED if followed else FAILED


def leave(code: int) -> NoReturn:
    """End this process now, without waiting for its threads or the libraries' clean-up."""
    try:
        logging.shutdown()
        sys.stderr.flush()
    finally:  # their disk may be full
        os._exit(code)


def run(run_dir: Path, status: Status, rank: Rank) -> None:
    """Everything between reading the config and the exported model."""
    config = read_config(run_dir)
    launch = Launch.read(run_dir)
    set_up_logging(config.log.level, rank)
    hooks = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    losses = Components.load(config.trainer, hooks)
    losses.make_all()

    observers = make_observers(config.trainer.settings, hooks)
    tuning = make_tuning(config.trainer.settings, hooks)
    kernel = make_kernel(config.trainer, hooks)
    maker = make_optimizer(config.trainer.optim, hooks)
    transport = make_transport(config.weight_broadcast, hooks)

    # These checks need no torch, and neither do the parts above. So a wrong setting is an error at
    # once, before the slow import.
    rank.check(launch.num_ranks)
    config.trainer.check_ranks(rank.size)

    status.report("importing torch")
    with lasting_imports():
        import torch

        from prime_rl.trainer import parallel
        from prime_rl.trainer.device import choose_device
        from prime_rl.trainer.model import model_folder

    # Heads and adapters begin with random numbers: the same ones in every process.
    torch.manual_seed(config.seed)

    model_path = model_folder(launch, status)
    status.report("loading weights")

    elsewhere = not {urlsplit(url).hostname for url in launch.engine_urls} <= {*LOCAL}
    device = choose_device(config.trainer.device, rank)
    with parallel.joined(rank, device, elsewhere, hang_timeout=config.recovery.hang_timeout):
        train_here(
            config,
            launch,
            losses=losses,
            observers=observers,
            tuning=tuning,
            kernel=kernel,
            maker=maker,
            transport=transport,
            model_path=model_path,
            run_dir=run_dir,
            status=status,
        )

    status.report(DONE)


def train_here(
    config: RunConfig,
    launch: Launch,
    losses: Components,
    observers: Sequence[TrainerObserver],
    tuning: Tuning | None,
    kernel: Kernel,
    maker: OptimizerMaker,
    transport: WeightTransport | None,
    model_path: Path,
    run_dir: Path,
    status: Status,
) -> None:
    """From the loaded model to the exported one."""
    from prime_rl.trainer import parallel
    from prime_rl.trainer.checkpoint import Checkpointer, restore
    from prime_rl.trainer.loop import Trainer, finish, publish_earlier, train
    from prime_rl.trainer.model import check_positions, load_model
    from prime_rl.wire.transport import make_receiver

    colocated = config.deployment.colocated
    model = load_model(
        model_path, config.trainer, tuning=tuning, adapter=launch.adapter, on_host=colocated
    )
    check_positions(model.config, config.seq_len)

    trainer = Trainer(
        model,
        losses,
        config=config.trainer,
        max_steps=config.max_steps,
        observers=observers,
        colocated=colocated,
        initial=launch.initial,
        kernel=kernel,
        maker=maker,
    )
    logger.info("policy %s on %s, %s", model_path, trainer.device, trainer.dtype)

    resumed = None
    trainer.publishes_average = "ema" in launch.reference_urls
    trainer.publishes_reference = "initial" in launch.reference_urls

    if launch.checkpoint is not None:
        status.report("loading the checkpoint")
        restore(trainer, launch.checkpoint)
        logger.info("resumed from %s", launch.checkpoint.directory)
        resumed = launch.checkpoint.step
        publish_earlier(trainer, run_dir, step=resumed, status=status, resumed=True)

    checkpointer = Checkpointer(run_dir, config.ckpt, model_path=model_path, resumed=resumed)
    receiver = make_receiver(launch, run_dir, parallel.rank())

    try:
        train(
            trainer,
            receiver,
            run_dir,
            first_step=launch.first_step,
            status=status,
            checkpointer=checkpointer,
            transport=transport,
            has_engines=config.has_engines,
        )
    except Exception as error:
        checkpointer.rescue(error)
        raise
    finally:
        receiver.close()

    finish(trainer, model_path, run_dir=run_dir, status=status)


def set_up_logging(level: str, rank: Rank) -> None:
    """Rank 0 logs as a single rank does. The others leave out the records that all share."""
    logs.set_up_logging(level, rank.number or None)
    if rank.number:
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: not record.name.startswith(f"{logger.name}."))


def exit_on_signal(at_once: bool = False) -> None:
    """End with the code ``ENDED`` on SIGTERM and SIGINT. ``at_once``: without any clean-up.

    Python runs signal handlers between byte codes of the main thread, which one backward pass can
    keep busy for long. So a second thread receives the signal too, and ends the process if the main
    one has not within the grace period. Files are written under another name until they are
    complete, so this leaves none half-written.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if at_once:
            os._exit(ENDED)
        raise Terminated(ENDED)

    wakeup, sender = socket.socketpair()
    sender.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # Python's C handler writes the signal's number there at once, whatever the main thread does.
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def insist(sender: socket.socket) -> None:  # an argument only to keep the socket open
        while wakeup.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        time.sleep(GRACE_SECONDS)
        os._exit(ENDED)

    threading.Thread(target=insist, args=(sender,), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
