"""How the credit of a reply is spread over its tokens, as the trainer's loss has it.

Shapes: T = sampled tokens of a reply.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl.registry.components import Components
from prime_rl_devkit.lab.fit import Within
from prime_rl_devkit.lab.problem import Floats, Ints, log_softmax
from prime_rl_devkit.lab.updates import Rows, slopes_of

EVEN = 1e-4
"""Relative difference of two credits that are the same: the trainer computes in float32."""
ENOUGH = 12
"""Pairs of places with different credit that decide what credit rises with. One question of the lab
has fewer places, so that credit may rise with anything there by chance."""


DIGITS = 6
"""Places are told apart by so many digits of their log-probability or entropy."""


@dataclass(frozen=True, eq=False)
class ReplyCredit:
    """[T] each."""

    credit: Floats
    """Positive where it has the sign of the reply's sum."""
    logprob: Floats
    entropy: Floats
    token: Ints


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
                    token=rows.token[at],
                )
            )
    return found


def within(credits: Sequence[ReplyCredit], known: Collection[str] = ()) -> Within:
    """Of all replies together. ``known``: what other questions have shown, which a few replies then
    confirm."""
    if not credits:
        return Within()
    if all(np.ptp(each.credit) <= EVEN * np.abs(each.credit).max() for each in credits):
        return Within(is_even=True)
    if _is_by_place(credits):
        return Within()
    if _is_by_token(credits):
        return Within(by="token")
    columns = {
        "likelihood": [(each.credit, each.logprob) for each in credits],
        "entropy": [(each.credit, each.entropy) for each in credits],
    }
    for name, pairs in columns.items():
        if _rises(pairs, enough=1 if name in known else ENOUGH):
            return Within(by=name)
    return Within()


def _is_by_place(credits: Sequence[ReplyCredit]) -> bool:
    """Whether all replies of a length share one profile, whatever their tokens."""
    profiles: dict[int, Floats] = {}
    for each in credits:
        profile = each.credit / np.abs(each.credit).max()
        if not np.allclose(profile, profiles.setdefault(len(profile), profile), atol=EVEN):
            return False
    return True


def _is_by_token(credits: Sequence[ReplyCredit]) -> bool:
    """Whether each token of the vocabulary has one weight, whatever its place and its reply. Some
    reply has to have one of them twice, in different places."""
    weights: dict[tuple[int, int], Floats] = {}
    is_repeated = False
    for each in credits:
        least = EVEN * float(np.abs(each.credit).max())
        for i, j in itertools.combinations(range(len(each.token)), 2):
            first, second = sorted((i, j), key=lambda at: each.token[at])
            pair = each.credit[[first, second]]
            if np.abs(pair).max() <= least:
                continue
            tokens = (int(each.token[first]), int(each.token[second]))
            is_repeated |= tokens[0] == tokens[1]
            # The sign of a reply's credit is that of its sum, so a pair is known up to its sign.
            pair = pair / pair[np.abs(pair).argmax()]
            same = np.ones(2) if tokens[0] == tokens[1] else weights.setdefault(tokens, pair)
            if not np.allclose(pair, same, atol=EVEN):
                return False
    return is_repeated


def _rises(replies: Sequence[tuple[Floats, Floats]], enough: int) -> bool:
    """Whether, in every reply, credit only rises or only falls with the other column, in at least
    ``enough`` pairs of places: a pair that several replies share counts once."""
    signs: dict[tuple[float, float], float] = {}
    for credit, other in replies:
        least = EVEN * float(np.abs(credit).max())
        for i, j in itertools.permutations(range(len(credit)), 2):
            if credit[i] - credit[j] <= least or other[i] == other[j]:
                continue
            place = (round(float(other[i]), DIGITS), round(float(other[j]), DIGITS))
            signs[place] = 1.0 if other[i] > other[j] else -1.0
    return len(signs) >= enough and abs(sum(signs.values())) == len(signs)
