"""Bad steps: the samples that may be the reason for a loss or gradient that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prime_rl import TrainerObserver
from prime_rl.wire.micro_batch import MicroBatch

if TYPE_CHECKING:
    import torch

    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.packed_row import PackedRow

NUM_NAMED = 3
"""Samples that a bad step names."""


class BadSteps(TrainerObserver):
    """Names the samples of a bad step that stand out most."""

    name = "bad_steps"

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def bad_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> str:
        """The samples, over all ranks."""
        worst = worst_samples(self._trainer, micro_batches)
        return f"Most conspicuous: {'; '.join(map(str, worst))}."


@dataclass(frozen=True)
class Offender:
    """A sample that may be the reason for a loss or gradient that is not finite."""

    env: str
    rank: int | None
    """None: there is only one."""
    micro_batch: int
    sequence: int
    num_tokens: int
    num_nonfinite: int
    """Values of its logprobs and streams that are not finite."""
    gap: float
    """Largest |log π - log μ| of tokens that compare them."""
    advantage: float
    """Largest by absolute value."""

    @property
    def severity(self) -> tuple[int, float]:
        return self.num_nonfinite, max(self.gap, self.advantage)

    def __str__(self) -> str:
        where = f"micro batch {self.micro_batch}"
        if self.rank is not None:
            where = f"rank {self.rank}, {where}"
        return (
            f"env {self.env!r}, {where}, sequence {self.sequence} "
            f"({self.num_tokens} tokens): {self.num_nonfinite} values not finite, largest "
            f"logprob gap {self.gap:.3g}, largest advantage {self.advantage:.3g}"
        )


def worst_samples(trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> list[Offender]:
    """The samples of a bad step that stand out most, over all ranks. Repeats the forward pass."""
    import torch

    from prime_rl.trainer import context, parallel
    from prime_rl.trainer.packed_row import ratio_tokens

    rank = parallel.rank() if parallel.several_ranks() else None
    offenders: list[Offender] = []
    for number, micro_batch in enumerate(micro_batches):
        with torch.no_grad():
            row, logprobs, *_ = trainer.forward(micro_batch)
        compared = np.zeros(len(micro_batch), np.bool_)
        compared[row.origins[ratio_tokens(row, trainer.losses)]] = True
        offenders += _offenders(
            rank, number, row=row, logprobs=logprobs, micro_batch=micro_batch, compared=compared
        )

    parallel.reshard(trainer.policy)
    gathered = parallel.gather([asdict(offender) for offender in _worst(offenders)])
    return _worst([Offender(**fields) for part in context.one_per_row(gathered) for fields in part])


def _worst(found: Sequence[Offender]) -> list[Offender]:
    return sorted(found, key=lambda each: each.severity, reverse=True)[:NUM_NAMED]


def _offenders(
    rank: int | None,
    number: int,
    row: PackedRow,
    logprobs: torch.Tensor,
    micro_batch: MicroBatch,
    compared: npt.NDArray[np.bool_],
) -> list[Offender]:
    """One record for each sequence that trains anything. ``compared`` [T]: tokens that compare π
    with μ. Columns are in the micro batch's own order."""
    pi = np.empty(len(micro_batch), np.float32)
    mu = micro_batch.inference_logprobs
    pi[row.origins] = logprobs.float().cpu().numpy()
    trained = np.zeros(len(micro_batch), np.bool_)
    trained[row.origins[row.targets.cpu().numpy()]] = True
    bad = ~np.isfinite(pi) | (compared & ~np.isfinite(mu))
    for stream in (micro_batch.advantages, micro_batch.ref_logprobs):
        if stream is not None:
            bad |= ~np.isfinite(stream)

    with np.errstate(invalid="ignore"):
        gap = np.where(compared, np.abs(pi - mu), 0.0)
    advantages = 0.0 if micro_batch.advantages is None else np.abs(micro_batch.advantages)
    figures = np.nan_to_num([gap, np.broadcast_to(advantages, gap.shape)], nan=np.inf)
    bounds = np.cumsum([0, *micro_batch.sequence_lengths])
    offenders = []
    for sequence, env in enumerate(micro_batch.env_ids):
        start, end = bounds[sequence : sequence + 2]
        positions = start + np.flatnonzero(trained[start:end])
        if len(positions):
            largest_gap, largest_advantage = figures[:, positions].max(1).tolist()
            offenders.append(
                Offender(
                    env=micro_batch.envs[env],
                    rank=rank,
                    micro_batch=number,
                    sequence=sequence,
                    num_tokens=int(end - start),
                    num_nonfinite=int(bad[positions].sum()),
                    gap=largest_gap,
                    advantage=largest_advantage,
                )
            )

    return offenders
