"""Run the scoring hooks, and stamp what they wrote: from credit to the streams that ship.

score_rollout, observation_weights    when a rollout arrives
score_group                           when its group is complete
score_batch                           when the batch is full, for an env with a plugin that has it
score_envs                            then once for all envs that share an algorithm and settings
stamp                                 then routes the sampled tokens to the algorithm's component
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from prime_rl.errors import ConfigError, StreamError
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.registry.calls import raise_late
from prime_rl.registry.components import (
    Component,
    Components,
    head_required,
    installed_losses,
    names_of,
)
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Group, Rollout, Sample
from prime_rl.streams import (
    STREAMS,
    WEIGHTS,
    LossComponent,
    components,
    members,
    stream,
    stream_names,
)

FACTS = ("reward", "rewards", "metrics", "info")
"""The fields of a rollout that a scoring plugin may change, apart from its streams."""


async def score_rollout(hooks: Hooks, rollout: Rollout) -> None:
    """Rollout-local credit and model I/O, then the ce weights of env-provided tokens."""
    _check_reward(rollout, "Fix the environment's reward function.")
    # Rewards are settled before plugins compare them: rounding would make equal ones differ.
    rollout.settle()
    # Plugins may change these. A saved rollout is scored again by what they were before.
    rollout.given = _facts(rollout)
    await hooks.score_rollout(rollout)

    weighed = zip(rollout.samples, hooks.observation_weights(rollout), strict=True)
    for sample, weights in weighed:
        if weights is not None:
            _merge_ce(rollout, sample, weights)


@contextmanager
def open_for_credit(rollouts: Iterable[Rollout]) -> Iterator[None]:
    """While the code inside runs, hooks may write streams; what they leave behind may not later.
    Raises what was left behind before."""
    raise_late()
    rollouts = [*rollouts]
    for rollout in rollouts:
        rollout.open = True
        # No other thread may write, unless a hook waits for it.
        rollout.opened_by = threading.get_ident()

    try:
        yield
    finally:
        for rollout in rollouts:
            rollout.open = False


def _facts(rollout: Rollout) -> dict[str, Any]:
    facts = {name: getattr(rollout, name) for name in FACTS}
    # The dicts are copied, because plugins change them in place.
    return {name: dict(v) if isinstance(v, dict) else v for name, v in facts.items()}


def _merge_ce(rollout: Rollout, sample: Sample, weights: np.ndarray) -> None:
    if weights[sample.loss_mask].any():
        raise StreamError(
            f"env {rollout.env!r}: observation_weights weighs tokens the policy sampled; expected "
            "0.0 there"
        )

    # A token that several samples have trains once, in the first of them.
    if sample.is_repeat is not None:
        weights = np.where(sample.is_repeat, np.float32(0.0), weights)

    before = sample.ce_weights
    # Several plugins may weigh one token: the largest weight wins, so their order does not matter.
    sample.ce_weights = weights if before is None else np.maximum(before, weights)


async def score_group(hooks: Hooks, group: Group) -> None:
    """Group-relative credit, after ``score_rollout`` of each."""
    for rollout in group:
        _check_reward(rollout, "A plugin's score_rollout has changed it: fix the plugin.")
    await hooks.score_group(group)


async def score_batch(hooks: Hooks, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Score one env's rollouts of a batch, except what was stamped with its group. Returns what it
    scored, to be stamped."""
    # `groupby` joins neighbors only. What is frozen was scored with its group.
    waiting = sorted((each for each in rollouts if not each.frozen), key=attrgetter("group_id"))
    if waiting:
        await hooks.score_batch(in_groups(waiting))
    return waiting


async def score_envs(hooks: Hooks, waiting: Mapping[str, Sequence[Rollout]]) -> None:
    """Score what ``score_batch`` returned for each of the envs that share an algorithm. ``hooks``:
    the plugins in the scope of the first env."""
    batches = {env: in_groups(rollouts) for env, rollouts in waiting.items() if rollouts}
    if batches:
        await hooks.score_envs(batches)


def in_groups(rollouts: Sequence[Rollout]) -> list[Group]:
    """Rollouts in the order of ``group_id``, by group."""
    return [[*group] for _, group in groupby(rollouts, attrgetter("group_id"))]


