"""Does a loss keep what it promises? Checked on rows of the run, with calls of its own.

A mean instead of a sum: let f(A) be the value for the members A, and n their number. A sum over
tokens has f(A) + f(B) = f(A and B). A mean has n_A f(A) + n_B f(B) = (n_A + n_B) f(A and B). One
part is a third of the members, so that both hold for no other values than zeros. The trainer
refuses a mean before it trains (``prime_rl.trainer.loss_probe``), by six tokens of its own; here
are those that six tokens cannot judge, because they need other values or a longer row.

A loss that is not finite though all that it reads is: it gets the same row alone, and its value and
gradient are looked at.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prime_rl import PluginError, TrainerObserver
from prime_rl.registry.calls import Call, running

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl.registry.components import Component, Components
    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.loss import RowLoss
    from prime_rl.trainer.loss_metrics import RecordedCall
    from prime_rl.trainer.packed_row import PackedRow
    from prime_rl.wire.micro_batch import MicroBatch

logger = logging.getLogger("prime_rl.trainer.loss_checks")

TOLERANCE = 1e-3
"""Relative to the sum of the absolute values: rounding of float32 is below 1e-5."""


OTHER_FORWARDS = {"top_logprobs", "initial_logprobs", "ema_logprobs"}
"""Columns that a row's own forward pass does not give."""


class LossChecks(TrainerObserver):
    """Refuses a token-wise loss that is a mean, warns of other losses that are one, and says which
    loss is not finite although its inputs are."""

    name = "loss_checks"

    def started(self, trainer: Trainer, run_dir: object) -> None:
        """Keep the trainer."""
        self._trainer = trainer
        self._checked: set[str] = set()

    def row_trained(
        self,
        step: int,
        *,
        micro_batch: MicroBatch,
        row: PackedRow,
        logprobs: Tensor,
        entropies: Tensor,
        calls: Sequence[RecordedCall],
    ) -> None:
        """Check each loss once, on the first row that tells."""
        losses = self._trainer.losses
        for name in row.shares.keys() - self._checked:
            component = losses[name]
            if not _is_checked(component):
                self._checked.add(name)
                continue

            kind = mean_or_sum(row, name, losses=losses, logprobs=logprobs, entropies=entropies)
            if kind is not None:
                self._checked.add(name)
                self._report(component, kind)

    def _report(self, component: Component, kind: str) -> None:
        """``kind``: that of ``mean_or_sum``."""
        if kind != "mean":
            return
        text = (
            f"{_source(component)} is a mean over its tokens, expected the sum: the trainer "
            "divides by the tokens of the batch, so rows of different lengths get the wrong "
            "weight. Return the sum over loss_mask, or declare what the sum is over "
            "(Loss.normalize_by)."
        )
        if component.scope == "token":
            raise PluginError(text)
        logger.warning("%s", text)

    def bad_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> str:
        """The losses of all ranks that are not finite although all inputs of their rows are
        finite."""
        import torch

        from prime_rl.trainer import parallel

        trainer = self._trainer
        inputs_finite = True
        faulty = set[str]()
        for micro_batch in micro_batches:
            with torch.no_grad():
                row, logprobs, entropies, computed = trainer.forward(micro_batch)
            columns = [*row.streams.values(), row.inference_logprobs, logprobs[row.targets]]
            inputs_finite &= all(bool(torch.isfinite(column).all()) for column in columns)
            if not inputs_finite:  # every rank goes on: a forward pass is of all of them
                continue

            for name in row.shares:
                is_finite = _is_finite(
                    row,
                    name,
                    losses=trainer.losses,
                    logprobs=logprobs,
                    entropies=entropies,
                    computed=computed,
                )
                if not is_finite:
                    faulty.add(_source(trainer.losses[name]))

        parallel.reshard(trainer.policy)
        gathered = parallel.gather((inputs_finite, sorted(faulty)))
        if not all(finite for finite, _ in gathered):
            return ""

        names = sorted({name for _, names in gathered for name in names})
        return "".join(
            f"All that it reads is finite, so the fault is of {name}: its value or its gradient is "
            "not finite."
            for name in names
        )


