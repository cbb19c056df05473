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
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from prime_rl import Algorithm, ConfigError, Rollout
from prime_rl.config.orchestrator import PartialGroupsConfig
from prime_rl.errors import PrimeRLError
from prime_rl.orchestrator.packer import batch_to_pack, pack_ranks
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.plugins.algorithm import Host
from prime_rl.plugins.loss import Head, TokenMetric
from prime_rl.registry.calls import logged_metrics
from prime_rl.registry.components import Component, Components
from prime_rl.registry.manager import Hooks, scope
from prime_rl.streams import BoolColumn, members
from prime_rl.trainer.loss import Counts, RowLoss, count_members, row_loss
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.wire import MicroBatch
from prime_rl_devkit.lab.host import reference_logits
from prime_rl_devkit.lab.problem import OTHER_ENV, Floats, Ints, Question, log_softmax
from prime_rl_devkit.verdicts import raised

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
    sampled: BoolColumn
    """[T] the policy's own tokens."""
    allowed: Floats
    """[T] 1.0 where a token may train."""
    size: int


def score_groups(
    algorithm: Algorithm,
    question: Question,
    groups: Sequence[Sequence[int]],
    host: Host,
    per_batch: int = 1,
    partial: PartialGroupsConfig | None = None,
    envs: int = 1,
    example_id: int = 0,
) -> list[list[Rollout]]:
    """Score each of ``groups`` as a batch of its own, sampled by the question's policy; it is one
    group, or ``per_batch`` groups of equal size. ``envs``: with 2, its groups are of two envs in
    turn. Raises ``Refused``.

    ``partial``: as in a run, where a reply takes as long as it has sampled tokens. Of equally long
    ones, the first of the group ends first.

    An algorithm whose credit depends on earlier rollouts starts each group from the same state.
    """

    scored: list[list[Rollout]] = []

    async def run() -> None:
        await algorithm.setup(host)
        hooks = scope(host.env, Hooks(), own=[algorithm])
        state = copy.deepcopy(vars(algorithm)) if algorithm.order_dependent else {}
        for number, members_ in enumerate(groups):
            if algorithm.order_dependent:
                vars(algorithm).clear()
                vars(algorithm).update(copy.deepcopy(state))
            ids = [
                number * per_batch + i * per_batch // len(members_) for i in range(len(members_))
            ]
            names = [host.env, OTHER_ENV][:envs]
            group = [
                question.rollout(k, group_id, example_id, names[group_id % envs])
                for k, group_id in zip(members_, ids, strict=True)
            ]
            parts = [[*same] for _, same in groupby(group, lambda rollout: rollout.group_id)]
            if partial is not None:
                parts = [each for whole in parts for each in divided(whole, partial)]
                group = [rollout for part in parts for rollout in part]
            try:
                for rollout in group:
                    await score_rollout(hooks, rollout)
                for part in parts:
                    await score_group(hooks, part)
                by_env = {name: [part for part in parts if part[0].env == name] for name in names}
                for of_env in by_env.values():
                    await hooks.score_batch(of_env)
                await hooks.score_envs(by_env)
                for rollout in group:
                    stamp(rollout, algorithm.action_loss)
            except (PrimeRLError, ArithmeticError, ValueError, LookupError, TypeError) as error:
                rewards = [round(rollout.reward, 3) for rollout in group]
                if isinstance(error, ConfigError):
                    said = f"refuses a group with rewards {rewards}: ConfigError: {error}"
                else:
                    said = f"fails on a group with rewards {rewards}: {raised(error)}"
                raise Refused(said) from error

            scored.append(group)

        await algorithm.close()

    with logged_metrics():
        asyncio.run(run())  # returns nothing: asyncio makes a text of a result
    return scored


def divided(group: list[Rollout], partial: PartialGroupsConfig) -> list[list[Rollout]]:
    """What a run makes of a group, if each reply takes as long as it has sampled tokens."""
    in_turn = sorted(group, key=lambda rollout: rollout.num_trainable_tokens)
    first = in_turn[: partial.at_least]
    rest = in_turn[partial.at_least :]
    return [first, rest] if rest and partial.rest == "group" else [first]


