"""The heads of a run in the trainer: their modules, optimizers, and the streams that they write.

A head is a part of ``Policy``: ranks shard it and sum its gradients as those of the policy. Each
head has an optimizer, and its gradient is clipped by itself: a new head's large gradient would
otherwise shrink the policy's step.

Shapes: T = tokens of the row, N = its targets, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.config.trainer import HeadTable, TrainerConfig
from prime_rl.errors import PluginError, StreamError
from prime_rl.plugins.components import Components
from prime_rl.plugins.head import Head, HeadInputs
from prime_rl.plugins.metrics import running
from prime_rl.streams import (
    STREAMS,
    FloatColumn,
    absent_value,
    as_stream,
    components,
    members,
    stream,
)
from prime_rl.trainer import parallel
from prime_rl.trainer.optim import adamw, clip_gradients
from prime_rl.trainer.packed_row import PackedRow
from prime_rl.trainer.packing import PackingName, hidden_states
from prime_rl.wire.micro_batch import MicroBatch

if TYPE_CHECKING:
    from prime_rl.trainer.model import Policy


class HeadModule(nn.Module):
    """A head as the policy calls it."""

    def __init__(self, head: Head, table: HeadTable, model: PreTrainedModel) -> None:
        super().__init__()
        self.name, self.detach = head.name, table.detach
        self.model = deepcopy(model) if table.own_model else None
        self.module = head.build(model.config.get_text_config().hidden_size).float()

    def forward(self, row: PackedRow, hidden: Tensor, packing: PackingName) -> Tensor:
        """[T] float32 from the policy's ``hidden`` states; 0.0 for a token that is no target."""
        if self.model is not None:
            hidden = hidden_states(self.model, row.layout, packing)
        hidden = hidden.detach() if self.detach else hidden
        # Without targets one state keeps the graph: the backward pass has to run on every rank.
        states = hidden[row.layout.sources] if len(row.targets) else hidden[:1]
        with torch.autocast(hidden.device.type, enabled=False):
            found = self.module(states.float())
        if not isinstance(found, Tensor) or found.shape != states.shape[:1]:
            raise PluginError(
                f"head {self.name!r}: its module gave {getattr(found, 'shape', type(found))} for "
                f"{len(states)} hidden states, expected a tensor of shape ({len(states)},)."
            )
        output = found.new_zeros(len(row.token_ids))
        if not len(row.targets):
            return output + 0.0 * found.sum()
        return output.index_copy(0, row.targets, found)


class Heads:
    """What trains the heads of a policy."""

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        optim = config.optim
        self.modules = dict(zip(policy.head_names, policy.heads, strict=True))
        self.scales = {n: (config.heads[n].lr or optim.lr) / optim.lr for n in self.modules}
        """Learning rates, relative to that of the policy."""
        self.optimizers = {
            name: adamw([each for each in module.parameters() if each.requires_grad], optim)
            for name, module in self.modules.items()
        }

    def clip(self, max_norm: float | None) -> dict[str, float]:
        """Clip the gradient of each head by itself; the norms before, as metrics."""
        norms = {}
        for name, module in self.modules.items():
            norm = parallel.full(clip_gradients(module.parameters(), max_norm))
            norms[f"optim/{name}/grad_norm"] = float(norm)
        return norms

    def step(self, rate: float) -> None:
        """One step of every head that has a gradient. ``rate``: that of the policy."""
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * self.scales[name]
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)


def write_streams(
    micro_batch: MicroBatch, row: PackedRow, outputs: Mapping[str, Tensor], losses: Components
) -> None:
    """Add the streams that follow from the heads' ``outputs`` [T] to ``micro_batch``, of which
    ``row`` was made. Raises ``StreamError`` if a head gives something else than it declares."""
    owners = np.repeat(np.arange(micro_batch.num_sequences), micro_batch.sequence_lengths)
    for name, output in outputs.items():
        head, mask = losses.heads[name], np.zeros(len(micro_batch), np.bool_)
        for component in components(micro_batch):
            if head in losses[component].read_heads:
                mask |= members(micro_batch, component)
        mask &= micro_batch.position_ids > 0  # nothing predicts a first token
        values = np.zeros(len(micro_batch), np.float32)
        values[row.origins] = output.detach().float().cpu().numpy()
        given = {
            each: column for each in head.reads if (column := stream(micro_batch, each)) is not None
        }
        units = owners if head.scope == "sequence" else _rollouts(micro_batch, head)[owners]
        for unit in np.unique(units[mask]):
            at = np.flatnonzero(units == unit)
            streams = {each: column[at] for each, column in given.items()}
            inputs = HeadInputs(np.where(mask, values, 0)[at], mask[at], streams)
            found = running(head.name)(head.prepare)(inputs)
            for each, column in _checked(head, found, micro_batch, at).items():
                _put(micro_batch, each, at, column)


def _rollouts(micro_batch: MicroBatch, head: Head) -> Any:
    if micro_batch.rollout_ids is None:
        raise StreamError(
            f"micro batch (envs: {', '.join(micro_batch.envs)}): the head {head.name!r} needs "
            "rollout_ids, and the orchestrator sent none. Both sides must run with the same config "
            "and plugins."
        )
    return micro_batch.rollout_ids


def _checked(head: Head, found: Any, micro_batch: MicroBatch, at: Any) -> dict[str, FloatColumn]:
    env = micro_batch.envs[
        micro_batch.env_ids[
            np.searchsorted(np.cumsum(micro_batch.sequence_lengths), at[0], "right")
        ]
    ]
    where = f"env {env!r}: head {head.name!r}"
    if not isinstance(found, Mapping) or set(found) != set(head.writes):
        raise StreamError(f"{where}: prepare gave {found!r}, expected the streams {head.writes}")
    columns = {}
    for name, values in found.items():
        try:
            columns[name] = as_stream(values).astype(np.float32)
        except ValueError as error:
            raise StreamError(f"{where}: {name}: {error}") from error
        if columns[name].shape != at.shape:
            raise StreamError(
                f"{where}: {name}: got shape {columns[name].shape}, expected {at.shape}"
            )
    return columns


def _put(micro_batch: MicroBatch, name: str, at: Any, values: FloatColumn) -> None:
    before = stream(micro_batch, name)
    column = np.full(len(micro_batch), absent_value(name), np.float32)
    if before is not None:
        column[:] = before
    column[at] = values
    if name in STREAMS:
        setattr(micro_batch, name, column)
    else:
        micro_batch.streams[name] = column
