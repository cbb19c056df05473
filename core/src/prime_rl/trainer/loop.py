"""The trainer's loop. Algorithm-blind: it sees tokens, streams and loss components.

    wire -> micro batches of step n -> [forward, loss, backward] each
         -> clip -> optimizer -> weights, version n -> metrics of step n -> version n announced
         -> checkpoint of step n, if one is due; also if the run is stopped after step n

The metrics of step n are written before version n is announced: a process that sees the version can
read its metrics.

Several ranks do this at the same time. Each has its own rows, and all have equally many
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
from prime_rl.registry.calls import running
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.checkpoint import Checkpointer
from prime_rl.trainer.expert_balance import LOADS
from prime_rl.trainer.metrics import append_metrics, append_row
from prime_rl.trainer.publish import Broadcaster, export
from prime_rl.trainer.published import Publisher, retry
from prime_rl.trainer.state import TrainerState
from prime_rl.trainer.update import BatchUpdate
from prime_rl.weights.versions import AVERAGES, REFERENCES
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
        # A colocated trainer checks here: when it started, an engine held the device.
        self.self_check()
        metrics = BatchUpdate(self, step, rows=micro_batches, status=status).run()
        self.references.batch_trained()

        for owner in self.stateful().values():
            with running(owner.name, hook="batch_trained", owner=owner):
                owner.batch_trained(step, metrics)
        return metrics | self.reset_reference(step)

    def reset_reference(self, step: int) -> dict[str, float]:
        """After a step that ``reference_reset.interval`` divides: the reference becomes the policy.
        Metrics; none where it never does."""
        reset = self.config.reference_reset
        before = self.references.version
        # A resumed run may have a reset reference although its config has no resets any more.
        if reset is None and not before:
            return {}

        is_due = reset is not None and step % reset.interval == 0
        if reset is not None and is_due:
            self.references.reset(step)
            optimizer_note = ""
            if reset.optimizer:
                self.optimizer.state.clear()
                optimizer_note = ", and its optimizer begins anew"
            logger.info(
                "step %d: the reference is the policy of version %d%s", step, step, optimizer_note
            )

        return {"reference/version": float(before), "reference/reset": float(is_due)}


def train(
    trainer: Trainer,
    receiver: Receiver,
    run_dir: Path,
    first_step: int,
    status: Status,
    checkpointer: Checkpointer | None = None,
    transport: WeightTransport | None = None,
    has_engines: bool = True,
) -> None:
    """Steps ``first_step`` .. ``max_steps``; each publishes the weights version of its number. A
    batch without rows ends the run after the step before. ``transport``: None for files.
    ``has_engines``: False if nothing loads the versions in between."""
    config = trainer.config
    publisher = Publisher(run_dir / "broadcasts", config.keep_broadcasts, config.publish_dtype)
    sender = None if transport is None else transport.sender(trainer.device)
    broadcaster = Broadcaster(
        trainer.model,
        publisher,
        sender=sender,
        status=status,
        announced=receiver.announce,
        is_read=has_engines,
    )

    # Whether the previous step was saved: a run that stops after it must not save it twice.
    due = False
    # Seconds of the step before, which are reported with the next.
    saving = 0.0
    passing_on = 0.0

    for observer in trainer.observers:
        observer.started(trainer, run_dir)
    # A colocated trainer leaves the device to the engines while it waits for a batch.
    trainer.memory.unload()

    for step in range(first_step, trainer.max_steps + 1):
        started = time.perf_counter()
        micro_batches = wait_for_batch(
            receiver, step, status=status, broadcaster=broadcaster, observers=trainer.observers
        )
        if not micro_batches:
            _end_early(
                trainer,
                step - 1,
                broadcaster=broadcaster,
                checkpointer=None if due else checkpointer,
                status=status,
            )
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
        # Before the announcement: reference engines load version n before the policy's do.
        publish_earlier(trainer, run_dir, step, status=status)
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
        # Before the announcement: the orchestrator reads them when it sees the version.
        if parallel.rank() == 0:
            append_metrics(run_dir / "trainer.jsonl", step, metrics)
            balance = trainer.policy.balance
            if balance is not None and balance.num_choices.any():
                append_row(run_dir / LOADS, {"step": step, **balance.table()})

        passing_on = broadcaster.announce(last)
        trainer.memory.give_back()  # what was used on the way to the engines, which have woken
        announced = time.perf_counter()

        if checkpointer is not None and due:  # last: engines need not wait for it
            checkpointer.save(trainer, step, published=publisher.path(step), status=status)
        saving = time.perf_counter() - announced

        for observer in trainer.observers:
            observer.step_done(step, metrics | {"time/save_ckpt": saving})

    if checkpointer is not None:
        # Its thread may still be writing the last checkpoint.
        checkpointer.wait(status)


def publish_earlier(
    trainer: Trainer, run_dir: Path, step: int, status: Status, resumed: bool = False
) -> None:
    """For the engines of ``host.ema`` and ``host.initial``, if there are any: what changed with
    ``step``, or, ``resumed`` from it, what they had. Every rank calls this."""
    config = trainer.config
    dtype = config.publish_dtype
    if trainer.publishes_average:
        averages = Publisher(run_dir / AVERAGES, config.keep_broadcasts, dtype)
        _publish(trainer, averages, "ema_logprobs", version=step, status=status)

    version = trainer.references.version
    # Between resets the weights are the same, so a version is published once per reset.
    if trainer.publishes_reference and version and (resumed or version == step):
        # The one before stays until engines have loaded this one.
        interval = config.reference_reset.interval if config.reference_reset else step
        references = Publisher(run_dir / REFERENCES, interval + 1, dtype)
        _publish(trainer, references, "initial_logprobs", version=version, status=status)


def _publish(
    trainer: Trainer, publisher: Publisher, column: str, version: int, status: Status
) -> None:
    doing = f"publish the weights of {column}, version {version}"
    with trainer.references.within(column):
        retry(partial(publisher.write, trainer.model, version), doing, status)
    announce = partial(publisher.announce, version)
    parallel.on_main(lambda: retry(announce, doing, status))


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
        checkpointer.save(trainer, step, published=published, status=status)


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
        # Recovery must not take a slow disk for an orchestrator that sends nothing.
        if version is not None:
            state = f"writing weights version {version}"
            awaited = "disk"
            facts = Facts()

        last = status.last
        same = (last.state, last.waiting_for) == (state, awaited)
        # A sign of life is enough where nothing has changed.
        if same and last.detail.get("announced") == announced:
            status.beat()
        else:
            status.report(state, waiting_for=awaited, facts=facts, step=step, announced=announced)

    def all_have(batch: bool) -> bool:
        return batch if broadcaster is None else broadcaster.all_have(batch)

    report()
    frame = receiver.receive(WAIT_SECONDS)
    # All ranks start a step together: until the last has its frame, each reports and waits.
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
        write = partial(export, trainer.model, model_path, directory=run_dir / "weights")
        retry(write, "export the trained model", status)
