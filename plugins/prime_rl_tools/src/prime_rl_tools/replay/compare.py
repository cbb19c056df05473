"""Compare a replay with the run: credit per rollout, and frames byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.balance import ATTENTION_FLOPS
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_optimizer
from prime_rl.rollout import Rollout, Sample
from prime_rl.streams import FloatColumn, stream, stream_names
from prime_rl_app.saved_rollouts import FrameDigest, StoredStep
from prime_rl_tools.replay.host import losses_of
from prime_rl_tools.replay.score import Replayed, Scored


def frames_of(
    config: RunConfig, step: int, kept: Sequence[Rollout], num_ranks: int = 1
) -> list[bytes]:
    """Pack a batch as the loop does: one frame per trainer rank."""
    # A run of an earlier version has samples that were cut when they were packed.
    limit = config.seq_len
    cut = [replace(each, samples=[sample.cut(limit) for sample in each.samples]) for each in kept]
    packing = batch_to_pack(step, cut, losses=losses_of(config), limit=limit)
    trainer = config.trainer
    hooks = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    return batch_frames(
        packing,
        config.row_tokens,
        num_ranks=num_ranks,
        attention_flops=ATTENTION_FLOPS,
        minibatches=trainer.minibatches,
        one_env_per_row=make_optimizer(trainer.optim, hooks).weighs_envs,
    )


@dataclass(frozen=True)
class StepChange:
    """The rollouts that were kept or dropped in one step, under two algorithms."""

    step: int
    num_rollouts: int
    num_kept: int
    num_changed: int
    """Rollouts with a stream that differs in any bit."""
    num_from_file: int
    """Rollouts whose streams were copied: scoring them needs a model, or a sibling that is not
    saved."""
    mean_abs_before: float
    """Mean of |advantage| over trainable tokens."""
    mean_abs_after: float
    sign_flips: int
    """Trainable tokens whose credit changed its sign."""
    zero_before: int
    """Rollouts with zero credit."""
    zero_after: int
    frames_equal: bool | None
    """Every frame that was sent is reproduced byte for byte. None: the file has no digests."""


def change_of(config: RunConfig, replayed: Replayed, step: StoredStep) -> StepChange:
    """Compare one step."""
    pairs = [replayed.of(stored) for stored in step.rollouts]
    before = np.concatenate([credit(p.stored.rollout) for p in pairs] or [np.zeros(0, np.float32)])
    after = np.concatenate([credit(p.again) for p in pairs] or [np.zeros(0, np.float32)])
    return StepChange(
        step=step.step,
        num_rollouts=len(pairs),
        num_kept=len(step.kept),
        num_changed=sum(not same_streams(p) for p in pairs),
        num_from_file=sum(p.from_file for p in pairs),
        mean_abs_before=float(np.abs(before).mean()) if len(before) else 0.0,
        mean_abs_after=float(np.abs(after).mean()) if len(after) else 0.0,
        sign_flips=int((before * after < 0).sum()),
        zero_before=sum(not credit(p.stored.rollout).any() for p in pairs),
        zero_after=sum(not credit(p.again).any() for p in pairs),
        frames_equal=_frames_equal(config, replayed, step),
    )


def _frames_equal(config: RunConfig, replayed: Replayed, step: StoredStep) -> bool | None:
    if not step.frames:
        return None
    made = frames_of(config, step.step, kept=replayed.kept_again(step), num_ranks=len(step.frames))
    return [FrameDigest.of(frame) for frame in made] == step.frames


def credit(rollout: Rollout) -> FloatColumn:
    """Advantages of the trainable tokens, [C]; 0.0 where none were assigned."""
    parts = [
        np.zeros(s.num_trainable_tokens, np.float32)
        if s.advantages is None
        else s.advantages[s.loss_mask]
        for s in rollout.samples
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def same_streams(pair: Scored) -> bool:
    """Whether all streams are equal bit for bit."""
    samples = zip(pair.stored.rollout.samples, pair.again.samples, strict=True)
    return all(
        _same(before, after, name)
        for before, after in samples
        for name in {*stream_names(before), *stream_names(after)}
    )


def _same(before: Sample, after: Sample, name: str) -> bool:
    first = stream(before, name)
    second = stream(after, name)
    if first is None or second is None:
        return first is second
    return bool(first.tobytes() == second.tobytes())


def most_changed(pairs: Sequence[Scored], limit: int) -> list[Scored]:
    """Rollouts whose mean credit changed, the largest change first."""
    moved = [(abs(_mean(pair.again) - _mean(pair.stored.rollout)), pair) for pair in pairs]
    moved = [each for each in moved if each[0] > 0]
    return [pair for _, pair in sorted(moved, key=lambda each: -each[0])[:limit]]


def _mean(rollout: Rollout) -> float:
    values = credit(rollout)
    return float(values.mean()) if len(values) else 0.0
