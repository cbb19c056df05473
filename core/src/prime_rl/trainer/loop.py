"""The trainer's loop. Algorithm-blind: it sees tokens, streams and three loss components.

    wire -> micro batches of step n -> [forward, loss, backward] each
         -> clip -> optimizer -> weights, version n -> metrics of step n -> version n announced
         -> checkpoint of step n, if one is due; also if the run is stopped after step n

Weights that make version n are written, then step n's metrics, then the version is announced:
whoever sees a version can read its metrics.

Several ranks do the same at the same time, each with rows of its own and as many as the others
(``parallel.py``). Every number that decides anything is the same on all of them; rank 0 tells it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import RunError, WireError
from prime_rl.plugins.loss import Loss
from prime_rl.plugins.weight_transports import WeightTransport
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.broadcaster import Broadcaster
from prime_rl.trainer.checkpoint import Checkpointer
from prime_rl.trainer.counts import Counts, count_members
from prime_rl.trainer.disk import PUBLISH_WAITS, persist
from prime_rl.trainer.flops import model_cost, peak_flops, perf_metrics
from prime_rl.trainer.guards import SlowSteps, worst_samples
from prime_rl.trainer.loss import row_loss
from prime_rl.trainer.metrics import (
    MetricsFile,
    StepMetrics,
    console_line,
    disk_metrics,
    peak_memory,
)
from prime_rl.trainer.model import choose_device, make_policy
from prime_rl.trainer.offload import Offload
from prime_rl.trainer.optim import clip_gradients, make_optimizer, make_schedule
from prime_rl.trainer.packing import packings
from prime_rl.trainer.place import Place
from prime_rl.trainer.row import make_row
from prime_rl.trainer.self_check import find_packing
from prime_rl.trainer.token_export import TokenExport
from prime_rl.trainer.weights import Publisher, export
from prime_rl.wire.micro_batch import MicroBatch, decode_batch
from prime_rl.wire.transport import Receiver

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0


@dataclass
class Trainer:
    """The policy and everything that updates it."""

    model: PreTrainedModel
    loss: Loss
    config: TrainerConfig
    max_steps: int
    token_export: TokenExport | None = None
    colocated: bool = False
    """It has the device only while it takes a step (``offload.py``)."""

    def __post_init__(self) -> None:
        self.device = self.model.device
        if parallel.several_ranks() or self.colocated:
            self.device = choose_device(self.config.device, Place.of_process())
        on_host = self.colocated and not parallel.several_ranks()
        home = self.model.device if on_host else self.device
        self.policy = make_policy(self.model, home, self.config)
        self.half = self.config.dtype == "bfloat16"
        self.num_bad_steps = 0
        """In a row."""
        self.optimizer = make_optimizer(self.model, self.config.optim)
        self.cost, self.peak = model_cost(self.model), peak_flops(self.device, self.config.dtype)
        self.learning_rate = make_schedule(
            self.config.scheduler, self.config.optim.lr, self.max_steps
        )
        self.memory = Offload(self.policy, self.optimizer, self.device, self.colocated)
        self.checked = False
        if not self.colocated:  # else it does not have the device yet
            self.self_check()

    def self_check(self) -> None:
        """Once: find out how rows have to go through this model (``self_check.py``). Raises
        ``ConfigError`` if the trainer cannot train it."""
        if not self.checked:
            half = self.half and self.device.type != "cpu"  # a CPU takes the same path in both
            # Blocks are compiled for what they will train on, not for what is tried out here.
            plain = torch.compiler.set_stance("force_eager") if self.config.compile else None
            with plain or nullcontext():
                find_packing(self.policy, packings(self.config, self.device), self.device, half)
            self.checked = True

    @property
    def share_prompts(self) -> bool:
        """Whether a prompt that several samples of a row start from is computed once."""
        return self.policy.packing.name == "shared"

    def train_step(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        progress: Callable[[float], None] = lambda share: None,
    ) -> dict[str, float]:
        """One optimizer step; its metrics. ``progress`` hears the share done before each row.

        A batch that trains nothing runs forward and backward like any (ranks stay aligned) and
        leaves the weights alone. So does one whose loss or gradient is not finite: raises
        ``RunError`` at the ``max_bad_steps``-th of them in a row.
        """
        self.self_check()
        started = time.perf_counter()
        counts = count_members(micro_batches)
        sums = self.forward_backward(step, micro_batches, counts, progress)
        norm = float(
            parallel.full(clip_gradients(self.model.parameters(), self.config.optim.max_norm))
        )
        seconds = time.perf_counter() - started  # the norm has waited for the device
        metrics = sums.result()
        flops = metrics.pop("perf/flops", 0.0)
        bad = not (math.isfinite(norm) and math.isfinite(metrics["loss/mean"]))
        nothing = not counts.table.any()
        if bad:
            self.skip_bad_step(step, micro_batches, metrics["loss/mean"], norm)
        elif nothing:
            self.skip_step(step, counts.num_tokens)
        self.num_bad_steps = self.num_bad_steps + 1 if bad else 0
        rate = 0.0 if bad or nothing else self.optimizer_step(step)
        return metrics | {
            "optim/lr": rate,
            "optim/grad_norm": norm,
            "optim/skipped": float(bad or nothing),
            **perf_metrics(counts.num_tokens, flops, seconds, parallel.num_ranks(), self.peak),
            "perf/peak_memory": max(parallel.gather(peak_memory(self.device))),
            "time/forward_backward": seconds,
        }

    def forward_backward(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        counts: Counts,
        progress: Callable[[float], None],
    ) -> StepMetrics:
        """Accumulate the gradients of the step's loss."""
        metrics = StepMetrics(counts)
        export = self.token_export and self.token_export.begin(step)
        for number, micro_batch in enumerate(micro_batches):
            progress(number / len(micro_batches))
            row = make_row(micro_batch, self.device, share=self.share_prompts)
            with self.autocast():
                logprobs, entropies = self.policy(row)
            loss = row_loss(row, logprobs, self.loss, counts, self.config.loss.normalize_by)
            parallel.begin_backward(self.policy, last=number == len(micro_batches) - 1)
            torch.autograd.backward(loss.loss)
            metrics.observe(row, logprobs.detach(), entropies, loss)
            if self.cost is not None:
                metrics.add_sum("perf/flops", self.cost.of(row))
            if export:
                export.add(micro_batch, row, logprobs.detach(), entropies, loss.calls)
        if export:
            export.finish()
        return metrics

    def autocast(self) -> torch.autocast:
        """Products in ``trainer.dtype``. Without autocast's cache, which would keep a rounded copy
        of every weight until the forward pass is over, of other ranks' shards too."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False
        )

    def skip_step(self, step: int, num_tokens: int) -> None:
        """Leave the weights alone: with a gradient of nothing, Adam's momentum and the weight decay
        would still move them."""
        self.optimizer.zero_grad(set_to_none=True)
        logger.warning(
            "step %d: none of the batch's %d tokens trains anything: no component has a member. "
            "No optimizer step; version %d has the weights of version %d.",
            step,
            num_tokens,
            step,
            step - 1,
        )

    def skip_bad_step(
        self, step: int, micro_batches: Sequence[MicroBatch], loss: float, norm: float
    ) -> None:
        """Drop gradients that are not finite, and say which samples stand out. Raises ``RunError``
        if this was one too many in a row."""
        self.optimizer.zero_grad(set_to_none=True)
        worst = "; ".join(map(str, worst_samples(self, micro_batches)))
        reason = (
            f"step {step}: the gradient norm is {norm}, the loss {loss}. "
            f"Most conspicuous: {worst}. "
        )
        limit = self.config.max_bad_steps
        if self.num_bad_steps + 1 >= limit:
            raise RunError(
                f"{reason}That was the {limit}. step in a row that is not finite "
                f"(trainer.max_bad_steps). The weights of version {step - 1} are intact. Lower "
                "trainer.optim.lr, or look for a logprob_gap/max that grows."
            )
        logger.error(
            "%sNo optimizer step; version %d has the weights of version %d.",
            *(reason, step, step - 1),
        )

    def optimizer_step(self, step: int) -> float:
        """Move the weights along the gradients and drop those; the learning rate it took."""
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return rate


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
    batch without rows ends the run before. ``transport``: None where weights go as files."""
    config = trainer.config
    publisher = Publisher(run_dir / "broadcasts", config.keep_broadcasts, config.publish_dtype)
    sender = None if transport is None else transport.sender(trainer.device)
    broadcaster = Broadcaster(trainer.model, publisher, sender, status)
    metrics_file = MetricsFile(run_dir / "trainer.jsonl")
    slow, due = SlowSteps(), False
    saving = passing_on = 0.0
    trainer.memory.unload()
    for step in range(first_step, trainer.max_steps + 1):
        started = time.perf_counter()
        micro_batches = wait_for_batch(
            receiver, step, status, broadcaster.all_have, partial(slow.waiting, step)
        )
        if not micro_batches:
            _end_early(trainer, step - 1, broadcaster, None if due else checkpointer, status)
            break
        received = time.perf_counter()
        moving = trainer.memory.load()
        metrics = trainer.train_step(step, micro_batches, partial(_report_training, status, step))
        trained = time.perf_counter()
        status.report("publishing weights", step=step)
        due = checkpointer is not None and checkpointer.is_due(step, trainer.max_steps)
        last = step == trainer.max_steps
        broadcaster.prepare(step, exact=due, last=last)
        written = time.perf_counter()
        moving += trainer.memory.unload()  # before engines that share the device wake
        metrics |= {
            "time/wait_for_batch": received - started,
            "time/broadcast_weights": written - trained + passing_on,
            "time/step": written - started + passing_on,
            "time/save_ckpt": saving,
            "time/offload": moving,
            "perf/broadcast_mib": broadcaster.size(step),
            **disk_metrics(run_dir),
        }
        if parallel.rank() == 0:
            _announce(publisher, metrics_file, step, metrics, status)
        logger.info("%s", console_line(step, trainer.max_steps, metrics))
        passing_on = 0.0 if last else broadcaster.pass_on()
        announced = time.perf_counter()
        if checkpointer is not None and due:  # last: engines need not wait for it
            checkpointer.save(trainer, step, publisher.path(step), status)
        saving = time.perf_counter() - announced  # told with the next step, as passing_on is
        whole = {"time/step": metrics["time/step"] + saving, "time/save_ckpt": saving}
        if warning := slow.observe(step, metrics | whole):
            logger.warning("%s", warning)
    if checkpointer is not None:
        checkpointer.wait(status)


