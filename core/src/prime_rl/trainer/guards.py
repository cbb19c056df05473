"""What a step that goes wrong says: whose tokens are to blame, and what a slow one waited for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from prime_rl.trainer import parallel
from prime_rl.trainer.row import Row, make_row
from prime_rl.wire.micro_batch import MicroBatch

if TYPE_CHECKING:
    from prime_rl.trainer.loop import Trainer

logger = logging.getLogger(__name__)

SLOW_FACTOR = 10.0
"""A step that takes so many times the median is slow."""
WINDOW = 50
"""Steps the median is of."""
MIN_STEPS = 5
"""Before so many there is no telling what is usual."""
NUM_NAMED = 3
"""Samples a bad step names."""

PARTS = {
    "time/wait_for_batch": "waiting for the orchestrator's batch",
    "time/forward_backward": "forward and backward",
    "time/broadcast_weights": "publishing the weights",
    "time/save_ckpt": "handing over a checkpoint",
}
"""Where a step's time can go, and how to say it. A checkpoint waits for the one before it."""


class SlowSteps:
    """Knows how long a step usually takes."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._told = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to say of a step that took ``SLOW_FACTOR`` times the median; None: nothing."""
        seconds, usual = metrics["time/step"], self._usual
        self._seconds.append(seconds)
        if usual is None or seconds < SLOW_FACTOR * usual:
            return None
        parts = sorted(((metrics.get(name, 0.0), text) for name, text in PARTS.items()))
        spent = ", ".join(f"{took:.1f} s {text}" for took, text in reversed(parts))
        return f"step {step} took {seconds:.1f} s, the median is {usual:.1f} s: {spent}"

    def waiting(self, step: int, seconds: float) -> None:
        """The batch of ``step`` has been awaited for so long. What takes longer than it should is
        said once, while it lasts: nobody knows whether it will ever end."""
        usual = self._usual
        if usual is None or seconds < SLOW_FACTOR * usual or self._told == step:
            return
        self._told = step
        logger.warning(
            "step %d: waiting for the orchestrator's batch for %.1f s, and a step takes %.1f s "
            "(median). Its status and log say what it waits for.",
            *(step, seconds, usual),
        )

    @property
    def _usual(self) -> float | None:
        return median(self._seconds) if len(self._seconds) >= MIN_STEPS else None


@dataclass(frozen=True)
class Offender:
    """A sample that may be why a step's loss or gradient is not finite."""

    env: str
    rank: int
    micro_batch: int
    sequence: int
    num_tokens: int
    num_nonfinite: int
    """Of its logprobs and streams."""
    gap: float
    """Largest |log π - log μ| of the tokens that compare them."""
    advantage: float
    """Largest in size."""

    @property
    def severity(self) -> tuple[int, float]:
        return self.num_nonfinite, max(self.gap, self.advantage)

    def __str__(self) -> str:
        where = f"micro batch {self.micro_batch}"
        if parallel.several_ranks():
            where = f"rank {self.rank}, {where}"
        return (
            f"env {self.env!r}, {where}, sequence {self.sequence} "
            f"({self.num_tokens} tokens): {self.num_nonfinite} values not finite, largest "
            f"logprob gap {self.gap:.3g}, largest advantage {self.advantage:.3g}"
        )


def worst_samples(trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> list[Offender]:
    """The samples of a bad step that stand out most, over all ranks. Runs their forward once
    more."""
    found: list[Offender] = []
    for number, micro_batch in enumerate(micro_batches):
        row = make_row(micro_batch, trainer.device, share=trainer.share_prompts)
        with torch.no_grad(), trainer.autocast():
            logprobs, _ = trainer.policy(row)
        found += _offenders(number, row, logprobs, micro_batch)
    parallel.reshard(trainer.policy)
    # Ranked here: each rank tells of no more than can be named.
    told = parallel.gather([asdict(offender) for offender in _worst(found)])
    return _worst([Offender(**fields) for part in told for fields in part])


def _worst(found: Sequence[Offender]) -> list[Offender]:
    return sorted(found, key=lambda each: each.severity, reverse=True)[:NUM_NAMED]


def _offenders(
    number: int, row: Row, logprobs: torch.Tensor, micro_batch: MicroBatch
) -> list[Offender]:
    """Of each sequence of one row that trains anything, in the micro batch's own order."""
    mask = np.zeros(len(row.token_ids), np.bool_)
    mask[row.targets.cpu().numpy()] = True
    compared = np.zeros_like(mask)
    compared[row.ratio_tokens] = True
    pi, mu = (x.float().cpu().numpy() for x in (logprobs, row.inference_logprobs))
    streams = [
        np.abs(stream.float().cpu().numpy())
        for stream in (row.advantages, row.ref_logprobs)
        if stream is not None
    ]
    bad = ~np.isfinite(pi) | (compared & ~np.isfinite(mu))
    for stream in streams:
        bad |= ~np.isfinite(stream)
    with np.errstate(invalid="ignore"):
        gap = np.where(compared, np.abs(pi - mu), 0.0)
    advantage = streams[0] if row.advantages is not None else np.zeros_like(pi)
    ids, ends = row.sequence_ids.cpu().numpy(), np.cumsum(micro_batch.sequence_lengths)
    found = []
    for sequence in np.unique(ids[mask]).tolist():
        own = mask & (ids == sequence)
        found.append(
            Offender(
                env=row.envs[row.sequence_envs[sequence]],
                rank=parallel.rank(),
                micro_batch=number,
                sequence=int(np.searchsorted(ends, row.origins[own][0], side="right")),
                num_tokens=row.lengths[sequence],
                num_nonfinite=int(bad[own].sum()),
                gap=float(np.nan_to_num(gap[own], nan=np.inf).max()),
                advantage=float(np.nan_to_num(advantage[own], nan=np.inf).max()),
            )
        )
    return found
