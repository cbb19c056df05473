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
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from prime_rl import Algorithm, ConfigError, Loss, PluginConfig
from prime_rl.config.orchestrator import PartialGroupsConfig
from prime_rl.registry.checks import marked_hooks
from prime_rl.streams import stream, stream_names
from prime_rl.testing import members_wanted
from prime_rl_devkit.lab.estimate import Part, estimate
from prime_rl_devkit.lab.fit import Linearity, Within
from prime_rl_devkit.lab.host import lab_host, reference_logits
from prime_rl_devkit.lab.losses import NoRatio, Ratio, components
from prime_rl_devkit.lab.objective import objective_gradient
from prime_rl_devkit.lab.problem import (
    ENV,
    NAMES,
    OTHER_ENV,
    Floats,
    Problem,
    Question,
    X,
    Y,
    joint,
    shipped,
)
from prime_rl_devkit.lab.proof import Estimate, Proof
from prime_rl_devkit.lab.spread import ReplyCredit, reply_credits, within
from prime_rl_devkit.lab.stale import (
    HARDLY,
    Stale,
    StaleWeights,
    credited_updates,
    judge,
    merged,
    reweighted,
    weights_of,
)
from prime_rl_devkit.lab.updates import (
    Refused,
    Rows,
    Updates,
    pack_groups,
    score_groups,
    updates,
)
from prime_rl_devkit.lab.verdict import Memory, findings

SHIPPED = shipped()
QUARTER = 0.25
SPREAD = 4
"""Rows of a question by which the spread of credit over a reply is measured."""
SMALL = 1e-4
"""Part of an update that is rounding, where several updates are compared."""
NEARLY = 0.02
SOME = 16
"""Groups by which an update is compared, where all of them would take too long."""
MOST_GROUPS = 8_000
GROWTH = 1
"""Members that a group may have beyond its first size, where its algorithm asks for more."""
EXACT = "exact"
"""The update by the loss's own credit of fresh tokens, times the exact ratio of each reply."""
WITHOUT = "without"
"""The same, times 1."""
CREDITED = "credited"
"""The part of the update that grows with the credit."""
REPEATS = 8
"""Times that a group is scored to see whether its credit is random."""
STEP = 0.4
"""How far one version moves the logits of a question, as a norm."""


def prove(
    algorithm: Algorithm,
    *,
    group_size: Sequence[int] | int = (2, 4),
    loss: Loss | str | None = None,
    normalize_by: str | None = None,
    staleness: Sequence[int] = (0, 1, 2),
    problems: Sequence[str | Problem] = tuple(SHIPPED),
    partial_groups: PartialGroupsConfig | None = None,
    trainer: Mapping[str, Any] = MappingProxyType({}),
) -> Proof:
    """The exact expected update of ``algorithm``, and what it estimates.

    ``loss``: the loss of the rl component, an installed one by name or an instance; None: the
    default. ``normalize_by``: as in ``[trainer.loss]``; None: what the loss declares. ``problems``:
    by name (``plain``, ``graded``, ``signed``, ``two-turn``, ``failed``, ``failed-signed``,
    ``batch``, ``envs``), or of your own. A batch of several groups has groups of two, and is for
    algorithms whose credit depends on the other groups. Staleness above 0 is computed for the first
    problem with the first group size.
    ``partial_groups``: as in ``[orchestrator.partial_groups]``, where a reply takes as long as it
    has sampled tokens. ``trainer``: settings of losses and heads, as in the tables ``loss``,
    ``losses.NAME`` and ``heads.NAME`` of ``[trainer]``. Raises ``ConfigError`` for what is not
    installed, and for numbers that are out of range."""
    sizes = [group_size] if isinstance(group_size, int) else [*group_size]
    if not sizes or min(sizes) < 1 or min(staleness, default=0) < 0:
        raise ConfigError(
            f"group sizes {sizes} and staleness {[*staleness]}: expected numbers from 1 and from 0"
        )

    if partial_groups is not None and min(sizes) <= partial_groups.at_least:
        raise ConfigError(
            f"partial_groups: at_least = {partial_groups.at_least} and a group of {min(sizes)}: "
            "expected larger groups"
        )

    subject = ProofSubject(
        algorithm, loss, normalize_by=normalize_by, partial_groups=partial_groups, trainer=trainer
    )
    estimates: list[Estimate] = []
    refused: dict[str, str] = {}
    chosen = [SHIPPED[each] if isinstance(each, str) else each for each in problems]
    # First: what the problems leave in a class or a module would hide that it remembers.
    memory = subject.memory(chosen[0].questions[0]) if chosen else Memory()
    for problem, size in itertools.product(chosen, sizes):
        lags = staleness if (problem, size) == (chosen[0], sizes[0]) else [0]
        try:
            if problem.groups > 1 and (size != 2 or not subject.mixes_groups(problem)):
                continue
            if problem.failing and subject.grows:  # who fails is a part of what it decides by
                continue
            estimates += subject.estimates(problem, size, [*dict.fromkeys((0, *lags))])
        except Refused as error:
            refused.setdefault(problem.name, str(error))

    if not algorithm.order_dependent and partial_groups is None:
        memory = replace(memory, of_order=any(subject.ordered.values()))
    return Proof(
        algorithm=algorithm.name,
        loss=subject.divisor.cls.name,
        normalize_by=subject.divisor.unit,
        objective=subject.objective,
        estimates=tuple(estimates),
        refused=refused,
        findings=tuple(
            findings(
                estimates,
                refused,
                memory,
                averages=subject.divisor.scales_tokens,
                unit=subject.divisor.unit,
            )
        ),
    )


