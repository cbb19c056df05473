"""The heads of a run in the trainer: their modules, optimizers, and the streams that they write.

A head is a part of ``Policy``: ranks shard it and sum its gradient, as for the policy. It has an
optimizer of its own, and its gradient is clipped by itself: a new critic's large gradient would
otherwise shrink the policy's step.

Shapes: T = tokens of the row, N = its targets, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, autocast, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from prime_rl.config.trainer import HeadTable, OptimConfig
from prime_rl.errors import PluginError, StreamError
from prime_rl.plugins.loss import Head, HeadInputs
from prime_rl.plugins.trainer import Kernel, OptimizerMaker
from prime_rl.registry.calls import running
from prime_rl.registry.components import Components, head_defaults, names_of
from prime_rl.streams import (
    COMPUTED,
    STREAMS,
    StreamColumn,
    absent_value,
    as_stream,
    components,
    is_absent,
    members,
    stream,
)
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import unit_ids
from prime_rl.trainer.optim import adamw
from prime_rl.trainer.packed_row import PackedRow
from prime_rl.trainer.packing import Ints, Packing
from prime_rl.wire.micro_batch import MicroBatch


def ends_of(head: str) -> str:
    """The key of what a head gives at the ends of sequences, [E] or [E, k], among what a forward
    pass has computed. No stream can have this name."""
    return f"{head}/ends"


class HeadModule(nn.Module):
    """A head as the policy calls it."""

    def __init__(self, head: Head, table: HeadTable, model: PreTrainedModel) -> None:
        super().__init__()
        self.name = head.name
        self.table = table
        self.reads_ends = head.reads_ends
        self.gives_vectors = head.gives_vectors
        self.model = deepcopy(model) if table.own_model else None
        self.module = None
        if not head.gives_logprobs:
            self.module = head.build(model.config.get_text_config().hidden_size).float()

    def forward(
        self, row: PackedRow, hidden: Tensor, packing: Packing, kernel: Kernel | None = None
    ) -> dict[str, Tensor]:
        """The output, [T] or [T, k] float32, from the policy's ``hidden`` states; 0.0 for a token
        that is no target. And that at the ends of sequences, without gradient, if the row has them
        and the head reads them."""
        if self.model is not None:
            hidden = packing.hidden_states(self.model, row.layout)
        if self.module is None:
            return {self.name: self.logprobs(row, hidden, packing=packing, kernel=kernel)}

        # Without targets one state keeps the graph: the backward pass has to run on every rank.
        states = hidden[row.layout.sources] if len(row.targets) else hidden[:1]
        outputs = {}
        if self.reads_ends and row.layout.ends is not None:
            with torch.no_grad():
                outputs[ends_of(self.name)] = self.call(hidden[row.layout.ends])

        values = self.call(states)
        output = values.new_zeros(len(row.token_ids), *values.shape[1:])
        if len(row.targets):
            output = output.index_copy(0, row.targets, values)
        else:
            output = output + 0.0 * values.sum()
        return {self.name: output} | outputs

    def call(self, states: Tensor) -> Tensor:
        """[N] or [N, k] of [N, D] states. Raises ``PluginError`` for another shape."""
        assert self.module is not None
        states = states.float()
        if self.table.detach:
            states = states.detach()
        with autocast(states.device.type, enabled=False):
            values: Any = self.module(states)

        shape = getattr(values, "shape", type(values))
        has_rows = isinstance(values, Tensor) and values.shape[:1] == states.shape[:1]
        if not has_rows or values.dim() != 1 + self.gives_vectors:
            expected = f"({len(states)}, k)" if self.gives_vectors else f"({len(states)},)"
            raise PluginError(
                f"head {self.name!r}: its module gave {shape} for {len(states)} hidden states, "
                f"expected a tensor of shape {expected}"
            )
        output: Tensor = values
        return output

    def logprobs(
        self, row: PackedRow, hidden: Tensor, packing: Packing, kernel: Kernel | None
    ) -> Tensor:
        """[T] log π under the head's own model."""
        assert self.model is not None
        logprobs, _ = token_logprobs(self.model, row, packing=packing, kernel=kernel, hidden=hidden)
        # Tokens that are no target get 0.0 instead of log(1/V). The product keeps the graph.
        output = 0.0 * logprobs
        if not len(row.targets):
            return output
        return output.index_copy(0, row.targets, logprobs[row.targets])


def make_optimizers(
    modules: Iterable[Any], config: OptimConfig, maker: OptimizerMaker
) -> dict[str, tuple[HeadModule, Optimizer]]:
    """The heads by name, each with an AdamW of what trains in it; its settings are those of the
    policy's optimizer ``maker``, if they are AdamW's."""
    heads: dict[str, tuple[HeadModule, Optimizer]] = {}
    for head in modules:
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        lr = head.table.lr or config.lr
        optimizer = adamw(trained, maker.config, lr=lr, weight_decay=config.weight_decay)
        heads[head.name] = (head, optimizer)
    return heads


