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
from prime_rl.registry.checks import marked_hooks
from prime_rl_devkit.lab.estimate import Part, estimate
from prime_rl_devkit.lab.host import lab_host, reference_logits
from prime_rl_devkit.lab.losses import NoRatio, Ratio, components
from prime_rl_devkit.lab.objective import objective_gradient
from prime_rl_devkit.lab.problem import NAMES, Floats, Problem, Question, X, Y, joint, shipped
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
    (``plain``, ``graded``, ``two-turn``, ``failed``, ``batch``), or of your own. A batch of several
    groups has groups of two, and is for algorithms whose credit depends on the other groups.
    Staleness above 0 is computed for the first problem with the first group size. Raises
    ``ConfigError`` for what is not installed, and for numbers that are out of range.
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
            if problem.groups > 1 and (size != 2 or not subject.mixes_groups(problem)):
                continue
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
        self.ordered: dict[tuple[object, ...], bool] = {}
        """By group size, replies and ranks of their rewards: whether the order matters."""

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
        if problem.groups > 1:
            parts = self.batches(problem).parts(size)
            rollouts = size * problem.groups
            found = estimate(problem, rollouts, 0, "own", parts, of_reward=False)
            yield replace(found, group_size=size)
            return

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

    def batches(self, problem: Problem) -> Batches:
        if problem.name not in self.asked:
            self.asked[problem.name] = Batches(self, problem)
        found = self.asked[problem.name]
        assert isinstance(found, Batches)
        return found

    def mixes_groups(self, problem: Problem) -> bool:
        """Whether credit depends on the other groups of a batch."""
        cls = type(self.algorithm)
        if cls.order_dependent or "score_batch" not in marked_hooks(cls):
            return False
        return self.batches(problem).mixes()


class Asked:
    """One question to the subject: every group of its replies, scored and packed."""

    def __init__(self, subject: Subject, question: Question) -> None:
        self.subject = subject
        self.question = question
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
            each = self.updates(m, lag, kind, logits)
            weights = self.groups[m][1]
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
        losses = self.subject.losses[kind]
        component = self.subject.component
        found = updates(self.sampler, self.groups[m][0], losses, logits, component)
        if not lag:
            self.fresh[m] = found
        return found

    def _packed(self, groups: Sequence[Sequence[int]], per_batch: int = 1) -> list[Rows]:
        given = self.subject.algorithm
        host = lab_host(self.question, self.reference)
        scored = score_groups(type(given)(given.config), self.sampler, groups, host, per_batch)
        return pack_groups(self.sampler, scored, self.subject.losses["own"])

    def _groups(self, m: int) -> tuple[list[tuple[int, ...]], Floats]:
        """Every group of ``m`` replies, and its probability [M]."""
        p = self.sampler.probabilities(self.sampler.logits)
        ranks = np.unique(self.sampler.rewards, return_inverse=True)[1].tolist()
        key = (m, *(reply.tokens for reply in self.sampler.replies), *ranks)
        if key not in self.subject.ordered:
            self.subject.ordered[key] = self._ordered(m)
        if self.subject.ordered[key]:
            if len(p) ** m > MOST_GROUPS:
                raise Refused(
                    f"cannot be proved with groups of {m}: credit depends on the order of the "
                    f"rollouts, which makes {len(p) ** m} groups, and the lab takes {MOST_GROUPS}. "
                    "Ask for smaller ones."
                )
            every = [*itertools.product(range(len(p)), repeat=m)]
            return every, np.prod(p[np.array(every)], 1)

        every = [*itertools.combinations_with_replacement(range(len(p)), m)]
        orders = np.array([_orders(each) for each in every])
        return every, orders * np.prod(p[np.array(every)], 1)

    def _ordered(self, m: int) -> bool:
        """Whether the order of a group matters: declared, or measured on four groups, by an
        exchange and a rotation: every order is made of these."""
        if self.subject.algorithm.order_dependent or m == 1:
            return m > 1
        spread = np.linspace(0, len(self.sampler.replies) - 1, min(m, 3)).astype(int).tolist()
        drawn = np.random.default_rng(0).integers(len(self.sampler.replies), size=(3, m)).tolist()
        groups = [spread + [0] * (m - len(spread)), *drawn]
        orders = [[g, [*g[1::-1], *g[2:]], [*g[1:], g[0]]] for g in groups]
        rows = self._packed([order for same in orders for order in same])
        losses = self.subject.losses["own"]
        component = self.subject.component
        steps = updates(self.sampler, rows, losses, self.question.logits, component).steps
        return bool(np.ptp(steps.reshape(len(groups), 3, -1), axis=1).max() > 1e-5)

    def logits(self, lag: int, size: int) -> Floats:
        """Of the policy in training, ``lag`` versions after the one that sampled: each has climbed
        the objective, or the expected reward where none is declared."""
        question = self.question
        found = self.question.logits
        for _ in range(lag):
            p = question.probabilities(found)
            scores = question.scores(found)
            way = self.goal(size, found)
            way = (p * question.rewards) @ scores if way is None else way
            found = found + STEP * (way / np.linalg.norm(way)).reshape(found.shape)

        return found

    def goal(self, m: int, logits: Floats) -> Floats | None:
        """[P] the gradient of what is declared for groups of ``m``."""
        algorithm = self.subject.algorithm
        return objective_gradient(algorithm, self.sampler, logits, self.reference, m)


