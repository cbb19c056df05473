"""SFT: distillation from samples, cross entropy on whatever somebody better wrote (sequence-level
knowledge distillation, Kim and Rush, arXiv:1606.07947).

    y ~ teacher(. | x)        L = -log pi(y_t | x, y_<t)

on every token of the answer. The teacher is whoever ``sampling.source`` names: a frozen model, or a
source of demonstrations. There is nothing to score, so there is no hook: the component ``ce`` does
all of it. The policy's own samples teach nothing this way, and are refused at config time.

Changed from the paper: 1. samples at the source's temperature instead of the mode by beam search;
2. every answer trains, whatever its reward; a filter can drop the poor ones.
"""

from __future__ import annotations

from prime_rl import Algorithm


class SFT(Algorithm):
    """The signal is the answer itself."""

    name = "sft"
    action_loss = "ce"
    needs_frozen_source = True
