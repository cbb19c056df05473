"""The heads of a run in the trainer: their modules, optimizers, and the streams that they write.

A head is a part of ``Policy``: ranks shard it, and sum its gradient, as those of the policy. It has
an optimizer of its own, and its gradient is clipped by itself: a new critic's large gradient would
otherwise shrink the policy's step.

Shapes: T = tokens of the row, N = its targets, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from torch import Tensor, autocast, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from prime_rl.config.trainer import HeadTable, OptimConfig
from prime_rl.errors import PluginError, StreamError
from prime_rl.plugins.loss import Head, HeadInputs
from prime_rl.plugins.trainer import OptimizerMaker
from prime_rl.registry.calls import running
from prime_rl.registry.components import Components
from prime_rl.streams import STREAMS, absent_value, as_stream, components, members, stream
from prime_rl.trainer.loss import unit_ids
from prime_rl.trainer.optim import adamw
from prime_rl.trainer.packed_row import PackedRow
from prime_rl.trainer.packing import Ints, Packing
from prime_rl.wire.micro_batch import MicroBatch


class HeadModule(nn.Module):
    """A head as the policy calls it."""

    def __init__(self, head: Head, table: HeadTable, model: PreTrainedModel) -> None:
        super().__init__()
        self.name = head.name
        self.table = table
        self.model = deepcopy(model) if table.own_model else None
        self.module = head.build(model.config.get_text_config().hidden_size).float()

    def forward(self, row: PackedRow, hidden: Tensor, packing: Packing) -> Tensor:
        """[T] float32 from the policy's ``hidden`` states; 0.0 for a token that is no target."""
        if self.model is not None:
            hidden = packing.hidden_states(self.model, row.layout)
        # Without targets one state keeps the graph: the backward pass has to run on every rank.
        states = (hidden[row.layout.sources] if len(row.targets) else hidden[:1]).float()
        with autocast(hidden.device.type, enabled=False):
            found = self.module(states.detach() if self.table.detach else states)
        if not isinstance(found, Tensor) or found.shape != states.shape[:1]:
            raise PluginError(
                f"head {self.name!r}: its module gave {getattr(found, 'shape', type(found))} for "
                f"{len(states)} hidden states, expected a tensor of shape ({len(states)},)"
            )

        output = found.new_zeros(len(row.token_ids))
        if not len(row.targets):
            return output + 0.0 * found.sum()
        return output.index_copy(0, row.targets, found)


def make_optimizers(
    modules: Iterable[Any], config: OptimConfig, maker: OptimizerMaker
) -> dict[str, tuple[HeadModule, Optimizer]]:
    """The heads by name, each with an AdamW of what trains in it; its settings are those of the
    policy's optimizer ``maker``, if they are AdamW's."""
    found: dict[str, tuple[HeadModule, Optimizer]] = {}
    for each in modules:
        trained = [p for p in each.parameters() if p.requires_grad]
        lr = each.table.lr or config.lr
        found[each.name] = each, adamw(trained, maker.config, lr, config.weight_decay)
    return found


def write_streams(
    micro_batch: MicroBatch, row: PackedRow, outputs: Mapping[str, Tensor], losses: Components
) -> None:
    """Add the streams that follow from the heads' ``outputs`` [T] to ``micro_batch``, of which
    ``row`` was made. Raises ``StreamError`` for others than a head declares."""
    owners = np.repeat(np.arange(micro_batch.num_sequences), micro_batch.sequence_lengths)
    for name, output in outputs.items():
        head = losses.heads[name]
        mask = np.zeros(len(micro_batch), np.bool_)
        for component in components(micro_batch):
            if head in losses[component].read_heads:
                mask |= members(micro_batch, component)

        mask &= micro_batch.position_ids > 0  # nothing predicts a first token
        values = np.zeros(len(micro_batch), np.float32)
        values[row.origins] = output.detach().cpu().numpy()
        values[~mask] = 0.0
        given = {each: stream(micro_batch, each) for each in head.reads}
        units = owners if head.scope == "sequence" else unit_ids(micro_batch, "rollout_ids")[owners]
        for unit in np.unique(units[mask]):
            at = np.flatnonzero(units == unit)
            streams = {each: column[at] for each, column in given.items() if column is not None}
            with running(name, hook="prepare", owner=head):
                found = head.prepare(HeadInputs(values[at], mask[at], streams))
            env = micro_batch.envs[micro_batch.env_ids[owners[at[0]]]]
            _put(micro_batch, head, found, at, f"env {env!r}: head {name!r}")


def _put(micro_batch: MicroBatch, head: Head, found: Any, at: Ints, where: str) -> None:
    """Write what ``prepare`` gave for the tokens ``at``."""
    if not isinstance(found, Mapping) or found.keys() != set(head.writes):
        raise StreamError(f"{where}: prepare gave {found!r}, expected the streams {head.writes}")
    for name, values in found.items():
        before = stream(micro_batch, name)
        column = np.full(len(micro_batch), absent_value(name), np.float32)
        column[:] = column if before is None else before
        try:
            column[at] = as_stream(values).reshape(at.shape)
        except ValueError as error:
            raise StreamError(f"{where}: {name} of {len(at)} tokens: {error}") from error

        if name in STREAMS:
            setattr(micro_batch, name, column)
        else:
            micro_batch.streams[name] = column
