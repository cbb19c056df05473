"""``python -m prime_rl.trainer RUN_DIR``: the trainer process.

Reads ``<run>/configs/run.json`` and ``<run>/configs/launch.json``; logs to stderr; says what it
does in ``<run>/status/trainer.json``. Ends with code 0 within a second of SIGTERM, whatever it is
doing.

One of several ranks is told so in its environment (``agent.py``). Rank 0 speaks for all; the others
say, after their number, what is theirs alone, and why they fail. One that fails, or is asked to
end, leaves at once with a code of its own (``place.py``): the others may wait for it in a
collective, and threads of its own for them.
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
from pathlib import Path
from typing import NoReturn

from prime_rl.config.run import RunConfig
from prime_rl.errors import PrimeRLError
from prime_rl.plugins.base import Loss
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.manager import Hooks, load_plugins
from prime_rl.plugins.offers import LOSS, collect, select, settings_of
from prime_rl.plugins.weight_transports import WeightTransport
from prime_rl.rundir.launch import PARENT_PID, Launch
from prime_rl.rundir.processes import exit_with_parent, lasting_imports
from prime_rl.rundir.status import DONE, Status, read_status
from prime_rl.trainer.place import ENDED, FAILED, FOLLOWED, Place
from prime_rl.weights.transports import make_transport

logger = logging.getLogger("prime_rl.trainer")

GRACE_SECONDS = 0.5
LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited")
"""What gloo and NCCL say when the process at the other end is gone."""
GONE = "another rank has ended; the trainer's log says how"


def main(arguments: list[str]) -> int:
    """Run the trainer; its exit code."""
    if len(arguments) != 1:
        print("usage: python -m prime_rl.trainer RUN_DIR", file=sys.stderr)
        return 2
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent, not who started it
        os.environ.pop(PARENT_PID, None)
    exit_with_parent()
    place = Place.of_process()
    exit_on_signal(0 if place.size == 1 else ENDED)
    run_dir = Path(arguments[0])
    told = Status(run_dir / "status" / "trainer.json")
    try:
        run(run_dir, told if place.rank == 0 else Status(None), place)
    except Exception as error:
        code = tell(error, told, place)
        if place.size > 1:
            leave(code)
        return code
    return 0


def tell(error: Exception, told: Status, place: Place) -> int:
    """Log why the trainer fails and write it into its status; the exit code.

    The first of several ranks has the word: what the others meet is likely to come of it. One that
    was killed says nothing itself; ``agent.py`` does.
    """
    reason = str(error) if isinstance(error, PrimeRLError) else f"{type(error).__name__}: {error}"
    before = read_status(told.path) if told.path and place.size > 1 else None
    first = before is None or before.state != "failed"
    followed = not first or (place.size > 1 and LOST.search(reason) is not None)
    if followed:
        logger.error("another rank has ended, and so this one cannot go on: %.200s", reason)
    elif isinstance(error, PrimeRLError):
        logger.error("%s", reason)
    else:  # ours to mend: with its traceback
        logger.error("the trainer failed", exc_info=error)
    if first:
        told.report("failed", error=GONE if followed else reason)
    return FOLLOWED if followed else FAILED


def leave(code: int) -> NoReturn:
    """End this process now, whatever its threads and the libraries' clean-up wait for."""
    try:
        logging.shutdown()
        sys.stderr.flush()
    finally:  # their disk may be full
        os._exit(code)


def run(run_dir: Path, status: Status, place: Place) -> None:
    """Everything between reading the config and the exported model."""
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    launch = Launch.read(run_dir)
    set_up_logging(config.log.level, place)
    hooks = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    loss = make_loss(config, hooks)  # before the slow import: a wrong table is known at once
    transport = make_transport(config.weight_broadcast, hooks)
    place.check(launch.num_ranks)
    config.trainer.check_ranks(place.size)
    status.report("importing torch")
    with lasting_imports():
        import torch

        from prime_rl.trainer import parallel
        from prime_rl.trainer.model import choose_device, model_folder

    torch.manual_seed(config.seed)
    model_path = model_folder(launch, status)
    status.report("loading weights")
    with parallel.joined(place, choose_device(config.trainer.device, place)):
        train_here(config, launch, loss, model_path, run_dir, status, transport)
    status.report(DONE)


def train_here(
    config: RunConfig,
    launch: Launch,
    loss: Loss,
    model_path: Path,
    run_dir: Path,
    status: Status,
    transport: WeightTransport | None = None,
) -> None:
    """From the loaded model to the exported one."""
    from prime_rl.trainer import parallel
    from prime_rl.trainer.checkpoint import Checkpointer, restore
    from prime_rl.trainer.loop import Trainer, finish, train
    from prime_rl.trainer.model import load_model
    from prime_rl.trainer.token_export import make_token_export
    from prime_rl.wire.transport import make_receiver

    colocated = config.deployment.colocated
    trainer = Trainer(
        load_model(model_path, config.trainer, launch.adapter, colocated),
        loss,
        config.trainer,
        config.max_steps,
        make_token_export(config.trainer.token_export, run_dir),
        colocated,
    )
    logger.info("policy %s on %s, %s", model_path, trainer.device, config.trainer.dtype)
    if launch.checkpoint is not None:
        status.report("loading the checkpoint")
        restore(trainer, launch.checkpoint)
        logger.info("resumed from %s", launch.checkpoint.directory)
    resumed = None if launch.checkpoint is None else launch.checkpoint.step
    checkpointer = Checkpointer(run_dir, config.ckpt, model_path, resumed)
    receiver = make_receiver(launch, run_dir, parallel.rank())
    try:
        train(
            *(trainer, receiver, run_dir, launch.first_step, status, checkpointer),
            transport,
        )
    except Exception as error:
        checkpointer.rescue(error)
        raise
    finally:
        receiver.close()
    finish(trainer, model_path, run_dir, status)


def set_up_logging(level: str, place: Place) -> None:
    """Rank 0 logs as one rank does. The others leave to it what all do alike."""
    name = "" if place.rank == 0 else f"[rank {place.rank}] "
    logging.basicConfig(
        level=level.upper(), format=f"{name}%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if place.rank:
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: not record.name.startswith(f"{logger.name}."))


def make_loss(config: RunConfig, hooks: Hooks | None = None) -> Loss:
    """The rl loss that ``[trainer.loss]`` selects, from the plugins installed for the trainer."""
    table = config.trainer.loss
    hooks = hooks or load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    offers = collect(hooks, LOSS)
    loss_class = select(LOSS, table.type, offers, "trainer.loss.type")
    return loss_class(settings_of(loss_class, LOSS, table.settings, "trainer.loss"))


def exit_on_signal(code: int = 0) -> None:
    """End with ``code`` on SIGTERM and SIGINT.

    Python runs signal handlers between byte codes of the main thread, and one backward pass may
    keep it for long. So a second thread hears of the signal too, and ends the process if the first
    has not within the grace period. What that may cut off is written under another name until it is
    whole.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(code) if code else sys.exit(0))
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(code, heard, told), daemon=True).start()


def _insist(code: int, heard: socket.socket, told: socket.socket) -> None:
    """``told`` comes along to stay open."""
    while heard.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
        pass
    time.sleep(GRACE_SECONDS)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
