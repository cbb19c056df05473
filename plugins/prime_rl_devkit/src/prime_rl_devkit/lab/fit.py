"""An expected update beside the gradient of an objective: how much of it, and what else.

    E = s g + e        s = <E, g> / <g, g>        residual = |e| / |E|

The rest e has causes. Each cause is a set of columns, and e is what it explains if least squares on
g and these columns leaves nothing. The smallest set of causes that explains all of e is named. Its
parts are separated in the order of ``CAUSES``: the share of each is the norm that the fit takes off
e, relative to |E|. Where no set explains e, and neither difficulty nor rewards is a possible cause
(as with credit that is linear in the rewards), none is named: the columns are many enough to take a
part off any e.

    difficulty   a scale for each question
    rewards      the gradient of the probability of each reward: credit is any function of it
    turns        the rewards of each turn, on the tokens of each turn
    length       the reward of the replies of each length
    cut_off      the reward of the replies without a stop token, and a scale for each question
    place        the reward on the first, second, ... token, and on the last, last but one, ...
    apart        the update with all rewards at 0, and the gradient of the objective there

``apart`` is measured, where credit is linear in the rewards. It comes first, unless that update is
one of the length of replies or of those that were cut off: then this is the cause. Of several sets
of one size, that which leaves least is named. Difficulty and rewards are no causes where credit is
linear in the rewards, which ``Linearity`` tests; difficulty is none either where one question is
asked with several rewards. Place is none where all tokens of a reply have the same credit. Where
credit depends on which token of the vocabulary it is for, or grows with how likely that was or with
the entropy in its place, that is the cause instead (``Within``).

Shapes: Q = questions, P = parameters of one question, K = replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl_devkit.lab.problem import NAMES, Floats, Ints, Question, log_softmax

TINY = 1e-6
"""Residuals below this are rounding: the trainer computes in float32."""


@dataclass(frozen=True)
class Fit:
    """E and g over all questions."""

    cosine: float
    scale: float
    residual: float
    by_question: tuple[tuple[float, float], ...] = ()
    """Scale and residual of each question alone."""
    shares: dict[str, float] = field(default_factory=dict)
    """The residual's causes, those of ``CAUSES`` and ``other``, each with its share."""
    push: tuple[float, float] | None = None
    """Push on the length of right and of wrong replies, relative to the scale; negative: shorter.
    None: rewards are not right or wrong."""
    parameters: tuple[tuple[str, float], ...] = ()
    """Where most of the residual lies, each with its share of the residual's square."""

    @property
    def causes(self) -> list[str]:
        """The named causes: those with a large share of the residual."""
        least = max(SHOWN * self.residual, TINY)
        return [cause for cause, share in self.shares.items() if share >= least]

    @property
    def vanishes(self) -> bool:
        """Whether there is no update at all."""
        return self.cosine == 0 and self.scale == 0 and self.residual == 0


CAUSES = ("difficulty", "rewards", "turns", "length", "cut_off", "place", "apart")
OF_REWARDS = ("difficulty", "rewards")
"""Causes that are impossible if credit is linear in the rewards."""
SHOWN = 0.2
"""A cause is named if its share is at least this part of the residual."""
EXPLAINED = 0.02
"""Part of the residual that causes may leave, and explain it all the same."""
ALIKE = 10.0
"""Times the least that a set of causes leaves: below it, sets explain equally well."""


@dataclass(frozen=True)
class Within:
    """How credit is spread over the tokens of a reply."""

    is_even: bool = False
    """All tokens of a reply have the same credit."""
    by: str = ""
    """What a token's share of the credit depends on, if on one of these: ``token``, which one of
    the vocabulary it is; or rises or falls with: ``likelihood``, its probability; ``entropy``, that
    of the policy in its place."""


UNKNOWN = Within()


@dataclass(frozen=True)
class Apart:
    """What is left where all rewards are 0: [P] of each question."""

    updates: Sequence[Floats]
    goals: Sequence[Floats]
    """The gradients of the objective."""


