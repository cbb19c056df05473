"""Samples of an older policy: the loss beside the same credit under the exact ratio.

A reply y that the policy mu sampled stands for one of the policy pi with the weight W(y) = pi(y) /
mu(y), the product of the ratios of its tokens. So the exact update of stale samples takes the
credit that each token has on fresh ones, times W. A loss uses instead

    rho = its slope on a stale token, over its slope on the same token when it was fresh

and ``judge`` says what kind of weight that is. The slopes at slightly more credit identify a term
that does not depend on the credit, such as a penalty on the distance from mu.

Shapes: M = groups, P = parameters of a question, T = tokens of a row, N = stale tokens with credit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prime_rl.registry.components import Components
from prime_rl.streams import BoolColumn
from prime_rl_devkit.lab.problem import Floats, log_softmax
from prime_rl_devkit.lab.updates import (
    Rows,
    Slopes,
    Updates,
    divisors_of,
    joined,
    slopes_of,
    steps_of,
)

SAME = 2e-3
"""Relative difference of two weights that are the same: the trainer computes in float32."""
ZERO = 1e-5
MORE = 2.0**-5
"""Part by which credit grows to see what grows with it: so little that a loss which picks tokens by
their credit picks the same ones."""
HARDLY = 1e-3
"""Part of a version's move that a policy makes which has hardly moved."""
NEAR = 0.25
"""|log ratio| up to which a weight has to move with the ratio: no trust region is narrower than
that on every token."""
FEW = 1e-4
"""Tokens with a smaller share of the pull do not decide the name of a weight."""
STEEP = 1.2
"""Power of the ratio from which a weight exaggerates it, near 1."""
FLAT = 0.8
"""Power of the ratio below which the verdict says it."""


@dataclass(frozen=True, eq=False)
class StaleWeights:
    """How a loss weighs the credit of stale tokens: [N] each."""

    share: Floats
    """Share of the total pull. The pull of a token is the probability of its group times its
    |credit|. The shares sum to 1."""
    credit: Floats
    """1.0 or -1.0: the sign of the credit."""
    weight: Floats
    """rho."""
    token: Floats
    """log of the token's own ratio."""
    sequence: Floats
    """log W."""
    prefix: Floats
    """log of the ratio of the reply up to the token, itself included."""
    length: Floats
    """Sampled tokens of the reply."""
    previous: Floats
    """log of the ratio of the token before it in the reply; 0.0 at the first."""
    following: Floats
    """log of that of the token behind it; 0.0 at the last."""


@dataclass(frozen=True)
class Stale:
    """What a loss makes of stale samples."""

    code: str
    """``exact``, ``per_token``, ``per_reply``, ``per_prefix``, ``clipped``, ``capped``, ``soft``;
    and the faults ``no_ratio``, ``inverted``, ``shifted``, ``wrong_side``, ``dropped``, ``partly``,
    ``discounted``, ``opposite``, ``excessive`` and ``worse``."""
    text: str
    cosine: float
    """Between the expected update and the exact one."""
    scale: float
    """How much of the exact update it keeps along it."""
    residual: float
    """Norm of the rest, relative to the update."""
    dropped: float
    """Share of the pull that weighs nothing."""

    @property
    def is_fault(self) -> bool:
        """Whether no estimator should weigh stale samples in this way."""
        return self.code in FAULTS


FAULTS = {
    "no_ratio": "the loss has no importance ratio: it takes stale samples for its own",
    "inverted": "the importance ratio is upside down: tokens count less where the policy has "
    "become likelier to choose them",
    "wrong_side": "the loss clips on the wrong side: it drops tokens that the policy has moved "
    "away from their credit, and keeps those that it has moved too far along it",
    "dropped": "the loss drops stale tokens whatever their ratio: nothing is learned from them",
    "partly": "the loss drops a part of the stale tokens whatever their ratio, also where the "
    "policy has hardly moved",
    "discounted": "stale tokens count otherwise than fresh ones, also where the policy has hardly "
    "moved",
    "shifted": "a token has the ratio of its neighbor in the reply, not its own",
    "opposite": "the loss turns the sign of the credit of stale tokens",
    "excessive": "the weight of stale tokens moves by more than their ratio",
    "worse": "the loss weighs stale tokens worse than no importance ratio at all",
}
SIGNS = {1: "positive", -1: "negative"}
KINDS = {
    "exact": "the exact ratio of the reply",
    "per_token": "each token has its own ratio, the usual approximation",
    "per_reply": "the tokens of a reply share the mean of their ratios, an approximation",
    "per_prefix": "each token has the ratio of the reply up to it, an approximation",
    "clipped": "tokens are dropped where the ratio leaves a trust region",
    "capped": "the ratio is capped",
    "soft": "the weight follows the ratio in its own way, an approximation",
}


