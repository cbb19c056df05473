"""What one batch does to the weights: an optimizer step for each minibatch of each epoch.

    logprobs of all rows under earlier weights, if a loss reads them (``references.py``)
        -> old logprobs of all rows, and the streams that heads write, if a loss reads them
        -> for each minibatch: counts over all ranks -> [forward, loss, backward] for each row
        -> clip -> optimizer

The packer makes the minibatches. The first epoch takes them in their order; each later one in a
random order, seeded with step and epoch. Each has denominators of its own, is clipped by itself,
and is skipped by itself if it trains nothing or its loss or gradient is not finite. All of a batch
have the learning rate of its step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.registry.calls import running
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.heads import write_streams
from prime_rl.trainer.loss import Counts, count_members, row_loss
from prime_rl.trainer.metrics import StepMetrics, summarize
from prime_rl.trainer.optim import clip_gradients
from prime_rl.trainer.packed_row import PackedRow, ratio_tokens
from prime_rl.trainer.references import REFERENCES
from prime_rl.trainer.state import TrainerState
from prime_rl.wire.micro_batch import MicroBatch

logger = logging.getLogger(__name__)

SHOWN = ("loss/mean", "optim/grad_norm", "entropy/all/mean", "mismatch_kl/all/mean")
"""Metrics of each minibatch, beside those that losses report."""


class BatchUpdate:
    """The optimizer steps of one batch."""

    def __init__(
        self, trainer: TrainerState, step: int, rows: Sequence[MicroBatch], status: Status | None
    ) -> None:
        self.trainer = trainer
        self.step = step
        self.status = status
        numbers = sorted({row.minibatch for row in rows}) or [0]
        self.parts = [[row for row in rows if row.minibatch == number] for number in numbers]
        self.counts = [count_members(part, trainer.losses) for part in self.parts]
        self.plan = plan_updates(step, len(self.parts), trainer.config.epochs)
        names = {name for counts in self.counts for name, _ in counts.members}  # of all ranks
        reads = {column for name in names for column in trainer.losses[name].computed}
        self.reads_old = "old_logprobs" in reads
        trainer.policy.read = reads
        self.looks_ahead = self.reads_old or not reads.isdisjoint(trainer.heads)
        self.sums: list[StepMetrics] = []
        self.found: list[dict[str, float]] = []
        """Metrics of each optimizer step."""
        self.num_bad = 0
        self.old_logprobs: dict[int, Tensor] = {}
        """By ``id()`` of the micro batch, in the order of its ``PackedRow``."""
        self.references: dict[str, dict[int, Tensor]] = {n: {} for n in REFERENCES if n in reads}
        """The same under earlier weights, by column."""

    def run(self) -> dict[str, float]:
        """Take all of them. Returns the batch's metrics. Raises ``RunError`` (see
        ``Trainer.train_step``)."""
        trainer = self.trainer
        seconds = 0.0
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        for column in self.references:
            self.look_back(column)
        if self.looks_ahead:
            with torch.no_grad():  # the rows of the first minibatch go forward before any change
                for micro_batch in (row for part in self.parts[1:] for row in part):
                    row, logprobs, _, heads = trainer.forward(micro_batch)
                    self.look_ahead(micro_batch, row, logprobs, heads)
            parallel.reshard(trainer.policy)

        for part in self.plan:
            sums = self.forward_backward(self.parts[part], self.counts[part])
            bound = trainer.config.optim.max_norm
            apart = {f"optim/{name}": module for name, (module, _) in trainer.heads.items()}
            norms = {
                f"{name}/grad_norm": float(parallel.full(clip_gradients(m.parameters(), bound)))
                for name, m in {"optim": trainer.model, **apart}.items()
            }
            seconds += time.perf_counter() - started  # the norm has waited for the device
            found = sums.result() | norms
            bad = not all(map(math.isfinite, (*norms.values(), found["loss/mean"])))
            found["optim/skipped"] = float(bad or not sums.counts.members)
            self.num_bad += bad
            self.sums.append(sums)
            self.found.append(found)
            if len(self.sums) == len(self.plan):
                metrics = self.metrics(seconds)
                for observer in trainer.observers:
                    metrics |= observer.step_trained(self.step, metrics)

            self.optimizer_step(self.parts[part], bad)
            started = time.perf_counter()

        rate = 0.0 if metrics["optim/skipped"] == 1 else trainer.learning_rate(self.step)
        return metrics | {"optim/lr": rate}

    @torch.no_grad()
    def look_back(self, column: str) -> None:
        """Compute a column of ``references`` for all rows."""
        policy = self.trainer.policy
        read, policy.read = policy.read, ()
        with self.trainer.references.within(column):
            for micro_batch in (row for part in self.parts for row in part):
                self.references[column][id(micro_batch)] = self.trainer.forward(micro_batch)[1]
            parallel.reshard(policy)
        policy.read = read

    def look_ahead(
        self, micro_batch: MicroBatch, row: PackedRow, logprobs: Tensor, computed: dict[str, Tensor]
    ) -> PackedRow:
        """At its first forward pass of the batch: keep the logprobs of a row, and write the streams
        of heads. The row with them."""
        if id(micro_batch) in self.old_logprobs or not self.looks_ahead:
            return row
        self.old_logprobs[id(micro_batch)] = logprobs.detach()
        heads = {n: output for n, output in computed.items() if n in self.trainer.heads}
        if heads:
            write_streams(micro_batch, row, heads, self.trainer.losses)
        return self.trainer.row(micro_batch) if heads else row

    def forward_backward(self, rows: Sequence[MicroBatch], counts: Counts) -> StepMetrics:
        """Accumulate the gradients of a minibatch's loss; its metrics."""
        trainer = self.trainer
        metrics = StepMetrics(counts)
        for number, micro_batch in enumerate(rows):
            if self.status is not None:
                progress = (len(self.sums) + number / len(rows)) / len(self.plan)
                self.status.report("training", progress=progress, step=self.step)

            row, logprobs, entropies, computed = trainer.forward(micro_batch)
            row = self.look_ahead(micro_batch, row, logprobs, computed)
            seen: dict[str, Any] = {"micro_batch": micro_batch, "row": row}
            seen |= {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
            old = self.old_logprobs.get(id(micro_batch))
            computed |= {n: column[id(micro_batch)] for n, column in self.references.items()}
            loss = row_loss(row, logprobs, trainer.losses, counts, entropies, old, computed)
            parallel.begin_backward(trainer.policy, last=number == len(rows) - 1)
            torch.autograd.backward(loss.loss)
            compared = ratio_tokens(row, trainer.losses)
            metrics.observe(row, seen["logprobs"], seen["entropies"], loss, compared)
            for observer in trainer.observers:
                with running(observer.name, hook="row_trained", owner=observer):
                    observer.row_trained(self.step, **seen, calls=loss.calls)

        return metrics

    def optimizer_step(self, rows: Sequence[MicroBatch], bad: bool) -> None:
        """Take the optimizer step, or skip it and log why."""
        trainer = self.trainer
        step = self.step
        if not self.found[-1]["optim/skipped"]:  # else momentum and weight decay would move weights
            for optimizer in trainer.optimizers:
                scale = optimizer.defaults["lr"] / trainer.config.optim.lr
                for group in optimizer.param_groups:
                    group["lr"] = trainer.learning_rate(step) * scale
                optimizer.step()

        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)  # memory for one more forward pass
        trainer.num_bad_steps = trainer.num_bad_steps if bad else 0
        where = f"step {step}"
        fate = f"version {step} has the weights of version {step - 1}"
        if len(self.plan) > 1:
            where += f", optimizer step {len(self.sums)} of {len(self.plan)}"
            fate = "the others go on"

        if bad:
            self.report_bad_step(rows, where, fate)
        elif self.found[-1]["optim/skipped"]:
            logger.warning(
                "%s: none of the batch's %d tokens trains anything: no component has a member. No "
                "optimizer step; %s.",
                where,
                self.sums[-1].counts.num_tokens,
                fate,
            )

    def report_bad_step(self, rows: Sequence[MicroBatch], where: str, fate: str) -> None:
        """Log an optimizer step that is not finite, with what observers find out about it."""
        trainer = self.trainer
        metrics = self.found[-1]
        norm = metrics["optim/grad_norm"]
        loss = metrics["loss/mean"]
        reason = f"{where}: the gradient norm is {norm}, the loss {loss}. "
        for observer in trainer.observers:
            found = observer.bad_step(self.step, rows)
            if found:
                reason += f"{found} "

        trainer.num_bad_steps += self.num_bad == len(self.plan)
        if trainer.num_bad_steps >= min(trainer.config.max_bad_steps, trainer.max_steps):
            none = ", and no step of the run was" * (trainer.num_bad_steps == trainer.max_steps)
            raise RunError(
                f"{reason}That was the {trainer.num_bad_steps}. step in a row that is not finite"
                f"{none} (trainer.max_bad_steps). The weights of version {self.step - 1} are "
                "intact. Lower trainer.optim.lr, or check whether logprob_gap/max grows."
            )

        logger.error("%sNo optimizer step; %s.", reason, fate)

    def metrics(self, seconds: float) -> dict[str, float]:
        """Of the batch's only optimizer step; else over all, with ``minibatch/N/...`` of each."""
        metrics = dict(self.found[0])
        number = len(self.found)
        if number > 1:
            metrics = summarize(self.sums, self.trainer.config.epochs)
            for name in (name for name in self.found[0] if name.startswith("optim/")):
                metrics[name] = sum(found[name] for found in self.found) / number
            for n, (sums, found) in enumerate(zip(self.sums, self.found, strict=True), 1):
                names = sorted({*SHOWN, *sums.reported} & found.keys())
                metrics |= {f"minibatch/{n}/{name}": found[name] for name in names}

        speed = sum(sums.counts.num_tokens for sums in self.sums) / seconds
        return metrics | {
            "perf/throughput": speed,
            "perf/throughput_per_gpu": speed / parallel.num_ranks(),
            "time/forward_backward": seconds,
        }


def plan_updates(step: int, num_parts: int, epochs: int) -> list[int]:
    """The minibatch of each optimizer step of a batch."""
    orders = [np.random.default_rng([step, n]).permutation(num_parts) for n in range(1, epochs)]
    return [*range(num_parts), *(int(part) for order in orders for part in order)]