@dataclass(frozen=True)
class Linearity:
    """How the expected update E(r) changes with the rewards. Credit is linear in the rewards of a
    group, up to a part that does not depend on them, if E(r / 4) - E(0) = (E(r) - E(0)) / 4 and E(r
    + s) - E(r) = E(s) - E(0) for other rewards s."""

    keeps_spread: bool
    """E(r / 4) = E(r), nearly: the spread of the rewards does not count."""
    keeps_level: bool
    """E(r + 1) = E(r), nearly."""
    is_proportional: bool
    is_additive: bool
    is_odd: bool
    """E(-r) - E(0) = -(E(r) - E(0))."""

    @property
    def holds(self) -> bool:
        return self.is_proportional and self.is_additive


def fit(
    questions: Sequence[Question],
    updates: Sequence[Floats],
    goals: Sequence[Floats],
    at: Sequence[Floats],
    is_linear: bool | None = None,
    likely: Sequence[str] = (),
    within: Within = UNKNOWN,
    apart: Apart | None = None,
) -> Fit:
    """``updates`` E and ``goals`` g, [P] of each question; ``at``: the logits of the policy;
    ``is_linear``: whether credit is linear in the rewards, None if not known; ``likely``:
    causes that other problems have shown, which come first where several explain the residual;
    ``within``: how the credit of a reply is spread; ``apart``: None, it is not known."""
    e = np.concatenate(updates)
    g = np.concatenate(goals)
    size = float(np.linalg.norm(e))
    if size < 1e-9 * max(1.0, float(np.linalg.norm(g))):
        return Fit(0.0, 0.0, 0.0)

    scale = float(e @ g / (g @ g))
    rest = e - scale * g
    residual = float(np.linalg.norm(rest)) / size
    binary = all(set(question.rewards) <= {0.0, 1.0} for question in questions)
    columns = _columns(questions, goals, at)
    columns["apart"] = [] if apart is None else _apart(apart, size)
    push = np.zeros(2)
    by_question = []
    for question, update, goal, logits in zip(questions, updates, goals, at, strict=True):
        of_question = float(update @ goal / (goal @ goal))
        left = update - of_question * goal
        of_size = max(float(np.linalg.norm(update)), 1e-30)
        by_question.append((of_question, float(np.linalg.norm(left)) / of_size))
        weights = _rest(update, [goal, *_levels(question, logits), *_push(question, logits)])[1]
        push += weights[-2:] / (abs(of_question) or 1.0) / len(questions)

    excluded = {*(OF_REWARDS if is_linear else ())}
    if within.is_even:
        excluded.add("place")
    elif within.by:
        excluded |= {"turns", "length", "cut_off", "place"}
    rest_is = within.by or "other"
    first = [_kind_of(apart, questions, at)] if apart is not None else []
    in_order = dict.fromkeys([*first, *(cause for cause in likely if cause in CAUSES), *CAUSES])
    possible = [cause for cause in in_order if cause not in excluded and columns[cause]]
    return Fit(
        cosine=float(e @ g / size / np.linalg.norm(g)),
        scale=scale,
        residual=residual,
        by_question=tuple(by_question),
        shares=(
            _shares(e, g, columns=columns, possible=possible, rest_is=rest_is)
            if residual >= TINY
            else {}
        ),
        push=(float(push[0]), float(push[1])) if binary else None,
        parameters=_largest(questions, rest),
    )


