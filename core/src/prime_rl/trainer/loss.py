"""The loss of one micro batch: components, each divided by its own global count.

    L = sum over components c of  sum_c / N_c

N_c counts the units of the component (``Loss.normalize_by``: tokens, sequences, rollouts, groups)
that have member tokens, over the whole optimizer step: tokens of another component, or of another
micro batch, never dilute it. N is a count and not a sum of weights, which a constant weight would
cancel. With ``per_env`` each env has an N of its own, so that envs do not dilute each other within
a component either::

    L = sum over components and envs of  sum_{component, env} / N_{component, env}

A run may divide a sum over tokens by a larger unit. Then each token weighs 1 / its unit's number of
members: the tokens of a unit are averaged, then the units.

Shapes: T = tokens of the row, S = its sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import PluginError, StreamError
from prime_rl.plugins.loss import LossInputs, LossOutputs
from prime_rl.registry.calls import running
from prime_rl.registry.components import Component, Components
from prime_rl.streams import LossComponent, components, members
from prime_rl.trainer import context, parallel
from prime_rl.trainer.device import to_device
from prime_rl.trainer.loss_metrics import MetricSums, RecordedCall, reduce_calls
from prime_rl.trainer.packed_row import PackedRow, Share
from prime_rl.wire.micro_batch import MicroBatch

Key: TypeAlias = tuple[LossComponent, str]
"""A component and an env."""

FIELDS = frozenset(each.name for each in fields(LossInputs)) - {"streams"}

TAKEN = frozenset(
    {"entropy", "kl_ent_ratio", "logprob_gap", "loss", "mismatch_kl", "optim", "perf"}
    | {"plugin", "policy_lag", "router", "system", "time", "tokens"}
)
"""First parts of the names of the trainer's own metrics, which a loss must not use."""


@dataclass(frozen=True)
class Counts:
    """The loss's denominators: members of one optimizer step, over all ranks."""

    members: Mapping[Key, int]
    """Tokens by component and env; only those that have any."""
    num_tokens: int
    """All tokens of all rows, members or not."""
    units: Mapping[Key, int] = field(default_factory=dict)
    """Sequences, rollouts or groups with members, where a component counts them."""
    sizes: Mapping[Key, Mapping[int, int]] = field(default_factory=dict)
    """Member tokens of each rollout or group, by its id in the batch."""

    @property
    def totals(self) -> dict[LossComponent, int]:
        """Members of each component, over all envs."""
        totals: Counter[LossComponent] = Counter({"rl": 0})
        for (name, _), number in self.members.items():
            totals[name] += number
        return dict(totals)

    def divisor(self, component: Component, env: str | None) -> float:
        """N of a component; ``env``: that env's own."""
        if component.unit == "constant":
            return component.constant or 1.0

        numbers = self.members if component.unit == "tokens" else self.units
        if env is not None:
            # At least 1: the sum of a part without members is 0, and 0 / 0 would poison the step.
            return max(numbers.get((component.name, env), 0), 1)
        return max(sum(n for (name, _), n in numbers.items() if name == component.name), 1)

    def metrics(self) -> dict[str, float]:
        """``tokens/<component>``, and ``tokens/<component>/<env>`` where there are any."""
        totals = {f"tokens/{name}": float(number) for name, number in self.totals.items()}
        by_env = {f"tokens/{name}/{env}": float(n) for (name, env), n in self.members.items()}
        return totals | by_env


def count_members(micro_batches: Sequence[MicroBatch], losses: Components) -> Counts:
    """The counts of a step, over all its micro batches and all ranks: one exchange per step."""
    tokens: Counter[Key] = Counter()
    sequences: Counter[Key] = Counter()
    sizes: defaultdict[Key, Counter[int]] = defaultdict(Counter)

    for row in micro_batches:
        for key, of_env in _members_by_env(row):
            tokens[key] += int(of_env.sum())
            sequences[key] += int((of_env > 0).sum())

            # A rollout or group may lie in several sequences, rows and ranks.
            name, _ = key
            unit = losses[name].unit
            if unit in ("rollouts", "groups"):
                ids = unit_ids(row, f"{unit[:-1]}_ids")
                for sequence in of_env.nonzero()[0]:
                    sizes[key][int(ids[sequence])] += int(of_env[sequence])

    # The denominators are those of the whole step: every rank needs the others' counts before its
    # first backward pass.
    sent = [(*key, tokens[key], sequences[key], [*sizes[key].items()]) for key in tokens]
    parts = context.one_per_row(parallel.gather((sent, sum(map(len, micro_batches)))))

    tokens = Counter()
    sequences = Counter()
    sizes = defaultdict(Counter)
    for entries, _ in parts:
        for name, env, more_tokens, more_sequences, more_sizes in entries:
            tokens[name, env] += more_tokens
            sequences[name, env] += more_sequences
            sizes[name, env].update(dict(more_sizes))

    # Ids are those of the batch, so a rollout that lies on two ranks counts once.
    units = {key: len(sizes[key]) or number for key, number in sequences.items()}
    return Counts(tokens, sum(num_tokens for _, num_tokens in parts), units=units, sizes=sizes)