def reweighted(
    rows: Sequence[Rows],
    losses: Components,
    fresh: Floats,
    logits: Floats,
    component: str,
    is_exact: bool,
) -> Updates:
    """The steps of a policy with ``logits`` by the credit that each token has under ``fresh``, the
    logits of the policy that sampled: times the exact ratio of its reply, or times 1."""
    parts = []
    for each in rows:
        slopes = credited(each, losses, logits=fresh, lag=0)
        ratios = np.exp(_ratios(each, fresh, logits).sequence)
        weights = np.where(each.sampled & is_exact, ratios, 1.0)
        weighted = replace(slopes, tokens=slopes.tokens * weights)
        steps = steps_of(each, logits, weighted)
        divisors = divisors_of(each, losses[component])
        parts.append(Updates(steps, divisors, np.zeros(each.size)))

    return joined(parts)


@dataclass(frozen=True, eq=False)
class _Ratios:
    """[T] logarithms; 0.0 where the policy did not sample."""

    token: Floats
    sequence: Floats
    prefix: Floats
    length: Floats
    previous: Floats
    following: Floats


def _ratios(rows: Rows, fresh: Floats, logits: Floats) -> _Ratios:
    possible = np.isfinite(logits)
    now = np.where(possible, log_softmax(logits), 0.0)
    change = now - np.where(possible, log_softmax(fresh), 0.0)
    token = np.where(rows.sampled, change[rows.state, rows.token], 0.0)
    sequence_ids = rows.row.sequence_ids.numpy()
    starts = np.cumsum([0, *rows.row.lengths])[:-1]
    before = np.cumsum(token) - token
    same_reply = sequence_ids[1:] == sequence_ids[:-1]
    return _Ratios(
        token=token,
        sequence=np.bincount(sequence_ids, token)[sequence_ids],
        prefix=before - before[starts][sequence_ids] + token,
        length=np.bincount(sequence_ids, rows.sampled)[sequence_ids],
        previous=np.append(0.0, token[:-1] * same_reply),
        following=np.append(token[1:] * same_reply, 0.0),
    )


def credited(rows: Rows, losses: Components, logits: Floats, lag: int) -> Slopes:
    """The part of the slopes that grows with the credit; all of them if none does, as with a loss
    that whitens its advantages."""
    once = slopes_of(rows, losses, logits=logits, lag=lag)
    more = slopes_of(rows, losses, logits=logits, lag=lag, credit=1 + MORE)
    part = (more.tokens - once.tokens) / MORE
    if np.abs(part).max(initial=0.0) <= ZERO < np.abs(once.tokens).max(initial=0.0):
        return once
    return replace(once, tokens=part, entropies=(more.entropies - once.entropies) / MORE)


def credited_updates(
    rows: Sequence[Rows], losses: Components, logits: Floats, component: str, lag: int
) -> Updates:
    """The steps of a policy with ``logits`` by that part."""
    parts = []
    for each in rows:
        steps = steps_of(each, logits, credited(each, losses, logits=logits, lag=lag))
        divisors = divisors_of(each, losses[component])
        parts.append(Updates(steps, divisors, np.zeros(each.size)))

    return joined(parts)


