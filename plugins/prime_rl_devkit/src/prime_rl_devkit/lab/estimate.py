"""Sums over all groups of a question, and what they say together.

Shapes: M = groups, P = parameters of a question, K = replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from prime_rl_devkit.lab.fit import UNKNOWN, Apart, Fit, Within, fit
from prime_rl_devkit.lab.problem import NAMES, Floats, Problem, Question
from prime_rl_devkit.lab.proof import Estimate
from prime_rl_devkit.lab.updates import Updates


class Part:
    """Sums over the groups of one question; ``logits`` are those of the policy in training."""

    def __init__(self, question: Question, logits: Floats) -> None:
        self.question = question
        self.logits = logits
        self.one = np.zeros(logits.size)
        self.many = np.zeros(logits.size)
        """[P] expected update of a step of one group, and of one whose divisor is the number of
        rollouts."""
        self.goal: Floats | None = np.zeros(logits.size)
        self.probability = self.square = self.divisor = self.off_mask = 0.0
        self.divides_by_length = True
        """Whether the trainer's divisor depends on lengths only."""
        self.metrics: dict[str, float] = {}
        self.acts = np.repeat(question.is_action, len(NAMES)).astype(np.float64)
        """[P] 1.0 for parameters of states in which the policy acts."""
        self.left: dict[int, tuple[Floats, Floats | None]] = {}
        """By the number of rollouts that are left of a group: update and goal."""

    def add(self, weights: Floats, each: Updates, size: int) -> None:
        """Groups with their probabilities [M], of ``size`` rollouts or what is left of them."""
        self.probability += float(weights.sum())
        self.one += weights @ each.steps
        self.many += weights @ (each.steps * each.divisors[:, None]) / size
        self.square += float(weights @ (each.steps**2 @ self.acts))
        self.divisor += float(weights @ each.divisors)
        self.off_mask += float(weights @ (each.off_mask * each.divisors)) / size
        for name, values in each.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(weights @ values)


def estimate(
    problem: Problem,
    size: int,
    lag: int,
    kind: str,
    parts: Sequence[Part],
    *,
    of_reward: bool,
    is_linear: bool | None = None,
    likely: Sequence[str] = (),
    within: Within = UNKNOWN,
    unrewarded: Sequence[Part] = (),
) -> Estimate:
    """All questions of a problem together. ``of_reward``: the objective is the expected reward;
    ``is_linear``: credit is linear in the rewards, None if that is not known. ``likely``: causes
    that earlier problems have shown. ``within``: how the credit of a reply is spread.
    ``unrewarded``: the same questions with all rewards at 0, where credit is linear in them."""
    off_mask = sum(part.off_mask for part in parts) / len(parts)
    # Observations that a loss imitates are no part of the estimate; those of a fault are.
    kept = [part.acts if off_mask < 1e-9 else np.ones(len(part.acts)) for part in parts]
    # The mean divisor, per rollout, of the steps that are taken: without rollouts there is none.
    divisor = sum(part.divisor / part.probability for part in parts) / len(parts) / size
    one = [part.one * mask * divisor for part, mask in zip(parts, kept, strict=True)]
    many = [part.many * mask for part, mask in zip(parts, kept, strict=True)]
    goals = [part.goal for part in parts if part.goal is not None]
    fits: list[Fit | None] = [None, None]
    if len(goals) == len(parts):
        questions = [part.question for part in parts]
        at = [part.logits for part in parts]
        # A divisor that counts something else than lengths may depend on the rewards.
        by_length = all(part.divides_by_length for part in parts)
        of_one = is_linear if by_length else None
        zeros = [part.goal for part in unrewarded if part.goal is not None]
        aparts: list[Apart | None] = [None, None]
        if unrewarded and len(zeros) == len(parts):
            pairs = [*zip(unrewarded, kept, strict=True)]
            aparts = [
                Apart([part.one * mask * divisor for part, mask in pairs], zeros),
                Apart([part.many * mask for part, mask in pairs], zeros),
            ]
        fits = [
            fit(
                questions,
                updates,
                goals=goals,
                at=at,
                is_linear=linear,
                likely=likely,
                within=within,
                apart=apart,
            )
            for updates, linear, apart in zip((one, many), (of_one, is_linear), aparts, strict=True)
        ]

    noise = _noise(parts, fits[0], divisor)
    against = {}
    if of_reward and not lag and not problem.failing:
        against = {name: noise / other for name, other in _references(parts, size).items()}
    total = sum(float(part.many @ part.many) for part in parts)
    observed = sum(float((part.many * (1 - part.acts)) @ part.many) for part in parts)
    means = [p.question.probabilities(p.logits) @ p.question.rewards for p in parts]
    return Estimate(
        problem=problem.name,
        group_size=size,
        staleness=lag,
        loss=kind,
        one=fits[0],
        many=fits[1],
        noise=noise,
        against=against,
        off_mask=off_mask,
        observed=math.sqrt(observed / total) if total else 0.0,
        divides_by_length=all(part.divides_by_length for part in parts),
        metrics=_mean_metrics(parts),
        rewards={p.question.name: float(mean) for p, mean in zip(parts, means, strict=True)},
        left=_left(parts, kept),
    )