class ProofSubject:
    """What is proved. Groups are scored by fresh instances."""

    def __init__(
        self,
        algorithm: Algorithm,
        loss: Loss | str | None,
        normalize_by: str | None,
        partial_groups: PartialGroupsConfig | None = None,
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.algorithm = algorithm
        self.partial = partial_groups
        self.component = algorithm.action_loss
        self.losses = {
            "own": components(algorithm, loss, normalize_by=normalize_by, trainer=trainer)
        }
        if self.component == "rl":
            for other in (Ratio(PluginConfig()), NoRatio(PluginConfig())):
                tables = {name: table for name, table in trainer.items() if name != "loss"}
                self.losses[other.name] = components(
                    algorithm, other, normalize_by=normalize_by, trainer=tables
                )

        self.divisor = self.losses["own"][self.component]
        self.asked: dict[str, Asked] = {}
        self.zeros: dict[tuple[object, ...], Asked] = {}
        """The questions with all rewards at 0, by what else they have."""
        self.linear: dict[tuple[object, ...], Linearity | None] = {}
        self.causes: dict[str, None] = {}
        """Causes of bias that the problems have shown so far."""
        self.ordered: dict[tuple[object, ...], bool] = {}
        """Whether the order matters, by group size, replies and ranks of their rewards."""

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
            whole = estimate(problem, rollouts, lag=0, kind="own", parts=parts, of_reward=False)
            yield replace(whole, group_size=size)
            return

        for question in problem.questions:
            self.asked.setdefault(question.name, Asked(self, question))
        of_reward = self.algorithm.objective == "expected_reward"
        for lag in lags:
            parts_of = {
                kind: [
                    self.asked[question.name].part(size, problem.failing, lag=lag, kind=kind)
                    for question in problem.questions
                ]
                for kind in self.kinds(lag)
            }
            for kind, parts in parts_of.items():
                if kind in (WITHOUT, CREDITED):
                    continue
                estimated = partial(
                    estimate,
                    problem,
                    self.trained(size),
                    lag=lag,
                    kind=kind,
                    parts=parts,
                    of_reward=of_reward,
                )
                each = estimated()
                linearity = None
                if not lag and each.is_biased:
                    linearity = self.linearity(problem, size)
                    each = estimated(
                        is_linear=linearity.holds if linearity else None,
                        likely=[*self.causes],
                        within=self.within(problem, size),
                        unrewarded=self.unrewarded(problem, size, linearity),
                    )
                    self.causes.update(dict.fromkeys(each.many.causes if each.many else ()))

                stale = None
                if kind == "own" and EXACT in parts_of:
                    stale = self.stale(problem, size, lag=lag, parts=parts_of)
                yield replace(each, group_size=size, stale=stale, linearity=linearity)

    def within(self, problem: Problem, size: int) -> Within:
        """How credit is spread over the tokens of a reply, by some of the groups."""
        credits: list[ReplyCredit] = []
        for question in problem.questions:
            rows = self.asked[question.name].groups[size].rows
            some = {int(n) for n in np.linspace(0, len(rows) - 1, SPREAD)}
            for number in sorted(some):
                credits += reply_credits(rows[number], self.losses["own"], question.logits)
        return within(credits, known=self.causes)

    def unrewarded(self, problem: Problem, size: int, linearity: Linearity | None) -> list[Part]:
        """The questions with all rewards at 0, if credit is linear in them and something is left;
        a group of two shows that."""
        if linearity is None or not linearity.holds:
            return []
        zeros = []
        for question in problem.questions:
            # Questions that differ in their rewards only are one here.
            key = (question.logits.tobytes(), *(reply.tokens for reply in question.replies))
            if key not in self.zeros:
                nothing = question.rewarded("0", 0.0, np.zeros(len(question.replies)))
                self.zeros[key] = Asked(self, nothing)
            zeros.append(self.zeros[key])
        try:
            few = [each.part(min(size, 2), 0.0, lag=0, kind="own") for each in zeros]
            left = [part.many for part in few] + [
                part.goal for part in few if part.goal is not None
            ]
            if max(float(np.abs(each).max()) for each in left) < SMALL:
                return []
            return [each.part(size, problem.failing, lag=0, kind="own") for each in zeros]
        except Refused:
            return []

    def memory(self, question: Question) -> Memory:
        """Whether a group's credit changes after the same instance, or another instance in another
        env, has scored other groups of the same example; or whenever no seed is set."""
        best = int(question.rewards.argmax())
        worst = int(question.rewards.argmin())
        tested = (best, worst)
        every = [(k, other) for k in range(len(question.replies)) for other in (best, worst)]
        histories = [[(best, best)], [(worst, worst)], every]
        host = lab_host(question, reference_logits(question))
        examples = itertools.count(1)

        def score(
            algorithm: Algorithm, env: str, groups: Sequence[tuple[int, ...]], example: int
        ) -> list[Floats]:
            last = score_groups(
                algorithm,
                question,
                groups=groups,
                host=replace(host, env=env),
                partial=self.partial,
                example_id=example,
            )[-1]
            samples = [sample for rollout in last for sample in rollout.samples]
            columns = [stream(each, name) for each in samples for name in stream_names(each)]
            return [np.asarray(column, np.float64) for column in columns if column is not None]

        def made() -> Algorithm:
            return type(self.algorithm)(self.algorithm.config)

        def after_other(history: Sequence[tuple[int, ...]]) -> list[Floats]:
            example = next(examples)
            score(made(), OTHER_ENV, history, example)
            return score(made(), ENV, [tested], example)

        def seeded() -> list[Floats]:
            before = random.getstate(), np.random.get_state()
            random.seed(0)
            np.random.seed(0)
            try:
                return score(made(), ENV, [tested], next(examples))
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])

        def moves(settled: Sequence[list[Floats]]) -> bool:
            return any(differ(each, settled[-1]) for each in settled[1:])

        def differ(some: list[Floats], others: list[Floats]) -> bool:
            return len(some) != len(others) or not all(map(np.allclose, some, others))

        try:
            alone = score(made(), ENV, [tested], next(examples))
            free = [score(made(), ENV, [tested], next(examples)) for _ in range(REPEATS)]
            if moves(free) and not moves([seeded() for _ in range(REPEATS)]):
                return Memory(is_random=True)
            same = [score(made(), ENV, [*each, tested], next(examples)) for each in histories]
            others = [after_other(each) for each in histories]
        except Refused:
            return Memory()  # the problems say so
        remembers = any(differ(after, alone) for after in same)
        return Memory(
            of_instance=remembers and not self.algorithm.order_dependent,
            of_class=any(differ(after, alone) for after in others),
        )

    def linearity(self, problem: Problem, size: int) -> Linearity | None:
        """Whether credit is linear in the rewards of the last question. None: the algorithm refuses
        other rewards, or learns nothing from them."""
        question = problem.questions[-1]
        key = (question.name, *question.rewards, size)
        if key not in self.linear:
            found = self._linearity(question, min(size, 2))
            # The median of two rewards is their mean: larger groups may show what a pair hides.
            if found is not None and found.holds and size > 2 and not self.grows:
                is_additive = self._is_linear_in_groups(question, size)
                found = replace(found, is_additive=is_additive)
            self.linear[key] = found
        return self.linear[key]

    def _is_linear_in_groups(self, question: Question, size: int) -> bool:
        """Whether the update by each of a few groups of ``size`` is linear in its rewards. Only a
        few: the expected update by all of them takes seven times as long as the proof."""
        drawn = np.random.default_rng(11)
        groups = drawn.integers(len(question.replies), size=(SOME, size)).tolist()
        other = drawn.integers(-4, 5, len(question.replies)) / 4
        zero = np.zeros(len(question.replies))

        def update(name: str, factor: float, more: Floats) -> Floats:
            rows = Asked(self, question.rewarded(name, factor, more))._packed(groups)
            losses = self.losses["own"]
            made = updates(rows, losses, logits=question.logits, component=self.component)
            return made.steps * made.divisors[:, None]

        try:
            nothing = update("0", 0.0, zero)
            once = update("r", 1.0, zero)
            alone = update("s", 0.0, other)
            both = update("r + s", 1.0, other)
        except Refused:
            return True  # not in all of them: what pairs have shown stands
        unexplained = float(np.linalg.norm((both - once) - (alone - nothing)))
        return unexplained < SMALL * max(float(np.linalg.norm(each)) for each in (once, both))

    def _linearity(self, question: Question, size: int) -> Linearity | None:
        other = np.random.default_rng(7).integers(-4, 5, len(question.replies)) / 4
        zero = np.zeros(len(question.replies))

        def update(name: str, factor: float, more: Floats) -> Floats:
            asked = Asked(self, question.rewarded(name, factor, more))
            return asked.part(size, 0.0, lag=0, kind="own").many

        try:
            nothing = update("0", 0.0, zero)
            once = update("r", 1.0, zero)
            quarter = update("r / 4", QUARTER, zero)
            raised = update("r + 1", 1.0, zero + 1.0)
            alone = update("s", 0.0, other)
            both = update("r + s", 1.0, other)
            turned = update("-r", -1.0, zero)
        except Refused:
            return None
        norm = max(float(np.linalg.norm(each)) for each in (once, quarter, raised, both))
        if norm < SMALL:
            return None

        def is_zero(difference: Floats, part: float = SMALL) -> bool:
            return float(np.linalg.norm(difference)) < part * norm

        return Linearity(
            # A divisor may have a small number added to it.
            keeps_spread=is_zero(quarter - once, NEARLY),
            keeps_level=is_zero(raised - once, NEARLY),
            is_proportional=is_zero((quarter - nothing) - QUARTER * (once - nothing)),
            is_additive=is_zero((both - once) - (alone - nothing)),
            is_odd=is_zero((turned - nothing) + (once - nothing)),
        )

    def kinds(self, lag: int) -> list[str]:
        """Whose updates are compared at a staleness."""
        if not lag:
            return ["own"]
        return [*self.losses, EXACT, WITHOUT, CREDITED] if self.takes_a_ratio else [*self.losses]

    @property
    def grows(self) -> bool:
        """Whether it decides how many members a group has."""
        return "wanted_members" in marked_hooks(type(self.algorithm))

    @property
    def takes_a_ratio(self) -> bool:
        """Whether the loss weighs credit by how likely the policy is to sample a token now."""
        cls = self.divisor.cls
        return self.component == "rl" or ("advantages" in cls.reads and cls.compares_with_sampler)

    def stale(
        self, problem: Problem, size: int, lag: int, parts: Mapping[str, Sequence[Part]]
    ) -> Stale | None:
        """What the loss makes of samples that are ``lag`` versions old."""
        asked = [self.asked[each.name] for each in problem.questions]
        update, exact, without = (
            np.concatenate([part.many * part.acts for part in parts[kind]])
            for kind in (CREDITED, EXACT, WITHOUT)
        )
        return judge(
            merged([each.weights(size, lag) for each in asked]),
            merged([each.weights(size, lag, part=HARDLY) for each in asked]),
            update=update,
            exact=exact,
            without=without,
            lag=lag,
        )

    def trained(self, size: int) -> int:
        """Rollouts of a group of ``size`` that train, at most."""
        if self.grows:
            return min(size + GROWTH, self.algorithm.trains_at_most or size + GROWTH)
        cuts_off = self.partial is not None and self.partial.rest == "cancel"
        return self.partial.at_least if cuts_off and self.partial is not None else size

    def batches(self, problem: Problem) -> SeveralGroups:
        if problem.name not in self.asked:
            self.asked[problem.name] = SeveralGroups(self, problem)
        batches = self.asked[problem.name]
        assert isinstance(batches, SeveralGroups)
        return batches

    def mixes_groups(self, problem: Problem) -> bool:
        """Whether credit depends on the other groups of a batch."""
        cls = type(self.algorithm)
        over_groups = {"score_envs"} if problem.envs > 1 else {"score_batch", "score_envs"}
        if cls.order_dependent or not over_groups & {*marked_hooks(cls)}:
            return False
        return self.batches(problem).mixes()


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """All groups of one size, scored and packed."""

    groups: list[tuple[int, ...]]
    """[M] the replies of each."""
    probabilities: Floats
    """[M]"""
    rows: list[Rows]


