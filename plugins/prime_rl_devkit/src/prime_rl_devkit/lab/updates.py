"""What the plugin and the trainer make of groups of replies: the gradient of each group's step.

    score_rollout, score_group, score_batch -> stamp -> packer -> row -> the trainer's loss

All of it is the code that a run uses. Each group is an optimizer step of its own: it becomes an
"env" with ``per_env`` denominators, so one row holds many steps. The trainer's loss gives dL/dlogπ
of every token; the table of logits turns this into the update.

Shapes: M = groups, T = tokens of a row, S = states, V = tokens, P = S * V parameters.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from prime_rl import Algorithm, ConfigError, Rollout
from prime_rl.errors import PrimeRLError
from prime_rl.orchestrator.packer import pack_ranks, packing_of
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.plugins.algorithm import Host
from prime_rl.plugins.loss import TokenMetric
from prime_rl.registry.calls import logged_metrics
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks, scope
from prime_rl.streams import members
from prime_rl.trainer.loss import Counts, RowLoss, count_members, row_loss
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.wire import MicroBatch
from prime_rl_devkit.lab.host import reference_logits
from prime_rl_devkit.lab.problem import Floats, Ints, Question, log_softmax

PER_ROW = 64
"""Groups of one row: enough to share the cost of a row, and few enough for small masks."""


class Refused(Exception):
    """The plugin, or core, raised an error for a group. ``str`` says which and why."""


@dataclass(frozen=True)
class Updates:
    """The steps of several groups."""

    steps: Floats
    """[M, P] the update: minus the gradient of the loss."""
    divisors: Floats
    """[M] what the trainer divided by."""
    off_mask: Floats
    """[M] sum of |dL/dlogπ| on tokens that may not train: the prompt's, and the environment's
    unless a loss that imitates trains them."""
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    """[M] the loss's own ``TokenMetric``s, as means over the tokens of their mask."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some groups, scored and packed. A head gives the exact expected return of each state."""

    question: Question
    row: PackedRow
    counts: Counts
    micro_batch: MicroBatch
    group: Ints
    """[T] number of the group."""
    state: Ints
    """[T]; -1 for a prompt."""
    token: Ints
    allowed: Floats
    """[T] 1.0 where a token may train."""
    size: int


def score_groups(
    algorithm: Algorithm,
    question: Question,
    groups: Sequence[Sequence[int]],
    host: Host,
    per_batch: int = 1,
) -> list[list[Rollout]]:
    """Score each of ``groups`` as a batch of its own, sampled by the question's policy; it is one
    group, or ``per_batch`` groups of equal size. Raises ``Refused``.

    An algorithm whose credit depends on earlier rollouts starts each group from the same state.
    """

    scored: list[list[Rollout]] = []

    async def run() -> None:
        await algorithm.setup(host)
        hooks = scope(host.env, Hooks(), own=[algorithm])
        state = copy.deepcopy(vars(algorithm)) if algorithm.order_dependent else {}
        for number, members_ in enumerate(groups):
            vars(algorithm).update(copy.deepcopy(state))
            ids = [
                number * per_batch + i * per_batch // len(members_) for i in range(len(members_))
            ]
            group = [question.rollout(k, own) for k, own in zip(members_, ids, strict=True)]
            parts = [[*same] for _, same in groupby(group, lambda rollout: rollout.group_id)]
            try:
                for rollout in group:
                    await score_rollout(hooks, rollout)
                for part in parts:
                    await score_group(hooks, part)
                await hooks.score_batch(parts)
                for rollout in group:
                    stamp(rollout, algorithm.action_loss)
            except (PrimeRLError, ArithmeticError, ValueError, LookupError, TypeError) as error:
                rewards = [round(rollout.reward, 3) for rollout in group]
                does = "refuses" if isinstance(error, ConfigError) else "fails on"
                raise Refused(
                    f"{does} a group with rewards {rewards}: {type(error).__name__}: {error}"
                ) from error

            scored.append(group)

        await algorithm.close()

    with logged_metrics():
        asyncio.run(run())  # returns nothing: asyncio makes a text of a result
    return scored


def pack_groups(
    question: Question, scored: Sequence[Sequence[Rollout]], losses: Components
) -> list[Rows]:
    """The groups in rows of ``PER_ROW``, through the packer."""
    found = []
    for start in range(0, len(scored), PER_ROW):
        part = scored[start : start + PER_ROW]
        for number, group in enumerate(part):
            for rollout in group:
                rollout.env = f"{number}"
        rollouts = [rollout for group in part for rollout in group]
        packing = packing_of(1, rollouts, losses, limit=1_000)
        (rows,) = pack_ranks(packing, capacity=sum(len(p.sample) for p in packing.pieces))
        (micro_batch,) = rows
        found.append(_rows(question, micro_batch, losses, len(part)))

    return found


