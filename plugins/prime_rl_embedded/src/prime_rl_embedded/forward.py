"""From tokens to logits over slot attention, in two halves: the layers, then the head.

The logits of a long prompt need more memory than everything else, so ``scoring.py`` computes the
states once and their logits a few rows at a time.

Shapes: N = tokens of one forward, R = rows, E = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from prime_rl_embedded.attention import BatchPlan, planned


class Forward(Protocol):
    """Computes a model's logits."""

    def __call__(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        """Logits [R, V] of the tokens ``rows`` (None: all N). Ids: [N]."""

    def states(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        """The input of ``logits``, one row for each of ``rows``."""

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] of any rows of states."""

    def weights_changed(self) -> None:
        """The module's parameters have new values."""


class WholeForward:
    """The module as it is. It may post-process its logits (cap, scale), so layers and head stay
    together: its states are the logits."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        return self.states(ids, plan, rows)

    def states(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        keep = 0 if rows is None else rows
        with planned(plan):
            out = self.module(
                input_ids=ids[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=keep,
            )

        logits: Tensor = out.logits[0]
        return logits

    def logits(self, states: Tensor) -> Tensor:
        return states

    def weights_changed(self) -> None:
        pass  # the module is all there is


class GeneralForward:
    """The module's own layers, then its own head. Correct for models whose logits are the head's
    output, which the start-up check verifies."""

    def __init__(self, module: Any) -> None:
        self.decoder = module.get_decoder()
        self.head = module.get_output_embeddings()

    def __call__(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        return self.logits(self.states(ids, plan, rows))

    def states(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        with planned(plan):
            out = self.decoder(
                input_ids=ids[None], position_ids=plan.positions[None], use_cache=False
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states)
        return logits

    def weights_changed(self) -> None:
        pass  # the module is all there is
