"""Losses, the components of what the trainer minimizes, and heads, whose outputs they read.
Entry-point group ``prime_rl.trainer``.

A loss declares what it reads, what one call sees whole, and what its sum is divided by. Core packs
the batch so that this holds, and pays only for what some loss of the run declares.

Shapes: T = tokens of one call: of the row, a sequence, a rollout or a group, end to end; N = tokens
that train, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.streams import BoolColumn, FloatColumn, StreamColumn, Values

Scope: TypeAlias = Literal["token", "sequence", "rollout", "group"]
SCOPES: tuple[Scope, ...] = ("token", "sequence", "rollout", "group")
"""In ascending order."""
Unit: TypeAlias = Literal["tokens", "sequences", "rollouts", "groups", "constant"]
Read: TypeAlias = str | tuple[str, float | None]


@dataclass(frozen=True)
class LossInputs:
    """What one call of a loss sees. All tensors: [T]; a stream of k values per token: [T, k].

    The first six fields are always there. The others, and ``streams``, are there if ``Loss.reads``
    names them.
    """

    trainer_logprobs: torch.Tensor
    """log π of each token under the weights in training; carries the gradient."""
    inference_logprobs: torch.Tensor
    """log μ under the policy that sampled it."""
    ref_logprobs: torch.Tensor | None
    """Under a reference model. None: not read, or not assigned to these tokens."""
    advantages: torch.Tensor
    """0.0 if not read."""
    loss_mask: torch.Tensor
    """bool: this component's member tokens."""
    loss_weights: torch.Tensor | None
    """What each member's term is multiplied by; None means 1.0 everywhere."""
    entropies: torch.Tensor | None = None
    """Entropy of the distribution that each token is drawn from; carries a gradient."""
    top_logprobs: torch.Tensor | None = None
    """[T, k] log π of the tokens of the stream ``top_ids`` in the place of each token, at its
    temperature; carries a gradient. Off the mask: any finite number."""
    old_logprobs: torch.Tensor | None = None
    """log π under the weights with which the trainer began the batch."""
    policy_lag: torch.Tensor | None = None
    """Versions between the policy that sampled the token and the one in training; -1 off the mask.
    """
    temperatures: torch.Tensor | None = None
    """Sampling temperature of the token's sequence."""
    sequence_ids: torch.Tensor | None = None
    """int64: equal for the tokens of one sequence of the call. ``rollout_ids`` and ``group_ids`` do
    the same for a rollout and a group."""
    rollout_ids: torch.Tensor | None = None
    group_ids: torch.Tensor | None = None
    streams: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    """Every stream of ``Loss.reads`` by name, ``advantages`` and ``ref_logprobs`` included."""
    initial_logprobs: torch.Tensor | None = None
    """log π under the policy's first weights, those of ``model.name``, or those of the last
    ``[trainer.reference_reset]``."""
    ema_logprobs: torch.Tensor | None = None
    """log π under the moving average of the weights (``trainer.ema_decay``)."""


@dataclass(frozen=True)
class TokenMetric:
    """A metric that is a mean over some tokens of each sequence (0 where none), then over
    sequences."""

    values: torch.Tensor
    """[T] float."""
    mask: torch.Tensor
    """[T] bool."""


@dataclass(frozen=True)
class LossOutputs:
    """A loss summed over its unit, not normalized, and its metrics."""

    loss: torch.Tensor
    """0-dim."""
    metrics: Mapping[str, torch.Tensor | TokenMetric]
    """0-dim tensors (one value per call), 1-D ones (each entry counts) or ``TokenMetric``.
    ``is_masked``, ``is_masked_high`` and ``is_masked_low`` also go to the token export."""