def write_streams(
    micro_batch: MicroBatch, row: PackedRow, computed: Mapping[str, Tensor], losses: Components
) -> None:
    """Add the streams that follow from heads to ``micro_batch``, of which ``row`` was made.
    ``computed``: outputs of heads, and columns that they read. Raises ``StreamError`` for other
    streams than a head declares."""
    owners = np.repeat(np.arange(micro_batch.num_sequences), micro_batch.sequence_lengths)
    for name, head in losses.heads.items():
        if name not in computed:
            continue

        mask = np.zeros(len(micro_batch), np.bool_)
        for component in components(micro_batch):
            if head in losses[component].read_heads:
                mask |= members(micro_batch, component)

        mask &= micro_batch.position_ids > 0  # nothing predicts a first token
        if not mask.any():
            continue

        # Heads see tokens in the orchestrator's order. The row is sorted by length.
        values = _in_batch_order(row, computed[name])
        values[~mask] = 0.0

        ends = None
        if head.reads_ends:
            assert row.ending is not None
            at_ends = computed[ends_of(name)].cpu().numpy()
            ends = np.zeros((micro_batch.num_sequences, *at_ends.shape[1:]), np.float32)
            ends[row.of_sequences["order"][row.ending]] = at_ends

        units = np.arange(micro_batch.num_sequences)
        if head.scope != "sequence":
            units = unit_ids(micro_batch, f"{head.scope}_ids")
        rollouts = units
        if head.scope == "group":
            rollouts = unit_ids(micro_batch, "rollout_ids")

        read = _read(head, micro_batch, row=row, computed=computed)
        defaults = head_defaults(head)

        for unit in np.unique(units[owners[mask]]):
            sequences = np.flatnonzero(units == unit)
            at = np.flatnonzero(np.isin(owners, sequences))
            ends_of_unit = None
            if ends is not None:
                ends_of_unit = _of_trained(ends, mask, owners=owners, sequences=sequences)

            inputs = HeadInputs(
                outputs=values[at],
                loss_mask=mask[at],
                streams=_of_unit(read, defaults, at),
                lengths=tuple(micro_batch.sequence_lengths[sequences].tolist()),
                rollouts=tuple(rollouts[sequences].tolist()),
                ends=ends_of_unit,
            )

            with running(name, hook="prepare", owner=head):
                written = head.prepare(inputs)

            env = micro_batch.envs[micro_batch.env_ids[sequences[0]]]
            where = f"env {env!r}: head {name!r}"
            _write_prepared(micro_batch, head, written=written, at=at, where=where)


def _in_batch_order(row: PackedRow, column: Tensor) -> npt.NDArray[Any]:
    """A column of the row, [T] or [T, k], in the order of the micro batch. A copy."""
    values = column.detach().float().cpu().numpy()
    ordered = np.empty_like(values)
    ordered[row.origins] = values
    return ordered


def _read(
    head: Head, micro_batch: MicroBatch, row: PackedRow, computed: Mapping[str, Tensor]
) -> dict[str, StreamColumn | None]:
    """The streams and columns of ``Head.reads``, of all tokens."""
    read: dict[str, StreamColumn | None] = {}
    for name in names_of(head.reads):
        if name in COMPUTED:
            read[name] = _in_batch_order(row, computed[name])
        else:
            read[name] = stream(micro_batch, name)
    return read


def _of_unit(
    read: Mapping[str, StreamColumn | None], defaults: Mapping[str, float | None], at: Ints
) -> dict[str, StreamColumn]:
    """The part at some tokens, with a default where they lack a stream."""
    streams = {}
    for name, column in read.items():
        default = defaults.get(name)
        if column is not None and default is not None:
            part = column[at]
            lacks = is_absent(part)
            streams[name] = np.where(lacks if part.ndim == 1 else lacks[:, None], default, part)
        elif column is not None:
            streams[name] = column[at]
        elif default is not None:
            streams[name] = np.full(len(at), default, np.float32)
    return streams


def _of_trained(
    ends: npt.NDArray[Any], mask: npt.NDArray[np.bool_], owners: Ints, sequences: Ints
) -> npt.NDArray[Any]:
    """What a head gives at the ends of some sequences; 0.0 of those that do not train it."""
    chosen = ends[sequences]
    chosen[~np.isin(sequences, owners[mask])] = 0.0
    return chosen


def _write_prepared(
    micro_batch: MicroBatch, head: Head, written: Any, at: Ints, where: str
) -> None:
    """Write what ``prepare`` gave for the tokens ``at``."""
    if not isinstance(written, Mapping) or written.keys() != set(head.writes):
        raise StreamError(f"{where}: prepare gave {written!r}, expected the streams {head.writes}")

    for name, values in written.items():
        before = stream(micro_batch, name)
        try:
            part = as_stream(values)
            width = part.shape[1:] if name not in STREAMS and part.ndim == 2 else ()
            part = part.reshape(*at.shape, *width)

            # Values that other units wrote, or that the orchestrator sent, stay.
            column = np.full((len(micro_batch), *width), absent_value(name), np.float32)
            column[:] = column if before is None else before
            column[at] = part
        except ValueError as error:
            raise StreamError(f"{where}: {name} of {len(at)} tokens: {error}") from error

        if name in STREAMS:
            setattr(micro_batch, name, column)
        else:
            micro_batch.streams[name] = column