def _members_by_env(row: MicroBatch) -> Iterator[tuple[Key, npt.NDArray[np.int64]]]:
    """The member tokens of each sequence, [S], by component and env; only those that have any."""
    # On the host, from the packed columns: a count on the device would wait for it.
    owners = np.repeat(np.arange(row.num_sequences), row.sequence_lengths)
    for name in components(row):
        numbers = np.bincount(owners[members(row, name)], minlength=row.num_sequences)
        for env in np.unique(row.env_ids[numbers > 0]).tolist():
            yield (name, row.envs[env]), np.where(row.env_ids == env, numbers, 0)


def unit_ids(row: MicroBatch, name: str) -> Any:
    """[S] ``rollout_ids`` or ``group_ids``. Raises ``StreamError`` if the batch has none."""
    ids = getattr(row, name)
    if ids is None:
        raise StreamError(
            f"micro batch (envs: {', '.join(row.envs)}): a loss or head needs {name}, and the "
            "orchestrator sent none. Both sides must run with the same config and plugins."
        )
    return ids


@dataclass
class RowLoss:
    """What one micro batch contributes to the step."""

    loss: Tensor
    """0-dim, with gradient."""
    parts: dict[LossComponent, Tensor] = field(default_factory=dict)
    """Each component's normalized share, 0-dim, no gradient."""
    metrics: list[MetricSums] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    """Every call of a loss function."""


def row_loss(
    row: PackedRow,
    logprobs: Tensor,
    losses: Components,
    counts: Counts,
    entropies: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    computed: Mapping[str, Tensor] = MappingProxyType({}),
) -> RowLoss:
    """The row's share of the step's loss: zero, with a graph, if it has no members.

    ``logprobs`` [T] carry the gradient, and so do ``entropies`` [T] if a loss reads them.
    ``old_logprobs`` [T]: None if they are those of the step itself. ``computed``: the outputs of
    heads [T], and ``top_logprobs`` [T, k], with gradient; columns of ``REFERENCES`` [T].
    """
    # Zero with a graph: a rank whose row has no member still goes backward, as the others do, or
    # their collectives would wait for it.
    result = RowLoss(logprobs[:1].sum() * 0.0)
    # One pass serves both where the weights are still those that the batch began with.
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    known = {"top_logprobs": None, "entropies": entropies, "old_logprobs": old, **computed}

    for head in {head for name, _ in counts.members for head in losses[name].read_heads}:
        result.loss = result.loss + computed[head.name][:1].sum() * 0.0  # a gradient on every rank

    for name, whole in row.shares.items():
        component = losses[name]
        # A part has one divisor, and its tokens have the same optional streams.
        for share, env in _parts(row, component, whole):
            columns = _columns(row, component, share=share, given=known) | {
                "trainer_logprobs": logprobs,
                "inference_logprobs": row.inference_logprobs,
                "loss_mask": share.mask,
                "loss_weights": _weights(row, component, share=share, counts=counts),
            }
            calls = [
                replace(call, outputs=_checked(component, losses, call.outputs))
                for call in _calls(row, component, share=share, columns=columns)
            ]

            divisor = counts.divisor(component, env)
            part = torch.stack([call.outputs.loss for call in calls]).sum() / divisor
            # A loss that detached its input would train nothing, and every metric would look right.
            if logprobs.requires_grad and not part.requires_grad and part.any():
                raise PluginError(
                    f"loss {component.loss.name!r}: {len(share.tokens)} tokens train in it, and "
                    f"its value, {float(part):.3g}, has no gradient: nothing would be learned. "
                    "Compute it from inputs.trainer_logprobs, without detach() or no_grad()."
                )

            result.loss = result.loss + part
            result.parts[name] = result.parts.get(name, 0.0) + part.detach()
            result.calls += calls
            metrics = reduce_calls(calls, row, share)
            if metrics is not None:
                result.metrics.append(metrics)

    return result