def _rows(question: Question, micro_batch: MicroBatch, losses: Components, size: int) -> Rows:
    row = make_row(micro_batch, torch.device("cpu"))
    tokens = row.token_ids.numpy()
    state = np.full(len(tokens), -1)
    ends = np.cumsum([0, *row.lengths])
    sampled = np.zeros(len(tokens), np.bool_)
    known = {
        reply.tokens: (reply, places[0])
        for reply, places in zip(question.replies, question.places, strict=True)
    }
    for start, end in pairwise(ends.tolist()):
        reply, states = known[tuple(tokens[start + 1 : end].tolist())]
        state[start + 1 : end] = states
        sampled[start + 1 : end] = reply.sampled

    allowed = sampled.copy()
    for name in row.shares:
        if not losses[name].cls.compares_with_sampler:
            allowed |= members(micro_batch, name)[row.origins]

    if losses.heads:
        # Imported here: it imports transformers.
        from prime_rl.trainer.heads import write_streams

        values = torch.tensor(np.where(state >= 0, question.values[state], 0.0)).float()
        write_streams(micro_batch, row, dict.fromkeys(losses.heads, values), losses)
        row = make_row(micro_batch, torch.device("cpu"))

    group = np.array([int(row.envs[env]) for env in row.env_ids])
    return Rows(
        question=question,
        row=row,
        counts=count_members([micro_batch], losses),
        micro_batch=micro_batch,
        group=group,
        state=state,
        token=np.where(state >= 0, tokens, 0),
        allowed=allowed.astype(np.float64),
        size=size,
    )


def updates(
    question: Question,
    rows: Sequence[Rows],
    losses: Components,
    logits: Floats,
    component: str,
) -> Updates:
    """The steps of a policy with ``logits``; ``component`` is the one whose divisor counts."""
    parts = [_updates(each, losses, logits, component) for each in rows]
    names = {name for part in parts for name in part.metrics}
    return Updates(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.divisors for part in parts]),
        np.concatenate([part.off_mask for part in parts]),
        {
            name: np.concatenate(
                [part.metrics.get(name, np.full(len(part.steps), np.nan)) for part in parts]
            )
            for name in names
        },
    )


def _updates(rows: Rows, losses: Components, logits: Floats, component: str) -> Updates:
    logp = np.where(np.isfinite(logits), log_softmax(logits), 0.0)
    policy = np.where(np.isfinite(logits), np.exp(log_softmax(logits)), 0.0)
    entropy = -(policy * logp).sum(1)
    known = rows.state >= 0
    state = rows.state
    token = rows.token
    question = rows.question
    leaf = _leaf(np.where(known, logp[state, token], 0.0))
    entropies = _leaf(np.where(known, entropy[state], 0.0))
    leaves = [leaf, entropies]
    computed = {}
    for name in losses.heads:
        computed[name] = _leaf(np.where(known, question.values[state], 0.0))
    reference = log_softmax(reference_logits(question))[state, token]
    for name in ("initial_logprobs", "ema_logprobs"):
        computed[name] = torch.tensor(np.where(known, reference, 0.0)).float()
    top = rows.row.streams.get("top_ids")
    if top is not None:
        ids = np.clip(top.numpy(), 0, logits.shape[1] - 1)
        computed["top_logprobs"] = _leaf(np.where(known[:, None], logp[state[:, None], ids], 0.0))
        leaves.append(computed["top_logprobs"])

    result = row_loss(rows.row, leaf, losses, rows.counts, entropies, None, computed)
    slopes = _slopes(result, leaves)
    flat = (rows.group * len(logits) + state) * logits.shape[1]
    taken = _sums(rows, logits, (flat + token)[known], slopes[0][known])
    if top is not None:
        at = flat[:, None] + ids
        taken += _sums(rows, logits, at[known].ravel(), slopes[2][known].ravel())

    steps = -(taken - taken.sum(2, keepdims=True) * policy)
    if slopes[1].any():  # dH/dlogits = -p (log p + H)
        own = np.bincount(
            (rows.group * len(logits) + state)[known], slopes[1][known], rows.size * len(logits)
        )
        steps += own.reshape(rows.size, -1, 1) * (policy * (logp + entropy[:, None]))

    divisor = losses[component]
    off_mask = np.bincount(rows.group, np.abs(slopes[0]) * (1 - rows.allowed), rows.size)
    return Updates(
        steps.reshape(rows.size, -1),
        np.array([rows.counts.divisor(divisor, f"{n}") for n in range(rows.size)]),
        np.asarray(off_mask, np.float64),
        _metrics(rows, result),
    )


def _leaf(values: Floats) -> torch.Tensor:
    """As the trainer has them: float32, with a gradient."""
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def _slopes(result: RowLoss, leaves: Sequence[torch.Tensor]) -> list[Floats]:
    found = torch.autograd.grad(result.loss, leaves, allow_unused=True)
    return [
        np.zeros(tuple(leaf.shape)) if grad is None else grad.double().numpy()
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def _sums(rows: Rows, logits: Floats, at: Ints, values: Floats) -> Floats:
    """[M, S, V]"""
    found = np.bincount(at, values, rows.size * logits.size)
    return np.asarray(found.reshape(rows.size, *logits.shape))


def _metrics(rows: Rows, result: RowLoss) -> dict[str, Floats]:
    """[M] means over the tokens of each group."""
    sums: dict[str, Any] = defaultdict(lambda: np.zeros((2, rows.size)))
    for call in result.calls:
        for name, metric in call.outputs.metrics.items():
            if isinstance(metric, TokenMetric):
                mask = metric.mask.numpy()
                group = rows.group[call.tokens][mask]
                values = metric.values.detach().double().numpy()[mask]
                sums[name][0] += np.bincount(group, values, rows.size)
                sums[name][1] += np.bincount(group, minlength=rows.size)

    return {name: both[0] / np.maximum(both[1], 1) for name, both in sums.items()}
