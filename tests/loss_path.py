"""What the trainer's own loss path makes of scored rollouts: packer, wire, counts, divisors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prime_rl import Algorithm, Rollout, Sample
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire.micro_batch import decode_batch


def rollouts_of(
    rewards: Sequence[float],
    lengths: Sequence[int],
    inference: Sequence[float],
    *,
    group: int = 0,
    first: int = 0,
) -> list[Rollout]:
    """One group. A prompt token, id 0, precedes each rollout's sampled ones, whose ids count up
    from ``first + 1``; ``inference``: log μ of each of them, in this order."""
    found, place = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        ids = range(first + place + 1, first + place + 1 + length)
        sample = Sample(
            token_ids=[0, *ids],
            loss_mask=[False] + [True] * length,
            inference_logprobs=[0.0, *inference[place : place + length]],
            policy_versions=[-1] + [0] * length,
        )
        found.append(
            Rollout(env="test", example_id=0, group_id=group, reward=reward, samples=[sample])
        )
        place += length
    return found


def load_losses(**trainer: Any) -> Components:
    """The losses of a run with these keys of ``[trainer]``. Raises ``ConfigError``."""
    config = TrainerConfig.model_validate({"loss": {"type": "default"}} | trainer)
    losses = Components.load(config, load_plugins(TRAINER_GROUP))
    for name in losses.tables:
        losses[name]
    return losses


def loss_and_slopes(
    algorithm: Algorithm | str,
    rollouts: Sequence[Rollout],
    trainer_logprobs: Sequence[float],
    losses: Components,
    *,
    capacity: int = 64,
    **columns: Sequence[float],
) -> tuple[float, list[float]]:
    """The loss of the step, and its gradient on each sampled token's log π.

    ``trainer_logprobs`` and ``columns`` (``old_logprobs``, ``entropies``, ``initial_logprobs``) are
    by token id, from id 1 on. ``algorithm`` has scored the rollouts; or the name of the loss that
    trains them.
    """
    name = algorithm if isinstance(algorithm, str) else algorithm.action_loss
    for rollout in rollouts:
        stamp(rollout, name, losses)
    (frame,) = batch_frames(batch_to_pack(1, rollouts, losses, capacity), capacity)
    rows = decode_batch(frame)[1]
    leaf = torch.tensor([0.0, *trainer_logprobs], dtype=torch.float64, requires_grad=True)
    table = {n: torch.tensor([0.0, *v], dtype=torch.float64) for n, v in columns.items()}
    if "entropies" in table:
        table["entropies"].requires_grad_()
    counts, total = count_members(rows, losses), torch.zeros((), dtype=torch.float64)
    for micro_batch in rows:
        row = make_row(micro_batch, torch.device("cpu"))
        ids = row.token_ids
        given: dict[str, Any] = {n: values[ids] for n, values in table.items()}
        known = {n: given.pop(n) for n in ("entropies", "old_logprobs") if n in given}
        total = total + row_loss(row, leaf[ids], losses, counts, computed=given, **known).loss
    total.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return total.item(), leaf.grad[1:].tolist()