def sharing(algorithms: Mapping[str, Algorithm]) -> list[list[str]]:
    """The envs of one class of algorithm with equal settings, together, in the order of the config.
    ``algorithms``: one for each env."""
    parts: list[list[str]] = []
    for env, algorithm in algorithms.items():
        for part in parts:
            first = algorithms[part[0]]
            if type(first) is type(algorithm) and first.config == algorithm.config:
                part.append(env)
                break
        else:
            parts.append([env])

    return parts


def _check_reward(rollout: Rollout, way_out: str) -> None:
    try:
        is_finite = math.isfinite(rollout.reward)
    except OverflowError:  # an integer that is larger than any float
        is_finite = False

    if not is_finite:
        raise StreamError(
            f"env {rollout.env!r}, example {rollout.example_id}: reward is {rollout.reward!r:.80}, "
            f"expected a finite number. {way_out}"
        )


def stamp(rollout: Rollout, action_loss: LossComponent, losses: Components | None = None) -> None:
    """Route sampled tokens to ``action_loss`` and freeze the streams.

    rl ships no weight stream: absent means 1.0 on every trainable token. The other components get
    1.0 on the trainable tokens and take them out of rl. A rollout that another component trains
    leaves the one that its advantages drive if all of them are zero: its tokens would only dilute
    the others' mean. (The filters drop a rollout that trains nowhere else.) Weights that the
    algorithm has assigned stay as they are. ``losses``: None for all that are installed. Raises
    ``StreamError`` for tokens without a stream that their loss reads, and, given ``losses``, for a
    stream that none of them reads.
    """
    # Saved rollouts need the original facts only where a plugin has changed them.
    if rollout.given is not None and _is_untouched(rollout, rollout.given):
        rollout.given = None

    rollout.credited = "rl"
    if action_loss != "rl":
        for sample in rollout.samples:
            _route(rollout, sample, action_loss)

    # The columns are checked first, because the checks below compute with them.
    _check_columns(rollout)
    trained = _check_complete(rollout, losses or installed_losses())
    # If the action loss reads advantages, they drive it, and not rl.
    if action_loss in trained and "advantages" in trained[action_loss].required:
        rollout.credited = action_loss
    if losses is not None:
        _check_read(rollout, action_loss, losses)

    if (
        rollout.credited == action_loss
        and f"{action_loss}{WEIGHTS}" not in rollout.assigned
        and rollout.advantages is not None
        and not rollout.has_credit
        and rollout.trains_beside_rl
    ):
        for sample in rollout.samples:
            sample.set_stream(f"{action_loss}{WEIGHTS}", np.zeros(len(sample), np.float32))

    rollout.freeze()


def _is_untouched(rollout: Rollout, given: Mapping[str, Any]) -> bool:
    """Whether no plugin has changed a fact. Compares identities: ``info`` may hold arrays."""
    now = _facts(rollout)
    if now["reward"] != given["reward"]:
        return False

    for name in FACTS[1:]:
        before = given[name]
        if now[name].keys() != before.keys():
            return False
        if any(value is not before[key] for key, value in now[name].items()):
            return False

    return True


def _check_columns(rollout: Rollout) -> None:
    """Raises ``StreamError`` for a column that was written without ``rollout.assign_...`` and does
    not fit: nothing else looks at each value before the trainer."""
    for index, sample in enumerate(rollout.samples):
        for name in stream_names(sample):
            column = stream(sample, name)
            problem = ""
            if not isinstance(column, np.ndarray) or column.dtype not in (np.float32, np.int32):
                problem = f"is {getattr(column, 'dtype', type(column).__name__)}"
            elif column.dtype == np.int32 and name in STREAMS:
                problem = "is int32"
            elif column.shape[:1] != (len(sample),):
                problem = f"has the shape {column.shape} for {len(sample)} tokens"
            elif not np.isfinite(column).all():
                problem = f"has the value {column[~np.isfinite(column)].flat[0]}"

            if problem:
                raise StreamError(
                    f"env {rollout.env!r}, group {rollout.group_id}: {name} of sample {index} "
                    f"{problem}, expected one finite float32 or int32 per token. Write it by "
                    "rollout.assign_...(), which checks it."
                )


