"""What went wrong in a step: the samples of a bad one, and the time of a slow one."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from prime_rl.trainer import parallel
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.wire.micro_batch import MicroBatch

if TYPE_CHECKING:
    from prime_rl.trainer.loop import Trainer

logger = logging.getLogger(__name__)

SLOW_FACTOR = 10.0
"""A step is slow from this multiple of the median on."""
WINDOW = 50
"""Steps of the median."""
MIN_STEPS = 5
"""Without as many steps there is no median."""
NUM_NAMED = 3
"""Samples that a bad step names."""

PARTS = {
    "time/wait_for_batch": "waiting for the orchestrator's batch",
    "time/forward_backward": "forward and backward",
    "time/broadcast_weights": "publishing the weights",
    "time/save_ckpt": "handing over a checkpoint",
}
"""Parts of a step's time. A checkpoint waits for the one before it."""


class SlowSteps:
    """Warns of steps that take much longer than usual."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._warned = 0

    def observe(self, step: int, metrics: Mapping[str, float], saving: float = 0.0) -> None:
        """After a step, which the checkpoint at its end made ``saving`` seconds longer."""
        seconds, usual = metrics["time/step"] + saving, self._usual
        self._seconds.append(seconds)
        if seconds < SLOW_FACTOR * usual:
            return
        spent = dict(metrics) | {"time/save_ckpt": saving}
        parts = sorted(((spent.get(name, 0.0), text) for name, text in PARTS.items()), reverse=True)
        logger.warning(
            "step %d took %.1f s, the median is %.1f s: %s",
            *(step, seconds, usual, ", ".join(f"{took:.1f} s {text}" for took, text in parts)),
        )

    def waiting(self, step: int, seconds: float) -> None:
        """While the batch of ``step`` is awaited: warns once, as the wait may never end."""
        if seconds < SLOW_FACTOR * self._usual or self._warned == step:
            return
        self._warned = step
        logger.warning(
            "step %d: waiting for the orchestrator's batch for %.1f s, and a step takes %.1f s "
            "(median). Its status and log say what it waits for.",
            *(step, seconds, self._usual),
        )

    @property
    def _usual(self) -> float:
        return median(self._seconds) if len(self._seconds) >= MIN_STEPS else math.inf


@dataclass(frozen=True)
class Offender:
    """A sample that may be the reason for a loss or gradient that is not finite."""

    env: str
    rank: int
    micro_batch: int
    sequence: int
    num_tokens: int
    num_nonfinite: int
    """Of its logprobs and streams."""
    gap: float
    """Largest |log π - log μ| of tokens that compare them."""
    advantage: float
    """Largest by absolute value."""

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
    """The samples of a bad step that stand out most, over all ranks. Repeats the forward pass."""
    found: list[Offender] = []
    for number, micro_batch in enumerate(micro_batches):
        row = make_row(micro_batch, trainer.device, share=trainer.share_prompts)
        with torch.no_grad(), trainer.autocast():
            logprobs, _ = trainer.policy(row)
        found += _offenders(number, row, logprobs, micro_batch)
    parallel.reshard(trainer.policy)
    gathered = parallel.gather([asdict(offender) for offender in _worst(found)])
    return _worst([Offender(**fields) for part in gathered for fields in part])


def _worst(found: Sequence[Offender]) -> list[Offender]:
    return sorted(found, key=lambda each: each.severity, reverse=True)[:NUM_NAMED]


def _offenders(
    number: int, row: PackedRow, logprobs: torch.Tensor, micro_batch: MicroBatch
) -> list[Offender]:
    """Of each sequence that trains anything. Columns are in the micro batch's own order."""
    pi, mu = np.empty(len(micro_batch), np.float32), micro_batch.inference_logprobs
    pi[row.origins] = logprobs.float().cpu().numpy()
    trained, compared = np.zeros((2, len(micro_batch)), np.bool_)
    trained[row.origins[row.targets.cpu().numpy()]] = True
    compared[row.origins[row.ratio_tokens]] = True
    bad = ~np.isfinite(pi) | (compared & ~np.isfinite(mu))
    for stream in (micro_batch.advantages, micro_batch.ref_logprobs):
        if stream is not None:
            bad |= ~np.isfinite(stream)
    with np.errstate(invalid="ignore"):
        gap = np.where(compared, np.abs(pi - mu), 0.0)
    advantages = 0.0 if micro_batch.advantages is None else np.abs(micro_batch.advantages)
    figures = np.nan_to_num([gap, np.broadcast_to(advantages, gap.shape)], nan=np.inf)
    bounds = np.cumsum([0, *micro_batch.sequence_lengths])
    found = []
    for sequence, env in enumerate(micro_batch.env_ids):
        start, end = bounds[sequence : sequence + 2]
        own = start + np.flatnonzero(trained[start:end])
        if len(own):
            largest_gap, largest_advantage = figures[:, own].max(1).tolist()
            found.append(
                Offender(
                    env=micro_batch.envs[env],
                    rank=parallel.rank(),
                    micro_batch=number,
                    sequence=sequence,
                    num_tokens=int(end - start),
                    num_nonfinite=int(bad[own].sum()),
                    gap=largest_gap,
                    advantage=largest_advantage,
                )
            )
    return found
