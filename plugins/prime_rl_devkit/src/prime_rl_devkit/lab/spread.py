"""How the credit of a reply is spread over its tokens, as the trainer's loss has it.

Shapes: T = sampled tokens of a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl.registry.components import Components
from prime_rl_devkit.lab.fit import Within
from prime_rl_devkit.lab.problem import Floats, log_softmax
from prime_rl_devkit.lab.updates import Rows, slopes_of

EVEN = 1e-4
"""Relative difference of two credits that are the same: the trainer computes in float32."""
ENOUGH = 12
"""Pairs of tokens with different credit that decide what credit rises with."""


@dataclass(frozen=True, eq=False)
class ReplyCredit:
    """[T] each."""

    credit: Floats
    """Positive where it has the sign of the reply's sum."""
    logprob: Floats
    entropy: Floats


def reply_credits(rows: Rows, losses: Components, logits: Floats) -> list[ReplyCredit]:
    """Those of all replies with credit, on the policy that sampled."""
    slopes = -slopes_of(rows, losses, logits=logits, lag=0).tokens
    possible = np.isfinite(logits)
    table = np.where(possible, log_softmax(logits), 0.0)
    entropies = -(np.where(possible, np.exp(table), 0.0) * table).sum(1)
    ids = rows.row.sequence_ids.numpy()
    found = []
    for sequence in np.unique(ids[rows.sampled]):
        at = np.flatnonzero((ids == sequence) & rows.sampled)
        credit = slopes[at]
        if np.abs(credit).max() > 1e-6:
            found.append(
                ReplyCredit(
                    credit=credit * (np.sign(credit.sum()) or 1.0),
                    logprob=table[rows.state[at], rows.token[at]],
                    entropy=entropies[rows.state[at]],
                )
            )
    return found


def within(credits: Sequence[ReplyCredit]) -> Within:
    """Of all replies together."""
    if not credits:
        return Within()
    if all(np.ptp(each.credit) <= EVEN * np.abs(each.credit).max() for each in credits):
        return Within(is_even=True)
    if _is_by_place(credits):
        return Within()
    if _rises([(each.credit, each.logprob) for each in credits]):
        return Within(by="likelihood")
    if _rises([(each.credit, each.entropy) for each in credits]):
        return Within(by="entropy")
    return Within()


def _is_by_place(credits: Sequence[ReplyCredit]) -> bool:
    """Whether all replies of a length share one profile, whatever their tokens."""
    profiles: dict[int, Floats] = {}
    for each in credits:
        profile = each.credit / np.abs(each.credit).max()
        if not np.allclose(profile, profiles.setdefault(len(profile), profile), atol=EVEN):
            return False
    return True


def _rises(replies: Sequence[tuple[Floats, Floats]]) -> bool:
    """Whether, in every reply, credit only rises or only falls with the other column."""
    signs: list[float] = []
    for credit, other in replies:
        more = credit[:, None] - credit[None, :]
        more[np.abs(more) <= EVEN * np.abs(credit).max()] = 0.0
        higher = np.sign(other[:, None] - other[None, :])
        signs += (np.sign(more) * higher)[more > 0].tolist()
    return len(signs) >= ENOUGH and abs(sum(signs)) == len(signs)
