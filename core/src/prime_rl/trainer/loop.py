"""The trainer's loop. Algorithm-blind: it sees tokens, streams and loss components.

    wire -> micro batches of step n -> [forward, loss, backward] each
         -> clip -> optimizer -> weights, version n -> metrics of step n -> version n announced
         -> checkpoint of step n, if one is due; also if the run is stopped after step n

The metrics of step n are written before version n is announced: a process that sees the version can
read its metrics.

Several ranks do the same at the same time, each with rows of its own and as many as the others
(``parallel.py``). Every number that a decision depends on is the same on all of them; rank 0
reports it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from prime_rl.errors import WireError
from prime_rl.plugins.status import Facts
from prime_rl.plugins.trainer import TrainerObserver
from prime_rl.plugins.weight_transports import WeightTransport
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.checkpoint import Checkpointer
from prime_rl.trainer.metrics import append_metrics
from prime_rl.trainer.publish import Broadcaster, export
from prime_rl.trainer.published import Publisher, retry
from prime_rl.trainer.state import TrainerState
from prime_rl.trainer.update import BatchUpdate
from prime_rl.weights.versions import AVERAGES
from prime_rl.wire.micro_batch import MicroBatch, decode_batch
from prime_rl.wire.transport import Receiver

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0


class Trainer(TrainerState):
    """The policy and everything that updates it."""

    def train_step(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        status: Status | None = None,
    ) -> dict[str, float]:
        """Train one batch (``update.py``); its metrics. ``status`` gets the share done before each
        row.

        A batch that trains nothing runs forward and backward too, so that ranks stay aligned, and
        leaves the weights alone. So does one whose loss or gradient is not finite: raises
        ``RunError`` at the ``max_bad_steps``-th of them in a row.
        """
        self.self_check()
        metrics = BatchUpdate(self, step, micro_batches, status).run()
        self.references.batch_trained()
        return metrics


def train(
    trainer: Trainer,
    receiver: Receiver,
    run_dir: Path,
    first_step: int,
    status: Status,
    checkpointer: Checkpointer | None = None,
    transport: WeightTransport | None = None,
) -> None:
    """Steps ``first_step`` .. ``max_steps``; each publishes the weights version of its number. A
    batch without rows ends the run after the step before. ``transport``: None for files."""
    config = trainer.config
    publisher = Publisher(run_dir / "broadcasts", config.keep_broadcasts, config.publish_dtype)
    sender = None if transport is None else transport.sender(trainer.device)
    broadcaster = Broadcaster(trainer.model, publisher, sender, status, receiver.announce)
    due = False
    saving = passing_on = 0.0  # of the step before, and reported with the next
    for observer in trainer.observers:
        observer.started(trainer, run_dir)
    trainer.memory.unload()
    for step in range(first_step, trainer.max_steps + 1):
        started = time.perf_counter()
        micro_batches = wait_for_batch(receiver, step, status, broadcaster, trainer.observers)
        if not micro_batches:
            _end_early(trainer, step - 1, broadcaster, None if due else checkpointer, status)
            break

        received = time.perf_counter()
        status.report("training", step=step)  # it waits no longer, though the first row may be long
        moving = trainer.memory.load()
        metrics = trainer.train_step(step, micro_batches, status)
        trained = time.perf_counter()
        status.report("publishing weights", step=step)
        due = checkpointer is not None and checkpointer.is_due(step, trainer.max_steps)
        last = step == trainer.max_steps
        broadcaster.prepare(step, exact=due, last=last)  # while the weights are on the device
        publish_average(trainer, run_dir, step, status)
        written = time.perf_counter()
        moving += trainer.memory.unload()  # before engines that share the device wake
        metrics |= {
            "time/wait_for_batch": received - started,
            "time/broadcast_weights": written - trained + passing_on,
            "time/step": written - started + passing_on,
            "time/save_ckpt": saving,
            "time/offload": moving,
            "perf/broadcast_mib": broadcaster.size(step),
        }
        if parallel.rank() == 0:
            append_metrics(run_dir / "trainer.jsonl", step, metrics)
        passing_on = broadcaster.announce(last)
        trainer.memory.give_back()  # what was used on the way to the engines, which have woken
        announced = time.perf_counter()
        if checkpointer is not None and due:  # last: engines need not wait for it
            checkpointer.save(trainer, step, publisher.path(step), status)
        saving = time.perf_counter() - announced
        for observer in trainer.observers:
            observer.step_done(step, metrics | {"time/save_ckpt": saving})

    if checkpointer is not None:
        checkpointer.wait(status)


def publish_average(trainer: Trainer, run_dir: Path, step: int, status: Status) -> None:
    """For the engine of ``host.ema``, if there is one. Every rank calls this."""
    config = trainer.config
    averages = Publisher(run_dir / AVERAGES, config.keep_broadcasts, config.publish_dtype)
    if trainer.publishes_average:
        doing = f"publish the average of version {step}"
        with trainer.references.within("ema_logprobs"):
            retry(partial(averages.write, trainer.model, step), doing, status)
        parallel.on_main(partial(retry, partial(averages.announce, step), doing, status))


def _end_early(
    trainer: Trainer,
    step: int,
    broadcaster: Broadcaster,
    checkpointer: Checkpointer | None,
    status: Status,
) -> None:
    """The run is stopped: ``step`` was its last. ``checkpointer``: None if it has saved it."""
    logger.info("stopped: step %d is the last", step)
    due = checkpointer is not None and checkpointer.is_due(step, step)
    published = broadcaster.settle(exact=due)
    if checkpointer is not None and due:
        checkpointer.save(trainer, step, published, status)


def wait_for_batch(
    receiver: Receiver,
    step: int,
    status: Status,
    broadcaster: Broadcaster | None = None,
    observers: Sequence[TrainerObserver] = (),
) -> list[MicroBatch]:
    """The micro batches of step ``step``; none if the run ends before it. The status says which
    version is still being written meanwhile, and which one was announced last: only that one can be
    missing (``recovery.py``).

    Raises ``WireError`` if the batch is of another step.
    """
    started = time.perf_counter()

    def report() -> None:
        version = None if broadcaster is None else broadcaster.being_written
        announced = -1 if broadcaster is None else broadcaster.announced
        state = "waiting"
        awaited = f"orchestrator (batch {step})"
        facts = Facts(waits_for="orchestrator")
        if version is not None:
            state = f"writing weights version {version}"
            awaited = "disk"
            facts = Facts()

        last = status.last
        same = (last.state, last.waiting_for) == (state, awaited)
        if same and last.detail.get("announced") == announced:
            status.beat()
        else:
            status.report(state, waiting_for=awaited, facts=facts, step=step, announced=announced)

    def all_have(batch: bool) -> bool:
        return batch if broadcaster is None else broadcaster.all_have(batch)

    report()
    frame = receiver.receive(WAIT_SECONDS)
    while not all_have(frame is not None) or frame is None:
        report()
        for observer in observers:
            observer.waiting(step, time.perf_counter() - started)
        frame = receiver.receive(WAIT_SECONDS) if frame is None else frame

    batch_step, micro_batches = decode_batch(frame)
    if batch_step != step:
        raise WireError(
            f"got the micro batches of step {batch_step}, expected step {step}: a batch was lost "
            "or sent twice. Go on with --resume."
        )

    return micro_batches


def finish(trainer: Trainer, model_path: Path, run_dir: Path, status: Status) -> None:
    """Export the trained policy as a model folder."""
    status.report("exporting the trained model")
    with torch.no_grad():
        write = partial(export, trainer.model, model_path, run_dir / "weights")
        retry(write, "export the trained model", status)
