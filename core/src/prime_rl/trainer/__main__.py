"""``python -m prime_rl.trainer RUN_DIR``: the trainer process.

Reads ``<run>/configs/run.json`` and ``<run>/configs/launch.json``; logs to stderr; says what it
does in ``<run>/status/trainer.json``. Ends with code 0 within a second of SIGTERM, whatever it is
doing.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from prime_rl.config import RunConfig
from prime_rl.plugins.base import Loss
from prime_rl.plugins.errors import ConfigError, PrimeRLError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.manager import load_plugins
from prime_rl.plugins.offers import LOSS, collect, select, settings_of
from prime_rl.run.launch import Launch
from prime_rl.run.processes import exit_with_parent
from prime_rl.run.status import Status

logger = logging.getLogger("prime_rl.trainer")

GRACE_SECONDS = 0.5


def main(arguments: list[str]) -> int:
    """Run the trainer; its exit code."""
    if len(arguments) != 1:
        print("usage: python -m prime_rl.trainer RUN_DIR", file=sys.stderr)
        return 2
    exit_with_parent()
    exit_on_signal()
    run_dir = Path(arguments[0])
    status = Status(run_dir / "status" / "trainer.json")
    try:
        run(run_dir, status)
    except PrimeRLError as error:
        logger.error("%s", error)
        status.report("failed", error=str(error))
        return 1
    except Exception as error:  # ours to mend: with its traceback
        logger.exception("the trainer failed")
        status.report("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def run(run_dir: Path, status: Status) -> None:
    """Everything between reading the config and the exported model."""
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    launch = Launch.read(run_dir)
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    loss = make_loss(config)  # before the slow import: a wrong table is known at once
    if launch.num_ranks != 1:
        raise ConfigError(
            f"the trainer runs on one rank so far, got num_ranks = {launch.num_ranks}"
        )
    status.report("importing torch")
    import torch

    from prime_rl.trainer.checkpoint import Checkpointer, restore
    from prime_rl.trainer.loop import Trainer, finish, train
    from prime_rl.trainer.model import load_model, model_folder
    from prime_rl.trainer.token_export import make_token_export
    from prime_rl.wire.transport import make_receiver

    torch.manual_seed(config.seed)
    model_path = model_folder(launch, status)
    status.report("loading weights")
    trainer = Trainer(
        load_model(model_path, config.trainer),
        loss,
        config.trainer,
        config.max_steps,
        make_token_export(config.trainer.token_export, run_dir),
    )
    logger.info("policy %s on %s, %s", model_path, trainer.device, config.trainer.dtype)
    if launch.checkpoint is not None:
        status.report("loading the checkpoint")
        restore(trainer, launch.checkpoint)
        logger.info("resumed from %s", launch.checkpoint.directory)
    resumed = None if launch.checkpoint is None else launch.checkpoint.step
    checkpointer = Checkpointer(run_dir, config.ckpt, model_path, resumed)
    receiver = make_receiver(launch, run_dir)
    try:
        train(trainer, receiver, run_dir, launch.first_step, status, checkpointer)
    finally:
        receiver.close()
    finish(trainer, model_path, run_dir, status)


def make_loss(config: RunConfig) -> Loss:
    """The rl loss that ``[trainer.loss]`` selects, from the plugins installed for the trainer."""
    table = config.trainer.loss
    offers = collect(load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled), LOSS)
    loss_class = select(LOSS, table.type, offers, "trainer.loss.type")
    return loss_class(settings_of(loss_class, LOSS, table.settings, "trainer.loss"))


def exit_on_signal() -> None:
    """End with code 0 on SIGTERM and SIGINT.

    Python runs signal handlers between byte codes of the main thread, and one backward pass may
    keep it for long. So a second thread hears of the signal too, and ends the process if the first
    has not within the grace period. What that may cut off is written under another name until it is
    whole.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(heard, told), daemon=True).start()


def _exit(*_: object) -> NoReturn:
    sys.exit(0)


def _insist(heard: socket.socket, told: socket.socket) -> None:
    """``told`` comes along to stay open."""
    while heard.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
        pass
    time.sleep(GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