def _shares(
    e: Floats,
    g: Floats,
    columns: Mapping[str, Sequence[Floats]],
    possible: Sequence[str],
    rest_is: str,
) -> dict[str, float]:
    """Shares of the smallest set of causes that explains the residual. If no set explains it: of
    all causes where the rewards are one, else of none. ``rest_is``: the name of what they leave."""
    size = float(np.linalg.norm(e))
    before = float(np.linalg.norm(_rest(e, [g])[0]))
    chosen: Sequence[str] = possible if {*possible} & {*OF_REWARDS} else ()
    for number in range(1, len(possible) + 1):
        left = {}
        for causes in itertools.combinations(possible, number):
            every = [g, *(column for cause in causes for column in columns[cause])]
            left[causes] = float(np.linalg.norm(_rest(e, every)[0]))
        least = min(left.values())
        if least <= max(EXPLAINED * before, TINY * size):
            enough = max(ALIKE * least, TINY * size)
            chosen = next(causes for causes, rest in left.items() if rest <= enough)
            break

    shares = {}
    used = [g]
    for cause in chosen:
        used += columns[cause]
        after = float(np.linalg.norm(_rest(e, used)[0]))
        shares[cause] = float(np.sqrt(max(before**2 - after**2, 0.0))) / size
        before = after

    shares[rest_is] = before / size
    return shares


def _columns(
    questions: Sequence[Question], goals: Sequence[Floats], at: Sequence[Floats]
) -> dict[str, list[Floats]]:
    """[Q P] of each cause: each column is of one question, and 0 at the others."""
    columns: dict[str, list[Floats]] = {cause: [] for cause in CAUSES}
    sizes = [len(goal) for goal in goals]
    for number, (question, goal, logits) in enumerate(zip(questions, goals, at, strict=True)):
        of_question = {
            "difficulty": [goal] if _differ(questions) else [],
            "rewards": _levels(question, logits) if len({*question.rewards}) > 2 else [],
            "turns": _turns(question, logits),
            "length": _lengths(question, logits),
            "cut_off": _cut_off(question, logits),
            "place": _places(question, logits),
        }
        for cause, parts in of_question.items():
            for part in parts:
                pieces = [np.zeros(length) for length in sizes]
                pieces[number] = part
                columns[cause].append(np.concatenate(pieces))

    return columns


def _apart(apart: Apart, size: float) -> list[Floats]:
    """[Q P] each, those that are more than rounding beside an update of ``size``."""
    columns = [np.concatenate(apart.updates), np.concatenate(apart.goals)]
    return [column for column in columns if float(np.linalg.norm(column)) > TINY * size]


def _kind_of(apart: Apart, questions: Sequence[Question], at: Sequence[Floats]) -> str:
    """``length`` or ``cut_off`` if the update without rewards is one of the probability of replies
    of some length, or without a stop token, and nothing else; else ``apart``."""
    if any(goal.any() for goal in apart.goals):
        return "apart"
    for cause in ("length", "cut_off"):
        left = total = 0.0
        for question, update, logits in zip(questions, apart.updates, at, strict=True):
            # Those that are not weighted with rewards.
            of_length = cause == "length"
            columns = (
                _lengths(question, logits)[::2] if of_length else _cut_off(question, logits)[:1]
            )
            rest = _rest(update, columns)[0] if columns else update
            left += float(rest @ rest)
            total += float(update @ update)
        if left <= EXPLAINED**2 * total:
            return cause
    return "apart"


def _differ(questions: Sequence[Question]) -> bool:
    """Whether the questions differ in more than their rewards."""
    first = questions[0].logits
    return any(not np.array_equal(question.logits, first) for question in questions[1:])


def _rest(values: Floats, columns: Sequence[Floats]) -> tuple[Floats, Floats]:
    """The residual of ``values`` after least squares on ``columns``, and the weights."""
    matrix = np.stack(columns, 1)
    weights: Floats = np.linalg.lstsq(matrix, values, rcond=1e-9)[0].astype(np.float64)
    return values - matrix @ weights, weights


def _levels(question: Question, logits: Floats) -> list[Floats]:
    """[P] for each reward: the gradient of its probability. A sum of them, weighted with the
    rewards, is the gradient of the expected reward."""
    p = question.probabilities(logits)
    scores = question.scores(logits)
    return [(p * (question.rewards == reward)) @ scores for reward in sorted({*question.rewards})]