def pack_groups(
    question: Question, scored: Sequence[Sequence[Rollout]], losses: Components
) -> list[Rows]:
    """The groups in rows of ``PER_ROW``, through the packer."""
    packed = []
    for start in range(0, len(scored), PER_ROW):
        part = scored[start : start + PER_ROW]
        for number, group in enumerate(part):
            for rollout in group:
                rollout.env = f"{number}"
        rollouts = [rollout for group in part for rollout in group]
        packing = batch_to_pack(1, rollouts, losses, limit=1_000)
        (rows,) = pack_ranks(packing, capacity=sum(len(p.sample) for p in packing.pieces))
        (micro_batch,) = rows
        packed.append(_rows(question, micro_batch, losses=losses, size=len(part)))

    return packed


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
        from prime_rl.trainer.heads import ends_of, write_streams

        row = make_row(micro_batch, torch.device("cpu"), with_ends=True)
        assert row.ending is not None
        known_state = state >= 0
        reference = log_softmax(reference_logits(question))[state, tokens * known_state]
        columns = {
            name: torch.tensor(np.where(known_state, reference, 0.0)).float()
            for name in ("initial_logprobs", "ema_logprobs")
        }
        for name, head in losses.heads.items():
            columns[name] = torch.tensor(_head(head, question, state=state, token=tokens)).float()
            columns[ends_of(name)] = torch.zeros(len(row.ending))  # nothing follows a reply
        write_streams(micro_batch, row, columns, losses)
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
        sampled=sampled,
        allowed=allowed.astype(np.float64),
        size=size,
    )


def _head(head: Head, question: Question, state: Ints, token: Ints) -> Floats:
    """[T] what a head gives: the exact expected return of each state, or log π of each token of a
    copy of the policy. Raises ``Refused`` for a head of vectors."""
    if head.gives_vectors:
        raise Refused(
            f"the head {head.name!r} gives several numbers a token, and the lab knows the exact "
            "value of one only, the expected return."
        )
    values = question.values[state]
    if head.gives_logprobs:
        values = np.where(state >= 0, log_softmax(question.logits)[state, token * (state >= 0)], 0)
    return np.where(state >= 0, values, 0.0)


def updates(
    rows: Sequence[Rows],
    losses: Components,
    logits: Floats,
    component: str,
    lag: int = 0,
) -> Updates:
    """The steps of a policy with ``logits``, ``lag`` versions after the one that sampled;
    ``component`` is the one whose divisor counts."""
    parts = [_updates(each, losses, logits=logits, component=component, lag=lag) for each in rows]
    return joined(parts)


def joined(parts: Sequence[Updates]) -> Updates:
    """The updates of all rows, one after the other."""
    names = {name for part in parts for name in part.metrics}
    return Updates(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.divisors for part in parts]),
        off_mask=np.concatenate([part.off_mask for part in parts]),
        metrics={
            name: np.concatenate(
                [part.metrics.get(name, np.full(len(part.steps), np.nan)) for part in parts]
            )
            for name in names
        },
    )


@dataclass(frozen=True, eq=False)
class Slopes:
    """dL/dlogπ of the tokens of some rows, and what else the loss has a gradient in."""

    tokens: Floats
    """[T] of each token's own log-probability."""
    entropies: Floats
    """[T]"""
    top: Floats | None
    """[T, k] of the likeliest tokens of another model in each place, where the loss reads them."""
    top_ids: Ints | None
    """[T, k]"""
    result: RowLoss


def _updates(rows: Rows, losses: Components, logits: Floats, component: str, lag: int) -> Updates:
    slopes = slopes_of(rows, losses, logits=logits, lag=lag)
    divisor = losses[component]
    outside = np.abs(slopes.tokens) * (1 - rows.allowed)
    return Updates(
        steps=steps_of(rows, logits, slopes),
        divisors=divisors_of(rows, divisor),
        off_mask=np.asarray(np.bincount(rows.group, outside, rows.size), np.float64),
        metrics=_metrics(rows, slopes.result),
    )