def divides_by_length(
    question: Question, groups: Sequence[tuple[int, ...]], updates: Updates
) -> bool:
    """Whether the trainer's divisor depends on the lengths of a group's replies, and on nothing
    else: it counts tokens, sequences, rollouts or groups."""
    divisors: dict[tuple[float, ...], float] = {}
    for group, divisor in zip(groups, updates.divisors.tolist(), strict=True):
        lengths = tuple(sorted(question.lengths[[*group]].tolist()))
        if divisors.setdefault(lengths, divisor) != divisor:
            return False
    return True


class Asked:
    """One question to the subject: every group of its replies, scored and packed."""

    envs = 1
    """Envs of a batch."""

    def __init__(self, subject: ProofSubject, question: Question) -> None:
        self.subject = subject
        self.question = question
        self.reference = reference_logits(question)
        self.sampler = question
        if subject.algorithm.needs_frozen_source:
            self.sampler = replace(question, logits=self.reference)
        self.groups: dict[int, Groups] = {}
        self.fresh: dict[int, Updates] = {}
        """Without staleness, by the number of rollouts."""

    def part(self, size: int, failing: float, lag: int, kind: str) -> Part:
        """Everything about one staleness and loss, over all numbers of rollouts that may be left of
        ``size``."""
        logits = self.logits(lag, size)
        part = Part(self.question, logits)
        for m in range(1 if failing else size, size + 1):
            share = math.comb(size, m) * (1 - failing) ** m * failing ** (size - m)
            each = self.updates(m, lag, kind=kind, logits=logits)
            asked = self.groups[m]
            before = part.many.copy()
            part.add(share * asked.probabilities, each, self.subject.trained(size))
            part.divides_by_length &= divides_by_length(self.sampler, asked.groups, each)
            goal = self.goal(m, logits)
            if failing:
                part.left[m] = (part.many - before, goal)
            if part.goal is not None:
                part.goal = None if goal is None else part.goal + share * m / size * goal

        return part

    def updates(self, m: int, lag: int, kind: str, logits: Floats) -> Updates:
        """The updates of every group of ``m`` rollouts; they are then in ``groups``."""
        if m not in self.groups:
            groups, probabilities = self._groups(m)
            rows = self._packed(groups)
            self.groups[m] = Groups(groups=groups, probabilities=probabilities, rows=rows)

        if not lag and m in self.fresh:
            return self.fresh[m]
        component = self.subject.component
        rows = self.groups[m].rows
        losses = self.subject.losses["own"]
        if kind in (EXACT, WITHOUT):
            fresh = self.sampler.logits
            return reweighted(
                rows,
                losses,
                fresh=fresh,
                logits=logits,
                component=component,
                is_exact=kind == EXACT,
            )
        if kind == CREDITED:
            return credited_updates(rows, losses, logits=logits, component=component, lag=lag)
        made = updates(rows, self.subject.losses[kind], logits=logits, component=component, lag=lag)
        if not lag:
            self.fresh[m] = made
        return made

    def weights(self, size: int, lag: int, part: float = 1.0) -> StaleWeights:
        """How the loss weighs the credit of stale tokens in groups of ``size``, after ``part`` of
        the way."""
        asked = self.groups[size]
        losses = self.subject.losses["own"]
        fresh = self.sampler.logits
        possible = np.isfinite(fresh)
        way = np.where(possible, self.logits(lag, size), 0.0) - np.where(possible, fresh, 0.0)
        logits = fresh + part * way
        return weights_of(
            asked.rows,
            losses,
            fresh=fresh,
            logits=logits,
            lag=lag,
            probabilities=asked.probabilities,
        )

    def _packed(self, groups: Sequence[Sequence[int]], per_batch: int = 1) -> list[Rows]:
        algorithm = self.subject.algorithm
        host = lab_host(self.question, self.reference)
        host = replace(host, envs=(ENV, OTHER_ENV)[: self.envs])
        made = type(algorithm)(algorithm.config)
        scored = score_groups(
            made,
            self.sampler,
            groups=groups,
            host=host,
            per_batch=per_batch,
            partial=self.subject.partial,
            envs=min(self.envs, per_batch),
        )
        return pack_groups(self.sampler, scored, self.subject.losses["own"])

    def _groups(self, m: int) -> tuple[list[tuple[int, ...]], Floats]:
        """Every group of ``m`` replies, and its probability [M]."""
        p = self.sampler.probabilities(self.sampler.logits)
        if self.subject.grows:
            every = self._grown(m)
            return every, np.array([np.prod(p[[*group]]) for group in every])

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

    def _grown(self, m: int) -> list[tuple[int, ...]]:
        """Every group that begins with ``m`` replies and has the size that the algorithm asks for,
        ``GROWTH`` more at most."""
        number = len(self.sampler.replies)
        most = m + GROWTH
        if number**most > MOST_GROUPS:
            raise Refused(
                f"cannot be proved with groups of {m}: they grow to {most}, which makes "
                f"{number**most} groups, and the lab takes {MOST_GROUPS}. Ask for smaller ones."
            )

        groups: list[tuple[int, ...]] = []
        open_ones: list[tuple[int, ...]] = [(k,) for k in range(number)]
        while open_ones:
            first = open_ones.pop()
            rollouts = [self.sampler.rollout(k, 0) for k in first]
            algorithm = self.subject.algorithm
            wanted = members_wanted(algorithm, rollouts, group_size=m, max_group_size=most)
            if wanted <= len(first):
                groups.append(first[:wanted])
            else:
                open_ones += [(*first, k) for k in range(number)]
        return groups

    def _ordered(self, m: int) -> bool:
        """Whether the order of a group matters: declared, or measured on four groups, by an
        exchange and a rotation: every order is made of these."""
        if self.subject.algorithm.order_dependent or m == 1 or self.subject.partial is not None:
            return m > 1  # of equally long replies, the first ones are in the first part
        spread = np.linspace(0, len(self.sampler.replies) - 1, min(m, 3)).astype(int).tolist()
        drawn = np.random.default_rng(0).integers(len(self.sampler.replies), size=(3, m)).tolist()
        groups = [spread + [0] * (m - len(spread)), *drawn]
        orders = [[g, [*g[1::-1], *g[2:]], [*g[1:], g[0]]] for g in groups]
        rows = self._packed([order for same in orders for order in same])
        losses = self.subject.losses["own"]
        component = self.subject.component
        steps = updates(rows, losses, logits=self.question.logits, component=component).steps
        return bool(np.ptp(steps.reshape(len(groups), 3, -1), axis=1).max() > 1e-5)

    def logits(self, lag: int, size: int) -> Floats:
        """Logits of the policy in training, ``lag`` versions after the one that sampled. Each
        version climbs the objective, or the expected reward where no objective is declared."""
        question = self.question
        moved = self.question.logits
        for _ in range(lag):
            p = question.probabilities(moved)
            scores = question.scores(moved)
            way = self.goal(size, moved)
            way = (p * question.rewards) @ scores if way is None else way
            moved = moved + STEP * (way / np.linalg.norm(way)).reshape(moved.shape)

        return moved

    def goal(self, m: int, logits: Floats) -> Floats | None:
        """[P] the gradient of the declared objective for groups of ``m``."""
        algorithm = self.subject.algorithm
        return objective_gradient(
            algorithm, self.sampler, logits=logits, reference=self.reference, group_size=m
        )


