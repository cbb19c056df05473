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
HARDLY = 1e-4
"""Part of a version's move that a policy makes which has hardly moved: so little that it stays
inside the narrowest trust region, GSPO's of 3e-4 for the mean of a reply."""
NEAR = 0.25
"""|log ratio| up to which a weight has to move with the ratio: no trust region is narrower than
that on every token."""
FEW = 1e-4
"""Tokens with a smaller share of the pull do not decide the name of a weight."""
FALLS = -0.25
"""Power of the ratio below which the weight is one of a ratio that is upside down."""
STEEP = 1.2
"""Power of the ratio from which a weight exaggerates it, near 1."""
AWAY = 0.5
"""Cosine from which a term moves with the log ratio."""
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
    all_tokens: Floats
    """Tokens of the reply's sequence, those of the prompt and of the environment included."""
    beside: Floats
    """What the slope has gained since the token was fresh in the part that does not grow with the
    credit, over the |credit| of the token."""


@dataclass(frozen=True)
class Stale:
    """What a loss makes of stale samples."""

    code: str
    """``exact``, ``per_token``, ``per_reply``, ``per_prefix``, ``clipped``, ``capped``, ``soft``;
    ``mixed_kinds``; and the faults ``no_ratio``, ``inverted``, ``shifted``, ``wrong_side``,
    ``dropped``, ``partly``, ``discounted``, ``opposite``, ``excessive``, ``diluted``, ``away`` and
    ``worse``."""
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
    "diluted": "the mean of a reply's ratios also counts tokens that the policy did not sample, "
    "such as the prompt's",
    "away": "a term beside the credit pushes the policy away from the one that sampled",
    "excessive": "the weight of stale tokens moves by more than their ratio",
    "worse": "the loss weighs stale tokens worse than no importance ratio at all",
}
SIGNS = {1: "positive", -1: "negative"}
SIDES = {1: "above 1", -1: "below 1"}
KINDS = {
    "exact": "the exact ratio of the reply",
    "per_token": "each token has its own ratio, the usual approximation",
    "per_reply": "the tokens of a reply share the mean of their ratios, an approximation",
    "per_prefix": "each token has the ratio of the reply up to it, an approximation",
    "clipped": "tokens are dropped where the ratio leaves a trust region",
    "capped": "the ratio is capped",
    "soft": "the weight follows the ratio in its own way, an approximation",
    "mixed_kinds": "the ratio depends on the sign of the credit",
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
    """[T] logarithms, 0.0 where the policy did not sample; and numbers of tokens."""

    token: Floats
    sequence: Floats
    prefix: Floats
    length: Floats
    previous: Floats
    following: Floats
    all_tokens: Floats


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
        all_tokens=np.bincount(sequence_ids)[sequence_ids].astype(np.float64),
    )


def credited(rows: Rows, losses: Components, logits: Floats, lag: int) -> Slopes:
    """The part of the slopes that grows with the credit; all of them if none does, as with a loss
    that whitens its advantages."""
    once = slopes_of(rows, losses, logits=logits, lag=lag)
    return _credited(once, rows, losses, logits=logits, lag=lag)


def _credited(once: Slopes, rows: Rows, losses: Components, *, logits: Floats, lag: int) -> Slopes:
    """That part of ``once``."""
    more = slopes_of(rows, losses, logits=logits, lag=lag, credit=1 + MORE)
    part = (more.tokens - once.tokens) / MORE
    if np.abs(part).max(initial=0.0) <= ZERO < np.abs(once.tokens).max(initial=0.0):
        return once
    # A loss that drops some tokens by their credit drops others where there is more of it.
    drops_others = (more.tokens == 0) != (once.tokens == 0)
    part = np.where(drops_others, once.tokens, part)
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
        whole_before = slopes_of(each, losses, logits=fresh, lag=0)
        whole_after = slopes_of(each, losses, logits=logits, lag=lag)
        before = _credited(whole_before, each, losses, logits=fresh, lag=0).tokens
        after = _credited(whole_after, each, losses, logits=logits, lag=lag).tokens
        gained = (whole_after.tokens - after) - (whole_before.tokens - before)
        ratios = _ratios(each, fresh, logits)
        chosen = each.sampled & (np.abs(before) > ZERO)
        chance = of_groups[each.group]
        values = {
            "share": np.abs(before) * chance,
            "credit": -np.sign(before),
            "weight": np.divide(after, before, out=np.zeros_like(after), where=chosen),
            "token": ratios.token,
            "sequence": ratios.sequence,
            "prefix": ratios.prefix,
            "length": ratios.length,
            "previous": ratios.previous,
            "following": ratios.following,
            "all_tokens": ratios.all_tokens,
            "beside": np.divide(gained, np.abs(before), out=np.zeros_like(gained), where=chosen),
        }
        for name, column in values.items():
            columns.setdefault(name, []).append(column[chosen])

    return _shared({name: np.concatenate(parts) for name, parts in columns.items()})


