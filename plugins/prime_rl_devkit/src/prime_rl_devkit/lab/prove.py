"""Prove an algorithm: its exact expected update against the gradient that it declares.

    for each problem, group size and staleness:
        every group of replies, with its probability -> its update (``updates``)
        sum -> expectation and variance (``estimate``) -> ``fit`` -> ``verdict``

Groups are multisets, weighted with the number of their orders, unless credit depends on the order.

Shapes: M = groups, P = parameters of a question.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from prime_rl import Algorithm, ConfigError, Loss, PluginConfig
from prime_rl_devkit.lab.estimate import Part, estimate
from prime_rl_devkit.lab.host import lab_host, reference_logits
from prime_rl_devkit.lab.losses import NoRatio, Ratio, components
from prime_rl_devkit.lab.objective import objective_gradient
from prime_rl_devkit.lab.problem import Floats, Problem, Question, shipped
from prime_rl_devkit.lab.proof import Estimate, Proof
from prime_rl_devkit.lab.updates import (
    Refused,
    Rows,
    Updates,
    pack_groups,
    score_groups,
    updates,
)
from prime_rl_devkit.lab.verdict import findings

SHIPPED = shipped()
MOST_GROUPS = 8_000
STEP = 0.8
"""How far one version moves the logits of a question, as a norm."""


def prove(
    algorithm: Algorithm,
    *,
    group_size: Sequence[int] | int = (2, 4),
    loss: Loss | str | None = None,
    normalize_by: str | None = None,
    staleness: Sequence[int] = (0, 1, 2),
    problems: Sequence[str | Problem] = tuple(SHIPPED),
) -> Proof:
    """The exact expected update of ``algorithm``, and what it estimates.

    ``loss``: of the rl component, an installed one by name or an instance; None: the default.
    ``normalize_by``: as in ``[trainer.loss]``; None: what the loss declares. ``problems``: by name
    (``plain``, ``graded``, ``two-turn``, ``failed``), or of your own. Staleness above 0 is computed
    for the first problem with the first group size. Raises ``ConfigError`` for what is not
    installed, and for numbers that are out of range.
    """
    sizes = [group_size] if isinstance(group_size, int) else [*group_size]
    if not sizes or min(sizes) < 1 or min(staleness, default=0) < 0:
        raise ConfigError(
            f"group sizes {sizes} and staleness {[*staleness]}: expected numbers from 1 and from 0"
        )
    subject = Subject(algorithm, loss, normalize_by)
    found: list[Estimate] = []
    refused: dict[str, str] = {}
    chosen = [SHIPPED[each] if isinstance(each, str) else each for each in problems]
    for problem, size in itertools.product(chosen, sizes):
        lags = staleness if (problem, size) == (chosen[0], sizes[0]) else [0]
        try:
            found += subject.estimates(problem, size, [*dict.fromkeys((0, *lags))])
        except Refused as error:
            refused.setdefault(problem.name, str(error))
    return Proof(
        algorithm=algorithm.name,
        loss=subject.divisor.cls.name,
        normalize_by=subject.divisor.unit,
        objective=subject.objective,
        estimates=tuple(found),
        refused=refused,
        findings=tuple(findings(found, refused, averages=subject.divisor.scales_tokens)),
    )


class Subject:
    """What is proved. Groups are scored by fresh instances."""

    def __init__(
        self, algorithm: Algorithm, loss: Loss | str | None, normalize_by: str | None
    ) -> None:
        self.algorithm = algorithm
        self.component = algorithm.action_loss
        self.losses = {"own": components(algorithm, loss, normalize_by)}
        if self.component == "rl":
            for other in (Ratio(PluginConfig()), NoRatio(PluginConfig())):
                self.losses[other.name] = components(algorithm, other, normalize_by)
        self.divisor = self.losses["own"][self.component]
        self.asked: dict[str, Asked] = {}

    @property
    def objective(self) -> str:
        """What it declares, in words."""
        declared = self.algorithm.objective
        if isinstance(declared, str):
            return declared.replace("_", " ")
        said = " ".join((declared.__doc__ or "its own function").partition("\n\n")[0].split())
        return said.rstrip(".").replace("``", "`")

    def estimates(self, problem: Problem, size: int, lags: Sequence[int]) -> Iterator[Estimate]:
        """At every staleness; above 0 also with the plain ratio, and without one."""
        for question in problem.questions:
            self.asked.setdefault(question.name, Asked(self, question))
        for lag in lags:
            for kind in self.losses if lag else ["own"]:
                parts = [
                    self.asked[question.name].part(size, problem.failing, lag, kind)
                    for question in problem.questions
                ]
                of_reward = self.algorithm.objective == "expected_reward"
                yield estimate(problem, size, lag, kind, parts, of_reward)


class Asked:
    """One question to the subject: every group of its replies, scored and packed."""

    def __init__(self, subject: Subject, question: Question) -> None:
        self.subject, self.question = subject, question
        self.reference = reference_logits(question)
        self.sampler = question
        if subject.algorithm.needs_frozen_source:
            self.sampler = replace(question, logits=self.reference)
        self.groups: dict[int, tuple[list[Rows], Floats]] = {}
        self.fresh: dict[int, Updates] = {}
        """Without staleness, by the number of rollouts."""

    def part(self, size: int, failing: float, lag: int, kind: str) -> Part:
        """Everything about one staleness and loss, over all numbers of rollouts that may be left of
        ``size``."""
        logits = self.logits(lag, size)
        found = Part(self.question, logits)
        for m in range(1 if failing else size, size + 1):
            share = math.comb(size, m) * (1 - failing) ** m * failing ** (size - m)
            each, weights = self.updates(m, lag, kind, logits), self.groups[m][1]
            found.add(share * weights, each, size)
            goal = self.goal(m, logits)
            if found.goal is not None:
                found.goal = None if goal is None else found.goal + share * m / size * goal
        return found

    def updates(self, m: int, lag: int, kind: str, logits: Floats) -> Updates:
        """Those of every group of ``m`` rollouts, which ``groups`` then has."""
        if m not in self.groups:
            groups, weights = self._groups(m)
            self.groups[m] = self._packed(groups), weights
        if not lag and m in self.fresh:
            return self.fresh[m]
        losses, component = self.subject.losses[kind], self.subject.component
        found = updates(self.sampler, self.groups[m][0], losses, logits, component)
        if not lag:
            self.fresh[m] = found
        return found

    def _packed(self, groups: Sequence[Sequence[int]]) -> list[Rows]:
        given = self.subject.algorithm
        host = lab_host(self.question, self.reference)
        scored = score_groups(type(given)(given.config), self.sampler, groups, host)
        return pack_groups(self.sampler, scored, self.subject.losses["own"])

    def _groups(self, m: int) -> tuple[list[tuple[int, ...]], Floats]:
        """Every group of ``m`` replies, and its probability [M]."""
        p = self.sampler.probabilities(self.sampler.logits)
        if self._ordered(m):
            if len(p) ** m > MOST_GROUPS:
                raise Refused(
                    f"cannot be proved with groups of {m}: credit depends on the order of the "
                    f"rollouts, which makes {len(p) ** m} groups, and the lab takes {MOST_GROUPS}. "
                    "Ask for smaller ones."
                )
            every = [*itertools.product(range(len(p)), repeat=m)]
            return every, np.prod(p[np.array(every)], 1)
        every = [*itertools.combinations_with_replacement(range(len(p)), m)]
        repeats = [math.prod(map(math.factorial, Counter(each).values())) for each in every]
        orders = math.factorial(m) / np.array(repeats, np.float64)
        return every, orders * np.prod(p[np.array(every)], 1)

    def _ordered(self, m: int) -> bool:
        """Whether the order of a group matters: declared, or measured on four groups."""
        if self.subject.algorithm.order_dependent or m == 1:
            return m > 1
        spread = np.linspace(0, len(self.sampler.replies) - 1, min(m, 3)).astype(int).tolist()
        drawn = np.random.default_rng(0).integers(len(self.sampler.replies), size=(3, m)).tolist()
        groups = [spread + [0] * (m - len(spread)), *drawn]
        losses, component = self.subject.losses["own"], self.subject.component
        for group in groups:
            rows = self._packed([*itertools.islice(itertools.permutations(group), 24)])
            steps = updates(self.sampler, rows, losses, self.question.logits, component).steps
            if np.abs(steps - steps[0]).max() > 1e-5:
                return True
        return False

    def logits(self, lag: int, size: int) -> Floats:
        """Of the policy in training, ``lag`` versions after the one that sampled: each has climbed
        the objective, or the expected reward where none is declared."""
        question, found = self.question, self.question.logits
        for _ in range(lag):
            p, scores = question.probabilities(found), question.scores(found)
            way = self.goal(size, found)
            way = (p * question.rewards) @ scores if way is None else way
            found = found + STEP * (way / np.linalg.norm(way)).reshape(found.shape)
        return found

    def goal(self, m: int, logits: Floats) -> Floats | None:
        """[P] the gradient of what is declared for groups of ``m``."""
        algorithm = self.subject.algorithm
        return objective_gradient(algorithm, self.sampler, logits, self.reference, m)