def _turns(question: Question, logits: Floats) -> list[Floats]:
    """[P] for two turns u and v: the rewards of turn u, on the tokens of turn v; and an equal
    credit of all replies that reach the last turn."""
    last = int(question.turns.max())
    if not last:
        return []
    credits = np.zeros((len(question.replies), last + 2))
    for k, reply in enumerate(question.replies):
        credits[k, : len(reply.turn_rewards)] = reply.turn_rewards
        credits[k, -1] = float(len(reply.turn_rewards) > last)

    return [
        _credited(question, logits, credit=credit, chosen=_of_turn(question, v))
        for credit in credits.T
        for v in range(last + 1)
    ]


def _lengths(question: Question, logits: Floats) -> list[Floats]:
    """[P] twice for each length: the gradient of the probability of the replies that have it, and
    the same weighted with their rewards."""
    p = question.probabilities(logits)
    scores = question.scores(logits)
    columns = []
    for length in np.unique(question.lengths):
        these = p * (question.lengths == length)
        columns += [these @ scores, (these * question.rewards) @ scores]
    return columns


def _cut_off(question: Question, logits: Floats) -> list[Floats]:
    """[P] thrice: the gradient of the probability of the replies without a stop token, the same
    weighted with their rewards, and that of all rewards: where such replies count for less, so does
    a question that has many of them."""
    p = question.probabilities(logits)
    these = p * question.is_cut_off
    scores = question.scores(logits)
    if not these.any():
        return []
    return [each @ scores for each in (these, these * question.rewards, p * question.rewards)]


def _places(question: Question, logits: Floats) -> list[Floats]:
    """[P] for each place, counted from the start and from the end: credit on the token there, equal
    for all replies, and equal to the reward."""
    longest = int(question.lengths.max())
    ones = np.ones(len(question.replies))
    columns = []
    for credit in (ones, question.rewards):
        for n in range(longest):
            columns.append(_credited(question, logits, credit=credit, chosen=_from_start(n)))
            columns.append(_credited(question, logits, credit=credit, chosen=_from_end(n)))
    return columns


Chooser: TypeAlias = Callable[[Ints, Ints], npt.NDArray[np.bool_]]
"""Chooses tokens [T] by the states and ranks of a reply's sampled tokens."""


def _of_turn(question: Question, turn: int) -> Chooser:
    return lambda states, ranks: question.turns[states] == turn


def _from_start(n: int) -> Chooser:
    return lambda states, ranks: ranks == n


def _from_end(n: int) -> Chooser:
    return lambda states, ranks: ranks == len(ranks) - 1 - n


def _credited(question: Question, logits: Floats, credit: Floats, chosen: Chooser) -> Floats:
    """[P] the expected update by ``credit`` [K] on the chosen tokens of each reply."""
    p = question.probabilities(logits)
    taken = np.zeros(logits.shape)
    for k, (states, tokens) in enumerate(question.places):
        sampled = np.array(question.replies[k].sampled)
        states = states[sampled]
        tokens = tokens[sampled]
        these = chosen(states, np.arange(len(states)))
        np.add.at(taken, (states[these], tokens[these]), p[k] * credit[k])

    policy = np.exp(log_softmax(logits))
    return np.asarray((taken - taken.sum(1, keepdims=True) * policy).ravel())


def _push(question: Question, logits: Floats) -> list[Floats]:
    """[P] twice: the gradient of the length of the replies above the mean reward, and of the
    others, each beyond their own mean length."""
    p = question.probabilities(logits)
    scores = question.scores(logits)
    good = question.rewards > p @ question.rewards
    columns = []
    for which in (good, ~good):
        beyond = question.lengths - np.average(question.lengths, weights=p * which)
        columns.append((p * beyond * which) @ scores)
    return columns


def _largest(
    questions: Sequence[Question], rest: Floats, most: int = 3
) -> tuple[tuple[str, float], ...]:
    squares = rest**2
    parameters = []
    total = float(squares.sum())
    if total == 0:
        return ()
    names = [
        f"{question.name}: {' '.join(NAMES[t] for t in prefix) or 'start'} -> {token}"
        for question in questions
        for prefix in question.states
        for token in NAMES
    ]
    for at in np.argsort(-squares)[:most]:
        parameters.append((names[at], float(squares[at]) / total))
    return tuple(parameters)