def _announce(
    publisher: Publisher,
    metrics_file: MetricsFile,
    step: int,
    metrics: dict[str, float],
    status: Status,
) -> None:
    append = partial(metrics_file.append, step, metrics)
    persist(append, f"write the metrics of step {step}", PUBLISH_WAITS, status)
    announce = partial(publisher.announce, step)
    persist(announce, f"announce weights version {step}", PUBLISH_WAITS, status)


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


def _report_training(status: Status, step: int, share: float) -> None:
    status.report("training", progress=share, step=step)


def wait_for_batch(
    receiver: Receiver,
    step: int,
    status: Status,
    all_have: Callable[[bool], bool] = bool,
    waited: Callable[[float], None] = lambda seconds: None,
) -> list[MicroBatch]:
    """The micro batches of step ``step``; none if the run ends before it. ``all_have``, told now
    and then whether we have ours, says whether every rank has; ``waited`` is told for how long.
    Raises ``WireError`` if another step's come."""
    started = time.perf_counter()
    status.report("waiting", waiting_for=f"orchestrator (batch {step})", step=step)
    frame = receiver.receive(WAIT_SECONDS)
    while not all_have(frame is not None) or frame is None:
        waited(time.perf_counter() - started)
        frame = receiver.receive(WAIT_SECONDS) if frame is None else frame
    found, micro_batches = decode_batch(frame)
    if found != step:
        raise WireError(
            f"got the micro batches of step {found}, expected step {step}: "
            "a batch was lost or sent twice"
        )
    return micro_batches


def finish(trainer: Trainer, model_path: Path, run_dir: Path, status: Status) -> None:
    """Leave the trained policy as a folder anybody can load."""
    status.report("exporting the trained model")
    with torch.no_grad():
        write = partial(export, trainer.model, model_path, run_dir / "weights")
        persist(write, "export the trained model", PUBLISH_WAITS, status)
