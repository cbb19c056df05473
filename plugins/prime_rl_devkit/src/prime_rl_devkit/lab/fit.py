"""An expected update beside the gradient of an objective: how much of it, and what else.

    E = s g + e        s = <E, g> / <g, g>        residual = |e| / |E|

The rest e has causes. Each is a further fit by least squares, and its share is the norm that the
fit takes off e, relative to |E|: a scale for each question, then for each turn of a question, then
the gradients of the probability of each reward, then those of the length of good and of bad
replies.

Shapes: Q = questions, P = parameters of one question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prime_rl_devkit.lab.problem import NAMES, Floats, Question

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
    """The residual's causes: ``difficulty``, ``turns``, ``rewards``, ``length`` and
    ``other``."""
    push: tuple[float, float] | None = None
    """Push on the length of right and of wrong replies, relative to the scale; negative: shorter.
    None: rewards are not right or wrong."""
    parameters: tuple[tuple[str, float], ...] = ()
    """Where most of the residual lies, each with its share of the residual's square."""

    @property
    def vanishes(self) -> bool:
        """Whether there is no update at all."""
        return self.cosine == 0 and self.scale == 0 and self.residual == 0


def fit(
    questions: Sequence[Question],
    found: Sequence[Floats],
    goals: Sequence[Floats],
    at: Sequence[Floats],
) -> Fit:
    """``found`` E and ``goals`` g, [P] of each question; ``at``: the logits of the policy."""
    e = np.concatenate(found)
    g = np.concatenate(goals)
    size = float(np.linalg.norm(e))
    if size < 1e-9 * max(1.0, float(np.linalg.norm(g))):
        return Fit(0.0, 0.0, 0.0)
    scale = float(e @ g / (g @ g))
    rest = e - scale * g
    by_question = []
    columns: dict[str, list[Floats]] = {
        cause: [] for cause in ("difficulty", "turns", "rewards", "length")
    }
    push = np.zeros(2)
    for question, own, goal, logits in zip(questions, found, goals, at, strict=True):
        own_scale = float(own @ goal / (goal @ goal))
        own_rest = own - own_scale * goal
        own_size = max(float(np.linalg.norm(own)), 1e-30)
        by_question.append((own_scale, float(np.linalg.norm(own_rest)) / own_size))
        turns = np.repeat(question.turns, len(NAMES))
        by_turn = [np.where(turns == turn, goal, 0.0) for turn in range(1, turns.max() + 1)]
        levels = _levels(question, logits)
        lengths = _lengths(question, logits)
        columns["difficulty"].append(own_rest)
        columns["turns"].append(_rest(own, [goal, *by_turn])[0])
        columns["rewards"].append(_rest(own, [goal, *by_turn, *levels])[0])
        last, weights = _rest(own, [goal, *by_turn, *levels, *lengths])
        columns["length"].append(last)
        push += weights[-2:] / (abs(own_scale) or 1.0) / len(questions)

    shares = {}
    before = float(np.linalg.norm(rest))
    for cause, parts in columns.items():
        after = float(np.linalg.norm(np.concatenate(parts)))
        shares[cause] = float(np.sqrt(max(before**2 - after**2, 0.0))) / size
        before = after

    shares["other"] = before / size
    cosine = float(e @ g / size / np.linalg.norm(g))
    residual = float(np.linalg.norm(rest)) / size
    binary = all(set(question.rewards) <= {0.0, 1.0} for question in questions)
    return Fit(
        cosine,
        scale,
        residual,
        tuple(by_question),
        shares,
        (float(push[0]), float(push[1])) if binary else None,
        _largest(questions, rest),
    )


def _rest(values: Floats, columns: Sequence[Floats]) -> tuple[Floats, Floats]:
    """What least squares on ``columns`` leaves of ``values``, and the weights."""
    matrix = np.stack(columns, 1)
    weights: Floats = np.linalg.lstsq(matrix, values, rcond=1e-9)[0].astype(np.float64)
    return values - matrix @ weights, weights


def _levels(question: Question, logits: Floats) -> list[Floats]:
    """[P] for each reward: the gradient of its probability. A sum of them, weighted with the
    rewards, is the gradient of the expected reward."""
    p = question.probabilities(logits)
    scores = question.scores(logits)
    return [(p * (question.rewards == reward)) @ scores for reward in sorted({*question.rewards})]


def _lengths(question: Question, logits: Floats) -> list[Floats]:
    """[P] twice: the gradient of the length of the replies above the mean reward, and of the
    others, each beyond their own mean length."""
    p = question.probabilities(logits)
    scores = question.scores(logits)
    good = question.rewards > p @ question.rewards
    found = []
    for which in (good, ~good):
        beyond = question.lengths - np.average(question.lengths, weights=p * which)
        found.append((p * beyond * which) @ scores)
    return found


def _largest(
    questions: Sequence[Question], rest: Floats, most: int = 3
) -> tuple[tuple[str, float], ...]:
    squares = rest**2
    found = []
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
        found.append((names[at], float(squares[at]) / total))
    return tuple(found)