def merged(parts: Sequence[StaleWeights]) -> StaleWeights:
    """Those of several questions, which are asked equally often."""
    names = StaleWeights.__dataclass_fields__
    return _shared(
        {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def _shared(columns: dict[str, Floats]) -> StaleWeights:
    """With the pull of each token as its share of the total."""
    total = max(float(columns["share"].sum()), 1e-30)
    return StaleWeights(**{**columns, "share": columns["share"] / total})


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
    of_none = _against(without, exact)
    dropped = float(weights.share[np.abs(weights.weight) < ZERO].sum())
    code = _kind(weights, moved=10 * SAME)
    if code == "dropped" and _kind(nearly_fresh, moved=HARDLY / 10) != "dropped":
        code = "clipped"  # its trust region is narrow
    at_once = _at_once(nearly_fresh) if code != "dropped" else None
    if at_once is not None:
        code = at_once.code
    if code == "soft" and cosine < of_none[0] - 1e-6:
        code = "worse"
    if code == "mixed":
        code = "clipped"
    if code not in FAULTS and _pushes_away(weights):
        code = "away"

    more = at_once.text if at_once is not None else ""
    if code == "no_ratio":
        more = _where_without_ratio(weights, moved=10 * SAME)
    if code == "inverted":
        side = _side_that_falls(weights)
        more = f", where the ratio is {side}" if side else ""
    if code == "clipped":
        more = _region(weights)
    if code == "soft":
        power = _power(weights)[1]
        more = f": near 1 it moves as its power {power:.2g}" if power < FLAT else ""

    return Stale(
        code=code,
        text=_text(
            code, residual=residual, of_none=of_none[2], dropped=dropped, lag=lag, more=more
        ),
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


def _text(
    code: str, *, residual: float, of_none: float, dropped: float, lag: int, more: str = ""
) -> str:
    """``more``: numbers that belong to the code; ``of_none``: the bias without any ratio."""
    behind = "1 version" if lag == 1 else f"{lag} versions"
    if code in FAULTS:
        bias = f" ({residual:.1%} of the update is bias)" if residual else ""
        return f"samples that are {behind} old: {FAULTS[code]}{more}{bias}"
    if code == "exact":
        return f"samples that are {behind} old: no bias beside fresh ones"
    beside = f", and {dropped:.1%} of the pull is dropped" if dropped > FEW else ""
    bias = f"{residual:.1%} of the update is bias"
    if residual > of_none:
        bias += f", more than without any ratio ({of_none:.1%})"
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

    of_signs = {_kind_of_sign(weights, sign=sign, moved=moved) for sign in SIGNS}
    if "" not in of_signs:
        faults = of_signs & {*FAULTS}
        return faults.pop() if faults else "mixed_kinds"

    for code, ratio in _known(weights):
        same = np.abs(weight - ratio) <= SAME * np.maximum(1.0, ratio)
        follows = same & kept & (np.abs(np.log(ratio)) > moved)
        if code not in FAULTS and weighs(follows) and _is_cap(weights, ratio, same=same, kept=kept):
            return "capped"

    if _share_without_ratio(weights, moved=moved):
        return "no_ratio"
    return _direction(weights, kept)


def _kind_of_sign(weights: StaleWeights, *, sign: int, moved: float) -> str:
    """The code of the weight of all tokens with credit of this sign; empty: none is known, some are
    dropped, or none has moved."""
    of_sign = weights.credit == sign
    has_moved = of_sign & (np.abs(weights.token) > moved)
    if float(weights.share[has_moved].sum()) <= FEW:
        return ""
    for code, ratio in _known(weights):
        same = np.abs(weights.weight - ratio) <= SAME * np.maximum(1.0, ratio)
        if float(weights.share[of_sign & ~same].sum()) <= FEW:
            # Tokens that move one way only weigh 1 beside a cap at 1 too.
            return "" if code == "no_ratio" else code
    return ""


def _share_without_ratio(weights: StaleWeights, moved: float) -> float:
    """The share of the tokens that weigh as much as fresh ones although they have moved, where all
    others have one known ratio; 0.0: there are others."""
    kept = np.abs(weights.weight) > ZERO
    is_fresh = kept & (np.abs(weights.weight - 1) <= SAME)
    for code, ratio in _known(weights):
        if code in FAULTS:
            continue
        same = np.abs(weights.weight - ratio) <= SAME * np.maximum(1.0, ratio)
        follows = same & kept & (np.abs(np.log(ratio)) > moved)
        rest = kept & ~same & ~is_fresh
        without = float(weights.share[is_fresh & ~same].sum())
        if float(weights.share[follows].sum()) > FEW and float(weights.share[rest].sum()) <= FEW:
            return without if without > FEW else 0.0
    return 0.0


def _where_without_ratio(weights: StaleWeights, moved: float) -> str:
    """Which tokens have no ratio, where others have one."""
    sign = _sign_without_ratio(weights, moved=moved)
    if sign:
        return f" where credit is {SIGNS[sign]}; the other tokens have one"
    part = _share_without_ratio(weights, moved=moved)
    return f" in {part:.1%} of the pull; the other tokens have one" if part else ""


def _pushes_away(weights: StaleWeights) -> bool:
    """Whether what the loss adds to the credit raises the probability of tokens that have become
    likelier, and lowers that of the others. A penalty on the distance does the opposite."""
    root = np.sqrt(weights.share)
    gained = root * weights.beside
    if float(root @ np.abs(gained)) <= SAME:
        return False
    for log_ratio in (weights.token, weights.sequence):
        moved = root * log_ratio
        # The slope is that of the loss: below zero, a step raises the probability.
        most = float(np.linalg.norm(gained) * np.linalg.norm(moved))
        if float(gained @ moved) < -AWAY * most:
            return True
    return False


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
    yield "diluted", np.exp(weights.sequence / weights.all_tokens)


def _is_cap(weights: StaleWeights, ratio: Floats, same: BoolColumn, kept: BoolColumn) -> bool:
    """Whether the weight is the nearer end of an interval where ``ratio`` is beyond it, and
    ``ratio`` within: an interval for credit of each sign."""
    weight = weights.weight
    for sign in SIGNS:
        of_sign = kept & (weights.credit == sign)
        above = of_sign & ~same & (weight < ratio)
        below = of_sign & ~same & (weight > ratio)
        for beyond in (above, below):
            if beyond.any() and float(np.ptp(weight[beyond])) >= SAME * float(weight[beyond].max()):
                return False
        within = ratio[of_sign & same]
        lowest = weight[below].max(initial=0.0)
        highest = weight[above].min(initial=np.inf)
        leaves = (within > highest * (1 + SAME)) | (within < lowest * (1 - SAME))
        if float(weights.share[of_sign & same][leaves].sum()) > FEW:
            return False
    return True


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
    if slope < FALLS or _side_that_falls(weights):
        return "inverted"
    if slope > STEEP:
        return "excessive"
    return "mixed" if float(weights.share[~kept].sum()) > FEW else "soft"


def _side_that_falls(weights: StaleWeights) -> str:
    """The side of 1 on which the weight falls while the ratio rises, as with its distance from 1;
    empty: it falls on both, or on none."""
    falls = {side: _power(weights, side)[1] < FALLS for side in SIDES}
    return next((SIDES[side] for side in SIDES if falls[side] and not falls[-side]), "")


def _power(weights: StaleWeights, side: int = 0) -> tuple[float, float]:
    """How much of the weights of positive sign near 1 a power of a ratio explains, and that power;
    of the ratio that explains most. ``side``: only above 1, or only below."""
    positive = weights.weight > ZERO
    best = (0.0, 1.0)
    mean = weights.sequence / np.maximum(weights.length, 1)
    for log_ratio in (weights.token, weights.sequence, mean, weights.prefix):
        near = positive & (np.abs(log_ratio) < NEAR) & (np.abs(log_ratio) > SAME)
        if side:
            near &= np.sign(log_ratio) == side
        share = weights.share[near]
        if float(share.sum()) <= FEW:
            continue
        x = log_ratio[near]
        y = np.log(weights.weight[near])
        slope = float(share @ (x * y)) / float(share @ (x * x))
        explained = 1 - float(share @ (y - slope * x) ** 2) / max(float(share @ (y * y)), 1e-30)
        best = max(best, (explained, slope))

    return best