def weights_of(
    rows: Sequence[Rows],
    losses: Components,
    fresh: Floats,
    logits: Floats,
    lag: int,
    probabilities: Floats,
) -> StaleWeights:
    """``probabilities`` [M] of the groups in ``rows``."""
    columns: dict[str, list[Floats]] = {}
    start = 0
    for each in rows:
        of_groups = probabilities[start : start + each.size]
        start += each.size
        before = credited(each, losses, logits=fresh, lag=0).tokens
        after = credited(each, losses, logits=logits, lag=lag).tokens
        ratios = _ratios(each, fresh, logits)
        chosen = each.sampled & (np.abs(before) > ZERO)
        values = {
            "share": np.abs(before) * of_groups[each.group],
            "credit": -np.sign(before),
            "weight": np.divide(after, before, out=np.zeros_like(after), where=chosen),
            "token": ratios.token,
            "sequence": ratios.sequence,
            "prefix": ratios.prefix,
            "length": ratios.length,
            "previous": ratios.previous,
            "following": ratios.following,
        }
        for name, column in values.items():
            columns.setdefault(name, []).append(column[chosen])

    joined_columns = {name: np.concatenate(parts) for name, parts in columns.items()}
    joined_columns["share"] = joined_columns["share"] / max(
        float(joined_columns["share"].sum()), 1e-30
    )
    return StaleWeights(**joined_columns)


def merged(parts: Sequence[StaleWeights]) -> StaleWeights:
    """Those of several questions, which are asked equally often."""
    names = StaleWeights.__dataclass_fields__
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    columns["share"] = columns["share"] / max(float(columns["share"].sum()), 1e-30)
    return StaleWeights(**columns)


def judge(
    weights: StaleWeights,
    nearly_fresh: StaleWeights,
    update: Floats,
    exact: Floats,
    without: Floats,
    *,
    lag: int,
) -> Stale | None:
    """``nearly_fresh``: the weights of a policy that has hardly moved. ``update``, ``exact`` and
    ``without`` any ratio: the expected updates of all questions, end to end. None: no token has
    credit."""
    size = float(np.linalg.norm(exact))
    if not len(weights.share) or size < ZERO:
        return None

    cosine, scale, residual = _against(update, exact)
    dropped = float(weights.share[np.abs(weights.weight) < ZERO].sum())
    code = _kind(weights, moved=10 * SAME)
    if code == "dropped" and _kind(nearly_fresh, moved=HARDLY / 10) != "dropped":
        code = "clipped"  # its trust region is narrow
    at_once = _at_once(nearly_fresh) if code != "dropped" else None
    if at_once is not None:
        code = at_once.code
    if code == "soft" and cosine < _against(without, exact)[0] - 1e-6:
        code = "worse"
    if code == "mixed":
        code = "clipped"

    more = at_once.text if at_once is not None else ""
    if code == "no_ratio":
        sign = _sign_without_ratio(weights, moved=10 * SAME)
        more = f" where credit is {SIGNS[sign]}; the other tokens have one" if sign else ""
    if code == "clipped":
        more = _region(weights)
    if code == "soft":
        power = _power(weights)[1]
        more = f": near 1 it moves as its power {power:.2g}" if power < FLAT else ""

    return Stale(
        code=code,
        text=_text(code, residual=residual, dropped=dropped, lag=lag, more=more),
        cosine=cosine,
        scale=scale,
        residual=residual,
        dropped=dropped,
    )


def _against(update: Floats, exact: Floats) -> tuple[float, float, float]:
    """Cosine, scale and residual."""
    length = float(exact @ exact)
    scale = float(update @ exact) / length
    size = float(np.linalg.norm(update))
    if size < ZERO * np.sqrt(length):
        return 0.0, 0.0, 0.0
    rest = float(np.linalg.norm(update - scale * exact))
    return float(update @ exact) / size / float(np.sqrt(length)), scale, rest / size


@dataclass(frozen=True)
class _AtOnce:
    """What happens to stale tokens whose ratio is still 1."""

    code: str
    text: str