class SeveralGroups(Asked):
    """Batches of several groups, each of a question that is drawn for it."""

    def __init__(self, subject: ProofSubject, problem: Problem) -> None:
        super().__init__(subject, joint(problem.questions))
        self.problem = problem
        self.envs = problem.envs
        self.in_order = False
        """Whether it matters which group of a batch comes first."""

    def steps(self, batches: Sequence[Sequence[int]], per_batch: int) -> Updates:
        rows = self._packed(batches, per_batch)
        losses = self.subject.losses["own"]
        component = self.subject.component
        return updates(rows, losses, logits=self.question.logits, component=component)

    def mixes(self) -> bool:
        """Whether the sum of a batch differs from the sum over its groups: measured on all pairs of
        six groups, in both orders; three of them are of the second question."""
        right, wrong = (int(f(self.question.rewards[: self.half])) for f in (np.argmax, np.argmin))
        of_first = [(right, wrong), (wrong, wrong), (right, right)]
        of_second = [(b + self.half, a + self.half) for a, b in of_first]
        pairs = [*itertools.permutations((*of_first, *of_second), 2)]
        together = self.steps([one + other for one, other in pairs], 2)
        sums = together.steps * together.divisors[:, None]
        alone = self.steps([*of_first, *of_second], 1)
        alone_sums = alone.steps * alone.divisors[:, None]
        of_pairs = [one + other for one, other in itertools.permutations(alone_sums, 2)]
        number = {pair: at for at, pair in enumerate(pairs)}
        turned = sums[[number[other, one] for one, other in pairs]]
        self.in_order = bool(np.abs(sums - turned).max() > 1e-5)
        return bool(np.abs(sums - of_pairs).max() > 1e-5)

    @property
    def half(self) -> int:
        """Replies of the first question."""
        return len(self.problem.questions[0].replies)

    def parts(self, size: int) -> list[Part]:
        """Each question's part of the update by a batch of two groups of ``size``."""
        p = self.sampler.probabilities(self.sampler.logits)
        groups: list[tuple[tuple[int, ...], float]] = []
        for replies in (range(self.half), range(self.half, len(p))):
            share = float(p[replies].sum())
            for group in itertools.combinations_with_replacement(replies, size):
                chance = share * float(np.prod(p[[*group]] / share)) * _orders(group)
                groups.append((group, chance))

        if self.in_order:
            pairs = [*itertools.product(groups, repeat=2)]
            weights = np.array([a[1] * b[1] for a, b in pairs])
        else:
            pairs = [*itertools.combinations_with_replacement(groups, 2)]
            weights = np.array([(1 + (a != b)) * a[1] * b[1] for a, b in pairs])
        groups_of_pairs = [a[0] + b[0] for a, b in pairs]
        steps = self.steps(groups_of_pairs, 2)
        goal = self.goal(size, self.question.logits)
        parts = []
        for name, question in zip((X, Y), self.problem.questions, strict=True):
            states = [self.question.states[(name, *prefix)] for prefix in question.states]
            at = np.arange(self.question.logits.size).reshape(-1, len(NAMES))[states].ravel()
            part = Part(question, question.logits)
            part.add(weights, replace(steps, steps=steps.steps[:, at]), 2 * size)
            part.divides_by_length = divides_by_length(self.sampler, groups_of_pairs, steps)
            part.goal = None if goal is None else goal[at]
            parts.append(part)

        return parts


def _orders(group: Sequence[int]) -> float:
    """In how many orders a multiset can be."""
    return math.factorial(len(group)) / math.prod(map(math.factorial, Counter(group).values()))