def _parts(
    row: PackedRow, component: Component, whole: Share
) -> Iterator[tuple[Share, str | None]]:
    """The component's share of the row, in parts with one divisor each, and the env of each part
    whose divisor is that of its env. A loss of scope ``token`` sees many sequences at once: those
    that lack one of its optional streams are parts of their own."""
    absences = []
    if component.scope == "token":
        optional = [name for name, default in component.defaults.items() if default is None]
        absences = [row.absent[name] for name in optional if name in row.absent]

    sequences_of: dict[tuple[Any, ...], list[int]] = {}
    for s in whole.sequences:
        env = row.envs[row.sequence_envs[s]] if component.per_env else None
        lacks = [bool(absent[s]) for absent in absences]
        sequences_of.setdefault((env, *lacks), []).append(s)

    if len(sequences_of) == 1:
        yield whole, next(iter(sequences_of))[0]
        return

    for (env, *_), sequences in sequences_of.items():
        is_chosen = np.zeros(len(row.lengths), np.bool_)  # [S]
        is_chosen[sequences] = True
        in_part = np.repeat(is_chosen, row.lengths)  # [T]

        mask = whole.mask & to_device(in_part, np.bool_, whole.mask.device)
        tokens = whole.tokens[in_part[whole.tokens]]
        yield Share(mask, whole.weights, sequences=sequences, tokens=tokens), env