def _at_once(nearly_fresh: StaleWeights) -> _AtOnce | None:
    """None: they weigh as much as fresh ones, as in every trust region."""
    weight = nearly_fresh.weight
    share = nearly_fresh.share
    if float(weight.min()) < -SAME * HARDLY:
        return None  # said as it is: the sign is turned
    gone = np.abs(weight) < ZERO
    part = float(share[gone].sum())
    if part > FEW:
        which = ""
        for sign, words in SIGNS.items():
            if float(share[~gone & (nearly_fresh.credit * sign > 0)].sum()) <= FEW:
                which = f", all tokens with {words} credit"
        return _AtOnce("partly", f": {part:.1%} of the pull{which}")

    share_of_same = float(share[np.abs(weight - 1) <= SAME + 2 * HARDLY].sum())
    if 1 - share_of_same <= FEW:
        return None
    low = float(weight.min())
    high = float(weight.max())
    times = f"{low:.2g}" if high - low <= 5 * HARDLY * high else f"{low:.2g} to {high:.2g}"
    return _AtOnce("discounted", f": {times} times as much")


def _text(code: str, *, residual: float, dropped: float, lag: int, more: str = "") -> str:
    """``more``: numbers that belong to the code."""
    behind = "1 version" if lag == 1 else f"{lag} versions"
    if code in FAULTS:
        bias = f" ({residual:.1%} of the update is bias)" if residual else ""
        return f"samples that are {behind} old: {FAULTS[code]}{more}{bias}"
    if code == "exact":
        return f"samples that are {behind} old: no bias beside fresh ones"
    beside = f", and {dropped:.1%} of the pull is dropped" if dropped > FEW else ""
    bias = f"{residual:.1%} of the update is bias"
    return f"samples that are {behind} old: {bias}: {KINDS[code]}{more}{beside}"


def _kind(weights: StaleWeights, moved: float) -> str:
    """The code of a weight; ``mixed`` drops tokens without an order that a ratio would give.
    ``moved``: |log ratio| from which a token has left the policy that sampled it."""
    weight = weights.weight
    kept = np.abs(weight) > ZERO
    has_moved = np.abs(weights.token) > moved

    def weighs(chosen: BoolColumn) -> bool:
        return float(weights.share[chosen].sum()) > FEW

    if not weighs(kept & has_moved):
        return "dropped"
    if weighs(weight < -SAME):
        return "opposite"

    for code, ratio in _known(weights):
        same = np.abs(weight - ratio) <= SAME * np.maximum(1.0, ratio)
        if not weighs(~same & kept):
            is_fault = code in FAULTS
            return code if is_fault or not weighs(~kept) else _sides(weights, kept, np.log(ratio))

    if _sign_without_ratio(weights, moved=moved):
        return "no_ratio"

    for code, ratio in _known(weights):
        same = np.abs(weight - ratio) <= SAME * np.maximum(1.0, ratio)
        follows = same & kept & (np.abs(np.log(ratio)) > moved)
        beyond = ~same & kept
        if code not in FAULTS and weighs(follows) and _is_cap(weight[beyond], ratio[beyond]):
            return "capped"

    return _direction(weights, kept)


def _sign_without_ratio(weights: StaleWeights, moved: float) -> int:
    """The sign of the credit whose tokens weigh as much as fresh ones wherever they have moved,
    while others do not; 0: none, or both. They have to move both ways: beside a cap or a floor at
    1, tokens that move one way weigh 1 too."""
    kept = np.abs(weights.weight) > ZERO
    changed = kept & (np.abs(weights.weight - 1) > SAME)

    def weighs(chosen: BoolColumn) -> bool:
        return float(weights.share[chosen].sum()) > FEW

    without = [
        sign
        for sign in SIGNS
        if weighs(kept & (weights.credit == sign) & (weights.token > moved))
        and weighs(kept & (weights.credit == sign) & (weights.token < -moved))
        and not weighs(changed & (weights.credit == sign))
    ]
    return without[0] if len(without) == 1 and weighs(changed) else 0