def _left(parts: Sequence[Part], kept: Sequence[Floats]) -> dict[int, tuple[float, float]]:
    """Cosine and residual of the update by the groups with so many rollouts; those without an
    update are missing."""
    found = {}
    for m in parts[0].left:
        update = np.concatenate([p.left[m][0] * mask for p, mask in zip(parts, kept, strict=True)])
        goals = [p.left[m][1] for p in parts]
        if any(goal is None for goal in goals):
            continue
        goal = np.concatenate([each for each in goals if each is not None])
        size = float(np.linalg.norm(update))
        length = float(np.linalg.norm(goal))
        if size < 1e-9 * max(1.0, length) or not length:
            continue
        scale = float(update @ goal) / length**2
        residual = float(np.linalg.norm(update - scale * goal)) / size
        found[m] = (float(update @ goal) / size / length, residual)

    return found


def _mean_metrics(parts: Sequence[Part]) -> dict[str, float]:
    """Each over the questions that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(listed) / len(listed) for name, listed in sorted(values.items())}


def _noise(parts: Sequence[Part], found: Fit | None, divisor: float) -> float:
    """Variance over the square of the part along the gradient, summed over questions."""
    means = [part.one * part.acts for part in parts]
    variance = sum(p.square - float(m @ m) for p, m in zip(parts, means, strict=True)) * divisor**2
    goals = [part.goal for part in parts if part.goal is not None]
    scale = 0.0 if found is None else found.scale
    signal = scale**2 * sum(float(goal @ goal) for goal in goals)
    return variance / signal if signal > 1e-18 else math.inf


def _references(parts: Sequence[Part], size: int) -> dict[str, float]:
    """The same noise of REINFORCE without a baseline and of RLOO, for the mean of a group."""
    variances = {"reinforce": 0.0} | ({"rloo": 0.0} if size > 1 else {})
    length = 0.0
    for part in parts:
        p = part.question.probabilities(part.logits)
        scores = part.question.scores(part.logits)
        r = part.question.rewards
        squares = (scores**2).sum(1)
        gradient = (p * r) @ scores
        norm_squared = float(gradient @ gradient)
        length += norm_squared
        variances["reinforce"] += (float((p * r**2) @ squares) - norm_squared) / size
        if size > 1:
            variances["rloo"] += rloo_square(p, r, scores=scores, size=size) - norm_squared

    return {name: variance / length for name, variance in variances.items()}


def rloo_square(p: Floats, r: Floats, scores: Floats, size: int) -> float:
    """E |1/G sum_i (r_i - mean of the others) S_i|^2 for replies with probabilities and rewards [K]
    and scores [K, P]."""
    mean = p @ r
    squares = (scores**2).sum(1)
    of_others = (p @ r**2 - mean**2) / (size - 1)
    alone = float(p @ (((r - mean) ** 2 + of_others) * squares))
    # i != j: E[S] = 0, so only the terms with r_i S_i and r_j S_j remain.
    gradient = (p * r) @ scores
    pairs = float(gradient @ gradient) * (1 + 1 / (size - 1) ** 2)
    return (alone + (size - 1) * pairs) / size