def _columns(
    row: PackedRow, component: Component, share: Share, given: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """What the loss reads by name. Raises ``StreamError`` if a member token lacks a stream."""
    columns: dict[str, Tensor | None] = {}
    device = share.mask.device

    for name in component.computed:
        if name in given:
            columns[name] = given[name]
        elif name == "sequence_ids":
            columns[name] = row.sequence_ids
        elif name == "policy_lag":  # None: the batch does not say
            columns[name] = row.streams.get(name)
        elif name in row.of_sequences:
            dtype = np.float32 if name == "temperatures" else np.int64
            of_sequences = to_device(row.of_sequences[name], dtype, device)  # [S]
            columns[name] = of_sequences[row.sequence_ids]

    for name in component.streams:
        column = row.streams.get(name)
        default = component.defaults.get(name)
        absent = row.absent.get(name)
        lacks = column is None or (absent is not None and absent[share.sequences].any())
        if lacks and name in component.required:
            envs = {row.envs[row.sequence_envs[s]] for s in share.sequences}
            raise StreamError(
                f"envs {', '.join(sorted(envs))}: {len(share.tokens)} tokens train in the "
                f"{component.name} component, and its loss {component.cls.name!r} reads the stream "
                f"{name!r}, which they lack. Their algorithm has to assign it."
            )

        # Integers stay integers, for a loss may index by them; a fraction makes the column float.
        kind = torch.float32 if isinstance(default, float) else torch.int32
        if column is None and default is not None:
            column = torch.full_like(row.inference_logprobs, default, dtype=kind)
        elif column is not None and absent is not None:
            at = to_device(absent, np.bool_, device)[row.sequence_ids]
            column = column.to(torch.promote_types(column.dtype, kind))
            column = column.masked_fill(at if column.dim() == 1 else at[:, None], default or 0)

        columns[name] = None if column is None else column.detach()

    # `LossInputs` has both fields for every loss, also for one that reads neither.
    columns.setdefault("ref_logprobs", None)
    if columns.get("advantages") is None:
        columns["advantages"] = torch.zeros_like(row.inference_logprobs)

    return columns


def _weights(row: PackedRow, component: Component, share: Share, counts: Counts) -> Tensor | None:
    """The members' weights [T], each over its unit's size if units are averaged."""
    if not component.scales_tokens:
        return share.weights

    owners = np.repeat(np.arange(len(row.lengths)), row.lengths)
    sizes = np.bincount(owners[share.tokens], minlength=len(row.lengths)).astype(np.float64)
    if component.unit != "sequences":
        ids = row.of_sequences[f"{component.unit[:-1]}_ids"]
        # Sizes are over the whole step: a unit may have members in other rows or on other ranks.
        for s in share.sequences:
            of_env = counts.sizes[component.name, row.envs[row.sequence_envs[s]]]
            sizes[s] = of_env[int(ids[s])]

    # At least 1: a sequence without members stays finite. Its tokens are masked anyway.
    scale = to_device(1 / np.maximum(sizes, 1), np.float32, share.mask.device)[row.sequence_ids]
    return scale if share.weights is None else share.weights * scale


def _calls(
    row: PackedRow, component: Component, share: Share, columns: Mapping[str, Tensor | None]
) -> Iterator[RecordedCall]:
    """The loss of the whole row at once, or of each sequence, rollout or group with members."""
    loss = component.loss
    call = running(loss.name, hook=f"loss {loss.name!r}", owner=loss)(loss)
    if component.scope == "token":
        # All sequences of a part lack the same optional streams (`_parts`): the first tells.
        lacks = share.sequences[:1]
        yield RecordedCall(call(_inputs(row, component, columns=columns, sequences=lacks)))
        return

    ends = np.cumsum([0, *row.lengths])
    if component.scope == "sequence":
        # One split for all sequences: its gradient is one tensor of the row, as below.
        split = {
            name: None if column is None else column.split_with_sizes(row.lengths)
            for name, column in columns.items()
        }
        for s in share.sequences:
            of_sequence = {
                name: None if parts is None else parts[s] for name, parts in split.items()
            }
            outputs = call(_inputs(row, component, columns=of_sequence, sequences=[s]))
            yield RecordedCall(outputs, slice(int(ends[s]), int(ends[s + 1])), s)
        return

    # The row has its sequences sorted by length. A unit's come in the order of the micro batch.
    ids = row.of_sequences[f"{component.scope}_ids"]
    order = row.of_sequences["order"]

    units = [
        sorted(np.flatnonzero(ids == unit).tolist(), key=lambda s: order[s])
        for unit in np.unique(ids[share.sequences])
    ]
    tokens = [
        np.concatenate([np.arange(ends[s], ends[s + 1]) for s in sequences]) for sequences in units
    ]
    # One gather for all units: the gradient of a gather is a tensor of the whole row, so that one
    # for each unit would make the backward pass quadratic in their number.
    index = to_device(np.concatenate(tokens), np.int64, share.mask.device)

    sizes = [len(positions) for positions in tokens]
    split = {
        name: None if column is None else column[index].split_with_sizes(sizes)
        for name, column in columns.items()
    }

    for number, (sequences, positions) in enumerate(zip(units, tokens, strict=True)):
        of_unit = {name: None if parts is None else parts[number] for name, parts in split.items()}
        # The unit is whole. What of it trains in another component says nothing of this one's
        # optional streams.
        trained = [s for s in sequences if s in share.sequences]
        outputs = call(_inputs(row, component, columns=of_unit, sequences=trained))
        yield RecordedCall(outputs, positions, trained[0])


def _inputs(
    row: PackedRow,
    component: Component,
    columns: Mapping[str, Tensor | None],
    sequences: Sequence[int],
) -> LossInputs:
    """The ``columns`` that the loss reads and that each of ``sequences`` has."""
    kept = dict(columns)
    for name, default in component.defaults.items():
        if default is None and name in row.absent and row.absent[name][list(sequences)].any():
            kept[name] = None

    heads = [head.name for head in component.read_heads]
    streams = {name: kept[name] for name in (*component.streams, *heads)}
    known: dict[str, Any] = {name: column for name, column in kept.items() if name in FIELDS}
    return LossInputs(**known, streams=streams)


def _checked(component: Component, losses: Components, outputs: Any) -> LossOutputs:
    """The outputs. The names of a component's metrics begin with the component's name, except for
    rl. Raises ``PluginError`` for outputs that break the contract."""
    name = component.cls.name if hasattr(component.cls, "name") else component.name
    if not isinstance(outputs, LossOutputs):
        raise _no_sum(name, type(outputs).__name__)
    if not isinstance(outputs.loss, Tensor):
        raise _no_sum(name, f"LossOutputs with a loss of type {type(outputs.loss).__name__}")
    if outputs.loss.dim():
        raise _no_sum(name, f"LossOutputs with a loss of shape {tuple(outputs.loss.shape)}")

    # Components that report the same metric must not overwrite each other. The loss of rl keeps the
    # plain names, which graphs of other runs have.
    is_rl = component.name == "rl"
    labels = {}
    for metric in outputs.metrics:
        has_name = metric.partition("/")[0] == component.name
        labels[metric] = metric if is_rl or has_name else f"{component.name}/{metric}"

    for metric, label in labels.items():
        first = label.partition("/")[0]
        if first in TAKEN or (is_rl and first != name and first in losses):
            raise PluginError(
                f"loss {name!r} reports a metric {metric!r}, but that name is in use (taken: "
                f"the names of losses, and {', '.join(sorted(TAKEN))}). Rename it."
            )

    metrics = {labels[metric]: value for metric, value in outputs.metrics.items()}
    return replace(outputs, metrics=metrics)


def _no_sum(name: str, returned: str) -> PluginError:
    return PluginError(
        f"loss {name!r} returned {returned}, expected LossOutputs with a 0-dim tensor: the sum "
        "over loss_mask. Fix its __call__."
    )