def _route(rollout: Rollout, sample: Sample, component: LossComponent) -> None:
    name = f"{component}{WEIGHTS}"
    if name not in rollout.assigned:
        weights = sample.loss_mask.astype(np.float32)
        before = stream(sample, name)
        if before is not None:
            # Tokens of others, such as observations, keep what the algorithm gave them.
            weights = np.where(sample.loss_mask, weights, before)
        sample.set_stream(name, weights)

    # The tokens leave rl, unless the algorithm has weighed rl itself.
    if "rl_weights" not in rollout.assigned:
        sample.rl_weights = np.zeros(len(sample), np.float32)


def _check_complete(rollout: Rollout, losses: Components) -> dict[LossComponent, Component]:
    """The components that tokens train in. Raises ``StreamError`` unless their members have what
    the loss, and the heads that it reads, need."""
    where = f"env {rollout.env!r}, group {rollout.group_id}"
    trained = [
        (sample, name)
        for sample in rollout.samples
        for name in components(sample)
        if members(sample, name).any()
    ]

    # The lookup raises if no installed plugin has this component.
    for _, name in trained:
        try:
            losses[name]
        except ConfigError as error:
            raise StreamError(f"{where}: tokens have {name}_weights. {error}") from error

    written = losses.writers(name for _, name in trained)
    for name, head in written.items():
        if any(stream(sample, name) is not None for sample in rollout.samples):
            raise StreamError(
                f"{where}: {name} were assigned, and the trainer's head {head.name!r} writes them "
                "for this rollout. Leave them to it, or its table [trainer.heads] out."
            )

    for sample, name in trained:
        component = losses[name]
        # A stream may be required by the loss itself, or by a head whose output it reads.
        reads = dict.fromkeys(component.required, "which")
        for head in component.read_heads:
            reads |= dict.fromkeys(head_required(head), f"whose head {head.name!r}")

        for required in reads.keys() - written.keys():
            if stream(sample, required) is None:
                raise StreamError(
                    f"{where}: tokens train in the {name} component, {reads[required]} reads "
                    f"{required!r}, but no {required} were assigned. Assign them in score_rollout "
                    "or score_group (rollout.assign_stream), set another action_loss, or add the "
                    "head that gives them ([trainer.heads.<name>])."
                )

        _check_sampled(rollout, sample, component)

    return {name: losses[name] for _, name in trained}


def _check_sampled(rollout: Rollout, sample: Sample, component: Component) -> None:
    """Raises ``StreamError`` if a loss that compares with the sampler cannot do so."""
    where = f"env {rollout.env!r}, group {rollout.group_id}"
    name = component.name
    if not component.cls.compares_with_sampler:
        return

    if members(sample, name)[~sample.loss_mask].any():
        raise StreamError(
            f"{where}: {name}_weights weigh tokens that the policy did not sample, which have no "
            "sampling logprob to compare with; expected 0.0 there"
        )

    if not rollout.has_logprobs:
        raise StreamError(
            f"{where}: tokens train in the {name} component, which compares with sampling "
            f"logprobs, and their source ({rollout.source!r}) gave none. Use an algorithm that "
            "imitates."
        )


def _check_read(rollout: Rollout, action_loss: LossComponent, losses: Components) -> None:
    """Raises ``StreamError`` for a stream that no loss of the rollout reads."""
    names = {action_loss, *(name for s in rollout.samples for name in components(s))}
    read_by = {name: [*losses[name].streams] for name in sorted(names) if name in losses}
    for name, streams in read_by.items():
        for head in losses[name].read_heads:
            streams += names_of(head.reads)

    written = {name for sample in rollout.samples for name in sample.streams}
    unread = written.difference(*read_by.values())
    for name in sorted(unread):
        if not name.endswith(WEIGHTS):  # core itself reads the weights of each component
            reads = "; ".join(
                f"{loss} reads {', '.join(streams)}" for loss, streams in read_by.items() if streams
            )
            raise StreamError(
                f"env {rollout.env!r}, group {rollout.group_id}: no loss of these tokens reads the "
                f"stream {name!r} ({reads}). Fix the name, or choose a loss that reads it."
            )
