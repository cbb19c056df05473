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

import numpy as np
import torch
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.registry.calls import checked_metrics, running
from prime_rl.rundir.status import Status
from prime_rl.trainer import context, parallel
from prime_rl.trainer.device import to_device
from prime_rl.trainer.env_gradients import EnvGradients, rows_by_env
from prime_rl.trainer.expert_balance import ExpertBalance
from prime_rl.trainer.heads import write_streams
from prime_rl.trainer.loss import Counts, count_members, row_loss
from prime_rl.trainer.loss_probe import check_declared
from prime_rl.trainer.metrics import StepMetrics, summarize
from prime_rl.trainer.model import reduce_dtype
from prime_rl.trainer.optim import clip_gradients
from prime_rl.trainer.packed_row import PackedRow, ratio_tokens
from prime_rl.trainer.packing import Ints
from prime_rl.trainer.references import REFERENCES
from prime_rl.trainer.state import TrainerState
from prime_rl.wire.micro_batch import MEASURED, MicroBatch

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

        self.measured = [row for row in rows if row.minibatch == MEASURED]
        # A batch that only measures has one minibatch without rows, whose step is skipped: every
        # batch makes a version.
        numbers = sorted({row.minibatch for row in rows} - {MEASURED}) or [0]
        self.parts = [[row for row in rows if row.minibatch == number] for number in numbers]
        self.counts = [count_members(part, trainer.losses) for part in self.parts]
        self.plan = plan_updates(step, len(self.parts), trainer.config.epochs)

        # The columns that losses of this batch read on any rank: all ranks make the same passes.
        losses = {name for counts in self.counts for name, _ in counts.members}
        for name in sorted(losses):
            check_declared(trainer.losses[name])
        columns = {column for name in losses for column in trainer.losses[name].computed}
        trainer.policy.read = columns  # what forward passes compute beside log π
        # Both are of the weights before the batch's first optimizer step, so the rows of later
        # minibatches go forward before it.
        self.looks_ahead = "old_logprobs" in columns or not columns.isdisjoint(trainer.heads)

        self.balance: ExpertBalance | None = None
        if trainer.config.watches_experts:
            self.balance = ExpertBalance(
                trainer.policy.mixtures,
                trainer.config.balance_loss,
                device=trainer.device,
                has_biases=trainer.policy.routers_have_biases,
                biases=trainer.policy.moving_biases,
            )
        trainer.policy.balance = self.balance

        self.sums: list[StepMetrics] = []
        self.step_metrics: list[dict[str, float]] = []
        """Metrics of each optimizer step."""
        self.num_bad = 0
        self.has_compared = False
        """The first row has run with and without replay."""
        self.old_logprobs: dict[int, Tensor] = {}
        """By ``id()`` of the micro batch, in the order of its ``PackedRow``."""
        self.references: dict[str, dict[int, Tensor]] = {
            name: {} for name in REFERENCES if name in columns
        }
        """The same under earlier weights, by column."""

    def run(self) -> dict[str, float]:
        """Take all of them. Returns the batch's metrics. Raises ``RunError`` (see
        ``Trainer.train_step``)."""
        trainer = self.trainer
        seconds = 0.0
        started = time.perf_counter()
        metrics: dict[str, float] = {}

        # Before any optimizer step: later minibatches compare with the same earlier weights, which
        # are exchanged for the policy's once per column.
        for column in self.references:
            self.look_back(column)

        if self.looks_ahead:
            with torch.no_grad():  # the rows of the first minibatch go forward before any change
                for micro_batch in (row for part in self.parts[1:] for row in part):
                    row, logprobs, _, heads = trainer.forward(micro_batch)
                    self.look_ahead(micro_batch, row, logprobs=logprobs, computed=heads)
            parallel.reshard(trainer.policy)

        for part in self.plan:
            sums, weighed = self.forward_backward(self.parts[part], self.counts[part])
            norms = self.clip()
            if self.balance is not None:
                self.balance.end_step()
            seconds += time.perf_counter() - started  # the norm waited for the device

            minibatch = sums.result() | norms | weighed
            # The norm is over all ranks, so that all of them skip the step or none does.
            numbers = (*norms.values(), minibatch["loss/mean"])
            bad = not all(math.isfinite(number) for number in numbers)
            minibatch["optim/skipped"] = float(bad or not sums.counts.members)
            self.num_bad += bad
            self.sums.append(sums)
            self.step_metrics.append(minibatch)

            # Before the optimizer step: an observer may look at the gradients.
            if len(self.sums) == len(self.plan):
                metrics = self.metrics(seconds)
                for observer in trainer.observers:
                    more = observer.step_trained(self.step, metrics)
                    metrics |= checked_metrics(more, observer, "step_trained")

            self.optimizer_step(self.parts[part], bad)
            started = time.perf_counter()

        # The metric is the share of the batch's optimizer steps that were skipped. 1: all of them.
        rate = 0.0 if metrics["optim/skipped"] == 1 else trainer.learning_rate(self.step)
        return metrics | {"optim/lr": rate} | self.measure()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The loss of the rows that do not train, under the weights after this step. All ranks have
        equally many of them."""
        if not self.measured:
            return {}

        trainer = self.trainer
        counts = count_members(self.measured, trainer.losses)
        losses = {name for name, _ in counts.members}
        for name in sorted(losses):
            check_declared(trainer.losses[name])
        # The measured rows may use other losses than the batch.
        trainer.policy.read = {each for name in losses for each in trainer.losses[name].computed}

        total = 0.0
        for micro_batch in self.measured:
            row, logprobs, entropies, computed = trainer.forward(micro_batch)
            loss = row_loss(
                row,
                logprobs,
                losses=trainer.losses,
                counts=counts,
                entropies=entropies,
                old_logprobs=None,
                computed=computed,
            )
            total += sum(float(part) for part in loss.parts.values())
        parallel.reshard(trainer.policy)

        # Each part is divided by global counts, so ranks add up. One rank per row counts.
        return {
            "validation/loss": sum(context.one_per_row(parallel.gather(total))),
            "validation/tokens": float(sum(counts.members.values())),
        }

    def clip(self) -> dict[str, float]:
        """Clip the gradient of the policy, and that of each head separately. Returns their norms
        before clipping, by metric."""
        bound = self.trainer.config.optim.max_norm
        if self.trainer.weighing is None:  # else of each env, before their products
            self._sum_resident()

        modules = {"optim": self.trainer.model}
        # A critic's large gradient must not shrink the policy's.
        for name, (head, _) in self.trainer.heads.items():
            modules[f"optim/{name}"] = head

        norms = {}
        for name, module in modules.items():
            norm = clip_gradients(module.parameters(), bound)
            norms[f"{name}/grad_norm"] = float(parallel.full(norm))
        return norms

    def _sum_resident(self) -> None:
        """Sum the gradients of experts to which tokens travel over the replicas. FSDP has summed
        the others in the backward pass."""
        parallel.sum_over_replicas(
            (weight.grad for weight in self.trainer.policy.resident),
            dtype=reduce_dtype(self.trainer.config),
        )

    @torch.no_grad()
    def look_back(self, column: str) -> None:
        """Compute a column of ``references`` for all rows."""
        policy = self.trainer.policy
        read = policy.read
        policy.read = ()  # the pass computes logprobs alone

        with self.trainer.references.within(column):
            for micro_batch in (row for part in self.parts for row in part):
                # Other weights choose other experts: theirs are their routers' own.
                _, logprobs, *_ = self.trainer.forward(micro_batch, with_replay=False)
                self.references[column][id(micro_batch)] = logprobs
            parallel.reshard(policy)
        # Later passes need the columns that the losses of the batch read.
        policy.read = read

    def look_ahead(
        self, micro_batch: MicroBatch, row: PackedRow, logprobs: Tensor, computed: dict[str, Tensor]
    ) -> PackedRow:
        """At its first forward pass of the batch: keep the logprobs of a row, and write the streams
        of heads. The row with them."""
        # In a later epoch the row's values from the batch's start are kept already.
        if id(micro_batch) in self.old_logprobs or not self.looks_ahead:
            return row

        self.old_logprobs[id(micro_batch)] = logprobs.detach()
        if self.trainer.heads.keys().isdisjoint(computed):
            return row

        columns = {name: column[id(micro_batch)] for name, column in self.references.items()}
        write_streams(micro_batch, row, computed=computed | columns, losses=self.trainer.losses)
        # The columns of the micro batch have changed, so the row is made again.
        return self.trainer.row(micro_batch)

    def forward_backward(
        self, rows: Sequence[MicroBatch], counts: Counts
    ) -> tuple[StepMetrics, dict[str, float]]:
        """Accumulate the gradients of a minibatch's loss; its metrics, and those of the weights of
        envs, where the optimizer weighs them."""
        trainer = self.trainer
        metrics = StepMetrics(counts)

        if self.balance is not None:
            self.balance.num_tokens = counts.num_tokens
        if trainer.weighing is None:
            self.accumulate(rows, metrics, range(len(rows)))
            return metrics, {}

        # For each env the ranks exchange gradients once: their products need whole ones.
        gradients = EnvGradients(trainer.model)
        done = 0
        for env, of_env in rows_by_env(rows):
            self.accumulate(rows, metrics, range(done, done + len(of_env)))
            self._sum_resident()
            gradients.keep(env)
            done += len(of_env)

        replicas = trainer.config.dp_replicate
        return metrics, gradients.combine(trainer.weighing, self.step, replicas)

    def accumulate(
        self, rows: Sequence[MicroBatch], metrics: StepMetrics, numbers: Sequence[int]
    ) -> None:
        """Add the gradients of some rows, into ``metrics`` too. ``numbers``: which of the
        minibatch's ``rows``, in order; after the last, ranks have what they share."""
        trainer = self.trainer
        counts = metrics.counts

        for number in numbers:
            micro_batch = rows[number]
            if self.status is not None:
                progress = (len(self.sums) + number / len(rows)) / len(self.plan)
                self.status.report("training", progress=progress, step=self.step)

            row, logprobs, entropies, computed = trainer.forward(micro_batch)
            row = self.look_ahead(micro_batch, row, logprobs=logprobs, computed=computed)
            old = self.old_logprobs.get(id(micro_batch))
            for name, column in self.references.items():
                computed[name] = column[id(micro_batch)]

            # The counts are the minibatch's: each row's share is final, and shares add up.
            loss = row_loss(
                row,
                logprobs,
                losses=trainer.losses,
                counts=counts,
                entropies=entropies,
                old_logprobs=old,
                computed=computed,
            )
            # Gradients add up on each rank. Only after the last row do the ranks exchange them.
            parallel.begin_backward(
                trainer.policy,
                last=number == numbers[-1],
                keeps_gathered=trainer.policy.keeps_gathered,
            )
            torch.autograd.backward(loss.loss * context.share_of_loss())

            logprobs = logprobs.detach()
            entropies = entropies.detach()
            compared = ratio_tokens(row, trainer.losses)
            metrics.observe(row, logprobs, entropies=entropies, loss=loss, compared=compared)

            if trainer.config.router_replay:
                self.observe_routers(metrics, micro_batch, logprobs=logprobs, compared=compared)

            for observer in trainer.observers:
                with running(observer.name, hook="row_trained", owner=observer):
                    observer.row_trained(
                        self.step,
                        micro_batch=micro_batch,
                        row=row,
                        logprobs=logprobs,
                        entropies=entropies,
                        calls=loss.calls,
                    )

    @torch.no_grad()
    def observe_routers(
        self, metrics: StepMetrics, micro_batch: MicroBatch, logprobs: Tensor, compared: Ints
    ) -> None:
        """The share of replayed choices that are not the routers' own; and at the first row of the
        batch, which runs once more for it, what replay does to the gap between π and μ."""
        replay = self.trainer.replay
        if replay is not None:
            flipped, replayed = replay.flips
            metrics.add_mean("router/flipped", context.total(flipped), context.total(replayed))

        if self.has_compared:
            return

        self.has_compared = True

        # One row is enough to see the gap, and costs one forward pass for each batch.
        read = self.trainer.policy.read
        self.trainer.policy.read = ()
        row, own, *_ = self.trainer.forward(micro_batch, with_replay=False)
        parallel.reshard(self.trainer.policy)
        self.trainer.policy.read = read

        at = to_device(compared, np.int64, own.device)
        number = at.new_full((), len(at))
        for name, column in (("replayed", logprobs), ("own", own)):
            log_ratio = column[at] - row.inference_logprobs[at]
            # k3 of KL(μ || π), as in the metrics of the step, so that they can be compared.
            mismatch_kl = (log_ratio.expm1() - log_ratio).sum()
            metrics.add_mean(f"router/mismatch_kl_{name}", mismatch_kl, number)

    def optimizer_step(self, rows: Sequence[MicroBatch], bad: bool) -> None:
        """Take the optimizer step, or skip it and log why."""
        trainer = self.trainer
        step = self.step
        is_skipped = bool(self.step_metrics[-1]["optim/skipped"])
        if not is_skipped:  # otherwise momentum and weight decay would move weights
            for optimizer in trainer.optimizers:
                # A head may have a learning rate of its own. It follows the same schedule.
                scale = optimizer.defaults["lr"] / trainer.config.optim.lr
                for group in optimizer.param_groups:
                    group["lr"] = trainer.learning_rate(step) * scale
                optimizer.step()
            if self.balance is not None and trainer.config.balance_bias:
                self.balance.move_biases(trainer.config.balance_bias)

        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)  # memory for one more forward pass
        # A finite step ends the series of bad ones. `report_bad_step` counts this one.
        trainer.num_bad_steps = trainer.num_bad_steps if bad else 0

        where = f"step {step}"
        fate = f"version {step} has the weights of version {step - 1}"
        if len(self.plan) > 1:
            where += f", optimizer step {len(self.sums)} of {len(self.plan)}"
            fate = "the others go on"

        if bad:
            self.report_bad_step(rows, where, fate)
        elif is_skipped:
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
        metrics = self.step_metrics[-1]
        norm = metrics["optim/grad_norm"]
        loss = metrics["loss/mean"]
        reason = f"{where}: the gradient norm is {norm}, the loss {loss}. "

        for observer in trainer.observers:
            sentences = observer.bad_step(self.step, rows)
            if sentences:
                reason += f"{sentences} "

        # A batch counts once, and only if none of its optimizer steps was finite.
        trainer.num_bad_steps += self.num_bad == len(self.plan)
        # A run that is shorter than the limit fails too, if none of its steps was finite.
        if trainer.num_bad_steps >= min(trainer.config.max_bad_steps, trainer.max_steps):
            none = ""
            if trainer.num_bad_steps == trainer.max_steps:
                none = ", and no step of the run was"
            raise RunError(
                f"{reason}That was the {trainer.num_bad_steps}. step in a row that is not finite"
                f"{none} (trainer.max_bad_steps). The weights of version {self.step - 1} are "
                "intact. Lower trainer.optim.lr, or check whether logprob_gap/max grows."
            )

        logger.error("%sNo optimizer step; %s.", reason, fate)

    def metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of the batch: those of its optimizer step; of several steps, over all of them,
        with ``minibatch/N/...`` for each."""
        metrics = dict(self.step_metrics[0])
        number = len(self.step_metrics)
        if number > 1:
            metrics = summarize(self.sums, self.trainer.config.epochs)
            # Norms and skips belong to one optimizer step each, so they are averaged.
            for name in self.step_metrics[0]:
                if name.startswith("optim/") and not name.startswith("optim/env_"):
                    metrics[name] = sum(each[name] for each in self.step_metrics) / number

            of_envs = {n for each in self.step_metrics for n in each if n.startswith("optim/env_")}
            for name in sorted(of_envs):  # an env may be in some minibatches only
                values = [each[name] for each in self.step_metrics if name in each]
                metrics[name] = sum(values) / len(values)

            steps = zip(self.sums, self.step_metrics, strict=True)
            for n, (sums, minibatch) in enumerate(steps, start=1):
                for name in sorted({*SHOWN, *sums.reported} & minibatch.keys()):
                    metrics[f"minibatch/{n}/{name}"] = minibatch[name]

        if self.balance is not None:
            metrics |= self.balance.metrics()

        speed = sum(sums.counts.num_tokens for sums in self.sums) / seconds
        return metrics | {
            "perf/throughput": speed,
            "perf/throughput_per_gpu": speed / parallel.num_ranks(),
            "time/forward_backward": seconds,
        }


def plan_updates(step: int, num_parts: int, epochs: int) -> list[int]:
    """The minibatch of each optimizer step of a batch."""
    # Seeded by step and epoch alone: a resumed run takes the same order.
    orders = [np.random.default_rng([step, n]).permutation(num_parts) for n in range(1, epochs)]
    return [*range(num_parts), *(int(part) for order in orders for part in order)]