def _source(component: Component) -> str:
    name = component.loss.name
    return str(Call(name, f"loss {name!r}", owner=component.loss, arguments={}))


def _is_checked(component: Component) -> bool:
    """Whether the loss is a sum over tokens of columns that the observer has."""
    is_over_tokens = component.cls.normalize_by == "tokens"
    is_of_sequences = component.scope in ("token", "sequence")
    reads_others = component.read_heads or component.computed & OTHER_FORWARDS
    return is_over_tokens and is_of_sequences and not reads_others


def mean_or_sum(
    row: PackedRow, name: str, losses: Components, logprobs: Tensor, entropies: Tensor
) -> str | None:
    """``sum``, ``mean`` or ``neither``; None if the row does not tell."""
    import torch

    share = row.shares[name]
    lengths = row.lengths
    sequences = [list(share.sequences)]
    if losses[name].scope == "sequence":
        sequences = [[s] for s in share.sequences]
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).numpy()

    def value(tokens: list[int]) -> float:
        alone = _alone(row, name, tokens=tokens, owners=owners)
        loss = _row_loss(
            alone, name, losses=losses, logprobs=logprobs, entropies=entropies, computed={}
        )
        return float(loss.parts[name])

    for chosen in sequences:
        members = set(chosen)
        tokens = [int(token) for token in share.tokens if owners[token] in members]
        first = len(tokens) // 3
        if not first:
            continue

        with torch.no_grad(), running(LossChecks.name, deque()):  # its metrics are not reported
            whole = value(tokens)
            a = value(tokens[:first])
            b = value(tokens[first:])

        size = TOLERANCE * (abs(whole) + abs(a) + abs(b))
        if not math.isfinite(size) or size == 0:
            continue

        n = len(tokens)
        rest = n - first
        is_sum = abs(a + b - whole) <= size
        is_mean = abs(first * a + rest * b - n * whole) <= n * size
        if is_sum != is_mean:
            return "sum" if is_sum else "mean"
        if not is_sum:
            return "neither"

    return None


def _alone(row: PackedRow, name: str, tokens: Sequence[int], owners: Any) -> PackedRow:
    """The row with these members of one component only."""
    import numpy as np
    import torch

    share = row.shares[name]
    mask = torch.zeros_like(share.mask)
    mask[torch.tensor(tokens, device=mask.device)] = True
    sequences = sorted({int(owners[token]) for token in tokens})
    members = replace(share, mask=mask, sequences=sequences, tokens=np.array(tokens, np.int64))
    return replace(row, shares={name: members})


def _row_loss(
    row: PackedRow,
    name: str,
    losses: Components,
    logprobs: Tensor,
    entropies: Tensor,
    computed: Mapping[str, Tensor],
) -> RowLoss:
    """The loss of the row, divided by 1 whatever its unit."""
    from prime_rl.trainer.loss import Counts, row_loss

    keys = {(name, env): 1 for env in row.envs}
    sizes: Any = defaultdict(lambda: defaultdict(lambda: 1))
    one = {(name, row.envs[0]): 1} if not losses[name].per_env else keys
    counts = Counts(one, 1, units=one, sizes=sizes)
    return row_loss(
        row,
        logprobs,
        losses=losses,
        counts=counts,
        entropies=entropies,
        old_logprobs=None,
        computed=computed,
    )


def _is_finite(
    row: PackedRow,
    name: str,
    losses: Components,
    logprobs: Tensor,
    entropies: Tensor,
    computed: Mapping[str, Tensor],
) -> bool:
    """Whether the loss and the gradient on its inputs are finite."""
    import torch

    inputs = [logprobs, entropies, *computed.values()]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    further = dict(zip(computed, leaves[2:], strict=True))
    alone = replace(row, shares={name: row.shares[name]})
    with torch.enable_grad(), running(LossChecks.name, deque()):
        loss = _row_loss(
            alone, name, losses=losses, logprobs=leaves[0], entropies=leaves[1], computed=further
        ).loss
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)

    values = [loss, *(gradient for gradient in gradients if gradient is not None)]
    return all(bool(torch.isfinite(value).all()) for value in values)