def _region(weights: StaleWeights) -> str:
    """How a trust region differs from the usual one, which ends where a token has moved far along
    its credit; empty: it does not, or depends on more than a ratio."""
    dropped = np.abs(weights.weight) < ZERO
    if dropped.all():
        return ""

    mean = weights.sequence / np.maximum(weights.length, 1)
    for log_ratio in (weights.token, mean, weights.sequence, weights.prefix):
        low = float(log_ratio[~dropped].min())
        high = float(log_ratio[~dropped].max())
        above = float(weights.share[dropped & (log_ratio > high)].sum())
        below = float(weights.share[dropped & (log_ratio < low)].sum())
        inside = float(weights.share[dropped].sum()) - above - below
        if inside > FEW or max(above, below) <= FEW:
            continue

        # Tokens that the usual region drops, and this one keeps though they have moved as far.
        moved = float(np.abs(log_ratio[dropped]).min())
        keeps_below = (~dropped & (weights.credit < 0) & (log_ratio < -moved)).any()
        keeps_above = (~dropped & (weights.credit > 0) & (log_ratio > moved)).any()
        side = ""
        if below <= FEW and keeps_below:
            side = ", only above it"
        elif above <= FEW and keeps_above:
            side = ", only below it"
        # And tokens that it keeps, because they have moved against their credit.
        against = (log_ratio > high) & (weights.credit < 0)
        against |= (log_ratio < low) & (weights.credit > 0)
        whatever = ", whatever their credit" if (dropped & against).any() else ""
        return f"{side}{whatever}"

    return ""


def _known(weights: StaleWeights) -> Iterator[tuple[str, Floats]]:
    """Codes, and [N] what the weight would be."""
    mean = weights.sequence / np.maximum(weights.length, 1)
    yield "exact", np.exp(weights.sequence)
    yield "per_token", np.exp(weights.token)
    yield "per_reply", np.exp(mean)
    yield "per_prefix", np.exp(weights.prefix)
    yield "no_ratio", np.ones(len(weights.token))
    for log_ratio in (weights.token, weights.sequence, mean, weights.prefix):
        yield "inverted", np.exp(-log_ratio)
    for log_ratio in (weights.previous, weights.following):
        yield "shifted", np.exp(log_ratio)


def _is_cap(weight: Floats, ratio: Floats) -> bool:
    """Whether ``weight`` is the nearer end of an interval, where ``ratio`` is beyond it."""
    above = weight < ratio
    ends = [weight[above], weight[~above]]
    return all(len(end) == 0 or float(np.ptp(end)) < SAME * float(end.max()) for end in ends)


def _sides(weights: StaleWeights, kept: BoolColumn, log_ratio: Floats) -> str:
    """The side on which a ratio with a trust region drops tokens. The wrong one is where the
    policy has moved against the credit of a token: there a step still has to push."""
    against = np.sign(weights.credit * log_ratio) < 0
    dropped = ~kept
    wrong = float(weights.share[dropped & against].sum())
    right = float(weights.share[dropped & ~against].sum())
    if wrong > FEW and right <= FEW:
        return "wrong_side"
    return "clipped"


def _direction(weights: StaleWeights, kept: BoolColumn) -> str:
    """Whether the weight of the tokens that are kept rises with the ratio near 1, as that does."""
    slope = _power(weights)[1]
    if slope < -0.25:
        return "inverted"
    if slope > STEEP:
        return "excessive"
    return "mixed" if float(weights.share[~kept].sum()) > FEW else "soft"


def _power(weights: StaleWeights) -> tuple[float, float]:
    """How much of the weights of positive sign near 1 a power of a ratio explains, and that power;
    of the ratio that explains most."""
    positive = weights.weight > ZERO
    best = (0.0, 1.0)
    mean = weights.sequence / np.maximum(weights.length, 1)
    for log_ratio in (weights.token, weights.sequence, mean, weights.prefix):
        near = positive & (np.abs(log_ratio) < NEAR) & (np.abs(log_ratio) > SAME)
        share = weights.share[near]
        if float(share.sum()) <= FEW:
            continue
        x = log_ratio[near]
        y = np.log(weights.weight[near])
        slope = float(share @ (x * y)) / float(share @ (x * x))
        explained = 1 - float(share @ (y - slope * x) ** 2) / max(float(share @ (y * y)), 1e-30)
        best = max(best, (explained, slope))

    return best
