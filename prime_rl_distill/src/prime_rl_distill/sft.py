"""SFT: cross entropy on another model's samples, or on demonstrations (sequence-level knowledge
distillation, Kim and Rush, arXiv:1606.07947).

    y ~ teacher(. | x)        L = -log pi(y_t | x, y_<t)

on every token of the answer. The teacher is the ``sampling.source``: a frozen model, or a source of
demonstrations. There is nothing to score, so there is no hook, only the component ``ce``. The
policy's own samples are refused at config time, because they teach nothing this way.

Changed from the paper: 1. samples at the source's temperature instead of the mode by beam search;
2. every answer trains, whatever its reward; a filter can drop bad ones.
"""

from __future__ import annotations

from typing import Any

from prime_rl import Algorithm


class SFT(Algorithm):
    """The signal is the answer itself."""

    name = "sft"
    action_loss = "ce"
    needs_frozen_source = True

    def objective(self, outcomes: Any) -> Any:
        """The log-likelihood of the source's replies."""
        return (outcomes.sampled * outcomes.log_probabilities).sum()