class Batches(Asked):
    """Batches of several groups, each of a question that is drawn for it."""

    def __init__(self, subject: Subject, problem: Problem) -> None:
        super().__init__(subject, joint(problem.questions))
        self.problem = problem

    def steps(self, batches: Sequence[Sequence[int]], per_batch: int) -> Updates:
        rows = self._packed(batches, per_batch)
        losses = self.subject.losses["own"]
        component = self.subject.component
        return updates(self.sampler, rows, losses, self.question.logits, component)

    def mixes(self) -> bool:
        """Whether a batch's sum is another than that of its groups: measured on the three pairs of
        three groups, one of them of the second question."""
        right, wrong = (int(f(self.question.rewards[: self.half])) for f in (np.argmax, np.argmin))
        groups = [(right, wrong), (wrong, wrong), (wrong + self.half, right + self.half)]
        both = [(*one, *other) for one, other in itertools.combinations(groups, 2)]
        together = self.steps(both, 2)
        alone = self.steps(groups, 1)
        sums = alone.steps * alone.divisors[:, None]
        pairs = [one + other for one, other in itertools.combinations(sums, 2)]
        return bool(np.abs(together.steps * together.divisors[:, None] - pairs).max() > 1e-5)

    @property
    def half(self) -> int:
        """Replies of the first question."""
        return len(self.problem.questions[0].replies)

    def parts(self, size: int) -> list[Part]:
        """Each question's part of the update by a batch of two groups of ``size``."""
        p = self.sampler.probabilities(self.sampler.logits)
        groups: list[tuple[tuple[int, ...], float]] = []
        for own in (range(self.half), range(self.half, len(p))):
            share = float(p[own].sum())
            for group in itertools.combinations_with_replacement(own, size):
                chance = share * float(np.prod(p[[*group]] / share)) * _orders(group)
                groups.append((group, chance))

        pairs = [*itertools.combinations_with_replacement(groups, 2)]
        weights = np.array([(1 + (a != b)) * a[1] * b[1] for a, b in pairs])
        found = self.steps([a[0] + b[0] for a, b in pairs], 2)
        goal = self.goal(size, self.question.logits)
        parts = []
        for name, question in zip((X, Y), self.problem.questions, strict=True):
            states = [self.question.states[(name, *prefix)] for prefix in question.states]
            at = np.arange(self.question.logits.size).reshape(-1, len(NAMES))[states].ravel()
            part = Part(question, question.logits)
            part.add(weights, replace(found, steps=found.steps[:, at]), 2 * size)
            part.goal = None if goal is None else goal[at]
            parts.append(part)

        return parts


def _orders(group: Sequence[int]) -> float:
    """In how many orders a multiset can be."""
    return math.factorial(len(group)) / math.prod(map(math.factorial, Counter(group).values()))
