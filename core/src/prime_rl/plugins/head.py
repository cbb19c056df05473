"""Heads: modules of the trainer on the policy's hidden states. Entry-point group
``prime_rl.trainer``.

A head's output is a stream with a gradient: every loss that names the head in ``reads`` gets it. So
a head trains as the policy does, by components of the loss, and an algorithm routes tokens to them
by ``rollout.assign_weights``. Before the first optimizer step of a batch, a head may turn its
outputs into further streams, such as advantages.

A table ``[trainer.heads.<name>]``, which may be empty, makes a head part of the run. It has weights
and an optimizer of its own, which checkpoints keep; engines and the exported model never get them.

Shapes: T = tokens of one call, N = tokens that train, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    from torch import nn

    from prime_rl.streams import BoolColumn, FloatColumn, StreamColumn, Values


@dataclass(frozen=True)
class HeadInputs:
    """What one call of ``Head.prepare`` sees. All columns: [T], sample after sample."""

    outputs: FloatColumn
    """Of the head, under the weights with which the trainer began the batch; 0.0 off the mask."""
    loss_mask: BoolColumn
    """The tokens that train in a loss that reads the head."""
    streams: Mapping[str, StreamColumn]
    """Every stream of ``Head.reads`` by name."""


class Head(Offer):
    """A module on the hidden states, and the streams that follow from its outputs. Its ``name`` is
    that of the stream that losses read. Keep ``import torch`` inside ``build``."""

    scope: ClassVar[Literal["sequence", "rollout"]] = "rollout"
    """What one call of ``prepare`` sees whole: one sample, or all samples of a rollout."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Streams that ``prepare`` reads. An algorithm has to assign them."""

    writes: ClassVar[tuple[str, ...]] = ()
    """Streams that ``prepare`` gives. No algorithm assigns them where the head trains."""

    def build(self, hidden_size: int) -> nn.Module:
        """A module from hidden states [N, D] to outputs [N], both float32.

        The output of a token belongs to the state before it: the hidden state that predicts it.
        """
        raise NotImplementedError

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Values]:
        """Each stream of ``writes``: [T], finite. Called once for each sequence or rollout with
        tokens on the mask, before the first optimizer step of a batch."""
        return {}
