"""Observers of the trainer: they measure and report. Entry-point group ``prime_rl.trainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.loss_metrics import Call
    from prime_rl.trainer.packed_row import PackedRow
    from prime_rl.wire.micro_batch import MicroBatch


class TrainerObserver(Offer):
    """Watches the trainer and changes nothing. Keep ``import torch`` inside the methods.

    Every installed observer is active; ``[trainer.<name>]`` has its settings. All ranks make the
    same calls, in the same order, so that a method may use collectives. Log to a child of
    ``prime_rl.trainer``: then only rank 0 shows it. The trainer's own types may change without
    notice.
    """

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Before the first step."""

    def waiting(self, step: int, seconds: float) -> None:
        """The batch of ``step`` is not there yet; called about once per second."""

    def row_trained(
        self,
        step: int,
        *,
        micro_batch: MicroBatch,
        row: PackedRow,
        logprobs: Tensor,
        entropies: Tensor,
        calls: Sequence[Call],
    ) -> None:
        """A micro batch went forward and backward. ``logprobs``, ``entropies``: [T], tokens of
        ``row``, without gradient. ``calls``: of loss functions. With ``trainer.epochs`` each epoch
        calls this again, with the same ``micro_batch`` object."""

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """All rows of the batch are done; its last optimizer step follows. Returns further metrics:
        rank 0's are recorded."""
        return {}

    def bad_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> str:
        """The optimizer step of these micro batches, a minibatch, is skipped: its loss or gradient
        is not finite. Returns sentences for the log, the same on every rank."""
        return ""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """The version is published, and the checkpoint saved if one is due. ``metrics`` are all of
        the step's; ``time/save_ckpt`` is of its own checkpoint."""