def divisors_of(rows: Rows, component: Component) -> Floats:
    """[M]"""
    return np.array([rows.counts.divisor(component, f"{n}") for n in range(rows.size)])


def slopes_of(
    rows: Rows, losses: Components, logits: Floats, lag: int, credit: float = 1.0
) -> Slopes:
    """The slopes of the losses where the policy has these ``logits`` and is ``lag`` versions newer
    than the one that sampled. ``credit`` multiplies the advantages."""
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
    for name, head in losses.heads.items():
        computed[name] = _leaf(_head(head, question, state=state, token=token))
    reference = log_softmax(reference_logits(question))[state, token]
    for name in ("initial_logprobs", "ema_logprobs"):
        computed[name] = torch.tensor(np.where(known, reference, 0.0)).float()

    top_ids = None
    top = rows.row.streams.get("top_ids")
    if top is not None:
        top_ids = np.clip(top.numpy(), 0, logits.shape[1] - 1)
        values = np.where(known[:, None], logp[state[:, None], top_ids], 0.0)
        computed["top_logprobs"] = _leaf(values)
        leaves.append(computed["top_logprobs"])

    row = _changed(rows.row, lag, credit)
    result = row_loss(
        row,
        leaf,
        losses=losses,
        counts=rows.counts,
        entropies=entropies,
        old_logprobs=None,
        computed=computed,
    )
    slopes = _slopes(result, leaves)
    return Slopes(
        tokens=slopes[0],
        entropies=slopes[1],
        top=slopes[2] if top is not None else None,
        top_ids=top_ids,
        result=result,
    )


def _changed(row: PackedRow, lag: int, credit: float) -> PackedRow:
    """The row ``lag`` versions later, with ``credit`` times the advantages."""
    streams = dict(row.streams)
    age = streams.get("policy_lag")
    if age is not None:
        streams["policy_lag"] = torch.where(age >= 0, age + lag, age)
    advantages = streams.get("advantages")
    if advantages is not None:
        streams["advantages"] = credit * advantages
    return replace(row, streams=streams)


def steps_of(rows: Rows, logits: Floats, slopes: Slopes) -> Floats:
    """[M, P] the update of the logits that these slopes make."""
    logp = np.where(np.isfinite(logits), log_softmax(logits), 0.0)
    policy = np.where(np.isfinite(logits), np.exp(log_softmax(logits)), 0.0)
    known = rows.state >= 0
    place = rows.group * len(logits) + rows.state
    flat = place * logits.shape[1]
    taken = _sums(rows, logits, at=(flat + rows.token)[known], values=slopes.tokens[known])
    if slopes.top is not None and slopes.top_ids is not None:
        at = flat[:, None] + slopes.top_ids
        taken += _sums(rows, logits, at=at[known].ravel(), values=slopes.top[known].ravel())

    steps = -(taken - taken.sum(2, keepdims=True) * policy)
    if slopes.entropies.any():  # dH/dlogits = -p (log p + H)
        entropy = -(policy * logp).sum(1)
        weights = np.bincount(place[known], slopes.entropies[known], rows.size * len(logits))
        steps += weights.reshape(rows.size, -1, 1) * (policy * (logp + entropy[:, None]))

    return np.asarray(steps.reshape(rows.size, -1))


def _leaf(values: Floats) -> torch.Tensor:
    """As the trainer has them: float32, with a gradient."""
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def _slopes(result: RowLoss, leaves: Sequence[torch.Tensor]) -> list[Floats]:
    gradients = torch.autograd.grad(result.loss, leaves, allow_unused=True)
    return [
        np.zeros(tuple(leaf.shape)) if grad is None else grad.double().numpy()
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]


def _sums(rows: Rows, logits: Floats, at: Ints, values: Floats) -> Floats:
    """[M, S, V]"""
    sums = np.bincount(at, values, rows.size * logits.size)
    return np.asarray(sums.reshape(rows.size, *logits.shape))


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