class Stateful:
    """What a loss or a head of a run learns beside its weights, such as a coefficient that follows
    a metric. Every rank has a copy, and the copies stay equal because each follows from the same
    numbers."""

    def batch_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the optimizer steps of batch ``step``. ``metrics``: those of the step over all
        ranks, as in ``trainer.jsonl``; a loss finds its own under the names that it gave them."""

    def save(self, directory: Path) -> None:
        """Write the state that ``load`` needs, if any. The folder exists and has no other files.
        Rank 0 calls it."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Every rank calls it. Raises ``ConfigError`` if it does not
        fit."""


class Loss(Stateful, Offer):
    """A component of the loss. Keep ``import torch`` inside ``__call__``: listing plugins must stay
    fast."""

    token_wise: ClassVar[bool] = False
    """The same as ``scope = "token"``."""

    scope: ClassVar[Scope] = "sequence"
    """The rollouts or samples that one call sees whole. ``token``: each term of the sum depends on
    its own token alone and the metrics are ``TokenMetric``s, so one call takes a whole row.
    ``sequence``: one sample. ``rollout``: all samples of a rollout. ``group``: all rollouts of a
    group that train in the batch, which then holds whole groups."""

    reads: ClassVar[tuple[Read, ...]] = ("advantages", ("ref_logprobs", None))
    """Streams and computed columns that the loss reads, by name. A stream that a member token lacks
    is an error; ``(name, default)`` gives the default instead: a number, or None for the stream of
    a whole call. Computed columns are the fields of ``LossInputs`` after ``loss_weights``. With
    ``top_logprobs``, the stream ``top_ids`` is required too."""

    normalize_by: ClassVar[Unit] = "tokens"
    """The unit that the sum is over: ``__call__`` adds one term per token, or per sequence, rollout
    or group. The trainer divides by their number in the batch. ``constant``: by ``constant`` of the
    loss's table. A run may divide a sum over tokens in another way (``[trainer.loss]``)."""

    compares_with_sampler: ClassVar[bool] = True
    """It reads ``inference_logprobs``: its members must be tokens that the policy sampled, with
    known logprobs. False for imitation."""

    @classmethod
    def completes(cls, streams: Mapping[str, StreamColumn]) -> bool:
        """With the scope ``group``: whether what the batch has of a group can train. If not, its
        members train nothing and count in no divisor. The orchestrator asks when it packs, because
        filters may have dropped rollouts. ``streams``: those of all members of the group, end to
        end, as far as every sample has them."""
        return True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum the loss over ``inputs.loss_mask``, each term times its ``loss_weights``."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeadInputs:
    """What one call of ``Head.prepare`` sees. All columns of tokens: [T], sample after sample."""

    outputs: FloatColumn
    """The head's outputs under the weights with which the trainer began the batch; 0.0 off the
    mask. [T], or [T, k] of a head that ``gives_vectors``."""
    loss_mask: BoolColumn
    """The tokens that train in a loss that reads the head."""
    streams: Mapping[str, StreamColumn]
    """Every stream and column of ``Head.reads`` by name."""
    lengths: tuple[int, ...] = ()
    """[S] tokens of each sample, in order; they sum to T."""
    rollouts: tuple[int, ...] = ()
    """[S] equal for samples of one rollout."""
    ends: FloatColumn | None = None
    """[S] or [S, k]: what the head gives in the state after the last token of each sample; 0.0 for
    a sample that does not train the head. None: the head does not ask (``Head.reads_ends``)."""


class Head(Stateful, Offer):
    """A module of the trainer on the policy's hidden states, and the streams that follow from its
    outputs. Its ``name`` is that of the stream that losses read. Keep ``import torch`` inside
    ``build``.

    A head's output is a stream with a gradient: every loss that names the head in ``reads`` gets
    it. So a head trains as the policy does, by components of the loss, and an algorithm routes
    tokens to them by ``rollout.assign_weights``. Before the first optimizer step of a batch, a head
    may turn its outputs into further streams, such as advantages.

    A table ``[trainer.heads.<name>]``, which may be empty, makes a head part of the run. It has
    weights and an optimizer of its own, which checkpoints keep; engines and the exported model
    never get them.
    """

    scope: ClassVar[Literal["sequence", "rollout", "group"]] = "rollout"
    """What one call of ``prepare`` sees whole: one sample, all samples of a rollout, or all
    rollouts of a group that train in the batch, which then holds whole groups."""

    reads: ClassVar[tuple[Read, ...]] = ()
    """Streams that ``prepare`` reads, by name. An algorithm has to assign them; ``(name, default)``
    gives tokens without the stream the default instead. Also ``initial_logprobs`` and
    ``ema_logprobs``, which the trainer computes (``LossInputs``)."""

    writes: ClassVar[tuple[str, ...]] = ()
    """Streams that ``prepare`` gives. No algorithm assigns them where the head trains."""

    gives_vectors: ClassVar[bool] = False
    """The module gives k numbers for each state, [N, k]: the stream that losses read is [T, k].
    With the identity as the module, losses read the hidden states themselves."""

    reads_ends: ClassVar[bool] = False
    """``prepare`` also gets ``HeadInputs.ends``: the value of the state in which a truncated
    rollout was left, for example."""

    gives_logprobs: ClassVar[bool] = False
    """The outputs are log π of each token under the head's own copy of the policy, and ``build`` is
    not called: a second model that trains, such as one whose log-ratio is a reward. The run has to
    set ``own_model``."""

    def build(self, hidden_size: int) -> nn.Module:
        """A module from hidden states [N, D] to outputs [N], or [N, k] of a head that
        ``gives_vectors``; all float32.

        The output of a token belongs to the state before it: the hidden state that predicts it.
        """
        raise NotImplementedError

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Values]:
        """Each stream of ``writes``: [T], or [T, k] of one that is a stream of its own and not
        credit; finite. Called once for each sequence or rollout with tokens on the mask, before the
        first optimizer step of a batch."""
        return {}
