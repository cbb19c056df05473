"""From numbers to sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prime_rl_devkit.lab.fit import CAUSES, TINY, Fit
from prime_rl_devkit.lab.proof import SOUND, Estimate, Finding

CLOSE = 1e-3
"""Difference of two scales that are the same: a divisor may have a small number added to it."""
WORST = ("refused", "random", "shared", "memory", "off_mask", "opposite", "zero")
LEAST = ("scaled", "stale", "divisor", "unbiased", "beside", "undeclared")


@dataclass(frozen=True)
class Memory:
    """What credit depends on, beside what the class declares."""

    of_instance: bool = False
    """Groups that the same instance scored before."""
    of_class: bool = False
    """Groups that another instance scored: that of another env."""
    is_random: bool = False
    """The same group gets another credit each time, and the same one after a seed is set."""
    of_order: bool = False
    """The place of a rollout in its group."""


def findings(
    estimates: Sequence[Estimate],
    refused: Mapping[str, str],
    memory: Memory,
    averages: bool,
    unit: str,
) -> list[Finding]:
    """The worst first. ``averages``: the loss averages the tokens of a unit, so that its scale has
    no name; ``unit``: what the divisor counts."""
    if memory.is_random or memory.of_class or memory.of_instance:
        # The estimates mix groups that no run would mix: they say nothing.
        return [*_of_memory(estimates, memory)]
    listed = [
        *(Finding("refused", problem, said) for problem, said in refused.items()),
        *_of_fresh([each for each in estimates if not each.staleness], averages, unit),
        *_of_stale(estimates),
    ]
    if memory.of_order:
        at = next((each.problem for each in listed if each.code in BIASED), None)
        listed += [Finding("order", at, text=ORDER)] if at else []
    # One line for all problems, about the one where it is largest.
    divisors = [finding for finding in listed if finding.code == "divisor"]
    fresh = [each for each in estimates if not each.staleness]
    bias_of = {each.problem: each.one.residual for each in fresh if each.one is not None}
    divisors.sort(key=lambda finding: -bias_of[finding.problem])
    kept = [finding for finding in listed if finding not in divisors[1:]]
    return sorted(kept, key=_rank)


def _rank(finding: Finding) -> int:
    if finding.code in WORST:
        return WORST.index(finding.code)
    if finding.code in LEAST:
        return len(WORST) + 1 + LEAST.index(finding.code)
    return len(WORST)


def _of_memory(estimates: Sequence[Estimate], memory: Memory) -> Iterator[Finding]:
    problem = estimates[0].problem if estimates else ""
    if memory.is_random:
        text = (
            "the same group gets another credit each time that it is scored: the credit is random, "
            "so nothing can be proved, and no run can be repeated. Draw from a generator that is "
            "seeded with numbers of the rollout, such as its group_id"
        )
        yield Finding("random", problem, text)
    elif memory.of_class:
        text = (
            "the credit of a group depends on groups that another instance has scored, so on the "
            "rewards of other envs: the class or its module keeps state, or credit is random"
        )
        yield Finding("shared", problem, text)
    elif memory.of_instance:
        text = (
            "the credit of a group depends on the rewards of groups that were scored before, and "
            "the class does not declare order_dependent = True"
        )
        yield Finding("memory", problem, text)


def _of_fresh(fresh: Sequence[Estimate], averages: bool, unit: str) -> Iterator[Finding]:
    for problem in dict.fromkeys(each.problem for each in fresh):
        of_problem = [each for each in fresh if each.problem == problem]
        largest = of_problem[-1]
        if largest.off_mask > 1e-9:
            text = (
                "trains tokens that the policy did not sample: the gradient there is "
                f"{largest.off_mask:.2g} per rollout"
            )
            yield Finding("off_mask", problem, text)
        elif largest.observed > 1e-6:
            text = (
                "beside it, another loss trains the prediction of the environment's answers: "
                f"{largest.observed:.0%} of the update's norm"
            )
            yield Finding("beside", problem, text)

        if largest.many is None or largest.one is None:
            yield Finding("undeclared", problem, "declares no objective here, so nothing is proved")
            continue

        of_many = [*_of_fit(of_problem, "many", averages)]
        if problem in ALONE and _is_sound_in(fresh, WHOLE[problem]):
            at_fault = _wrong_when_left(of_problem)
            if at_fault:
                of_many = [Finding("failed", problem, text=at_fault)]
            elif not _is_sound(of_many):
                of_many = [_alone(largest, largest.many)]
        yield from of_many

        if largest.divides_by_length:
            if _is_sound(of_many) and largest.one.residual >= TINY:
                yield _divisor(largest, largest.one, unit)
            continue

        known = {finding.code for finding in of_many} - {"unbiased"}
        for finding in _of_fit(of_problem, "one", averages=True):
            if finding.code not in known | {"unbiased", "zero", "opposite"}:
                yield finding


OF_FAILED = "in groups of which a member failed, the others' credit is another"
ALONE = {
    "failed": OF_FAILED,
    "failed-signed": OF_FAILED,
    "batch": "the rewards of the other groups of a batch change a group's credit",
    "envs": "the rewards of the other envs of a batch change a group's credit",
}
"""What biases an estimate that is unbiased in whole groups of a batch of their own, by problem."""
WHOLE = {"failed": "plain", "failed-signed": "signed", "batch": "plain", "envs": "plain"}
"""The problem with whole groups of a batch of their own."""
ORDER = (
    "the credit of a rollout depends on its place in its group: two rollouts that change places do "
    "not change their credit with them"
)
BIASED = ("opposite", "zero", "other", "failed", "batch", "envs", *CAUSES)


def _is_sound(found: Sequence[Finding]) -> bool:
    return {finding.code for finding in found} <= SOUND


def _is_sound_in(fresh: Sequence[Estimate], problem: str) -> bool:
    fits = [each.many for each in fresh if each.problem == problem]
    return bool(fits) and all(
        fit is not None and fit.residual < TINY and fit.cosine > 0 for fit in fits
    )


def _wrong_when_left(estimates: Sequence[Estimate]) -> str:
    """What is wrong in the groups of which so many rollouts are left; empty: nothing."""
    for each in reversed(estimates):
        for m, (cosine, residual) in sorted(each.left.items()):
            of_those = f"where {m} of {each.group_size} are left"
            if cosine < 0:
                return f"{OF_FAILED}: {of_those}, it points away from the gradient"
            if residual >= TINY:
                return f"{OF_FAILED}: {of_those}, {residual:.1%} of the update is bias"
    return ""


def _alone(estimate: Estimate, fit: Fit) -> Finding:
    text = f"{fit.residual:.1%} of the update is bias: {ALONE[estimate.problem]}"
    if fit.cosine < 0:
        text = f"the expected update points away from the gradient: {ALONE[estimate.problem]}"
    code = "failed" if ALONE[estimate.problem] == OF_FAILED else estimate.problem
    return Finding(code, estimate.problem, text)


def _divisor(estimate: Estimate, fit: Fit, unit: str) -> Finding:
    text = (
        f"{fit.residual:.1%} of the update is bias, because the step is divided by its own number "
        f"of {unit}: {_length(estimate, fit)}"
    )
    return Finding("divisor", estimate.problem, text=text, when="one")


def _of_stale(estimates: Sequence[Estimate]) -> Iterator[Finding]:
    # The oldest samples first: their bias is the largest.
    for each in reversed(estimates):
        stale = each.stale
        if stale is None:
            continue
        code = "stale"
        if stale.is_fault:
            code = stale.code
        elif stale.code == "exact":
            code = "unbiased"
        yield Finding(code, each.problem, stale.text)


def _of_fit(estimates: Sequence[Estimate], kind: str, averages: bool) -> Iterator[Finding]:
    """What the fits of one problem say, the largest group last."""
    last = estimates[-1]
    problem = estimates[-1].problem
    fits = [(each.group_size, getattr(each, kind)) for each in estimates]
    fit = fits[-1][1]
    when = kind if kind == "one" else ""
    if fit.vanishes:
        yield Finding(
            "zero", problem, text="the expected update is zero: nothing can be learned", when=when
        )
    elif fit.cosine < 0:
        causes = "".join(f"; {TEXT_OF[cause](last, fit)}" for cause in fit.causes)
        text = (
            f"the expected update points away from the gradient (cosine {fit.cosine:.3f}){causes}"
        )
        yield Finding("opposite", problem, text=text, when=when)
    elif all(each.residual < TINY or each.vanishes for _, each in fits):
        named = problem in ALONE or averages
        scales = [(n, each.scale) for n, each in fits if not each.vanishes]
        yield from _unbiased(problem, scales, when, named=named)
    else:
        for cause in fit.causes:
            text = f"{fit.shares[cause]:.1%} of the update is bias: {TEXT_OF[cause](last, fit)}"
            yield Finding(cause, problem, text=text, when=when)
        if fit.residual < TINY:  # a smaller group only
            smaller = ", ".join(f"{n}: {each.residual:.1%}" for n, each in fits[:-1])
            yield Finding("other", problem, text=f"biased in small groups ({smaller})", when=when)


def _unbiased(
    problem: str, scales: Sequence[tuple[int, float]], when: str, named: bool
) -> Iterator[Finding]:
    forms = {"": [1.0 for _ in scales], ", times 1 - 1/G": [1 - 1 / n for n, _ in scales]}
    claim = "an unbiased estimate of the declared gradient"
    for words, form in forms.items():
        if all(
            abs(scale - expected) < CLOSE for (_, scale), expected in zip(scales, form, strict=True)
        ):
            yield Finding("unbiased", problem, text=claim + words, when=when)
            return

    text = ", ".join(f"{scale:.3g} at G = {n}" for n, scale in scales)
    yield Finding("unbiased", problem, text=f"{claim}, times {text}", when=when)
    if not named:
        said = f"the scale is {text}, neither 1 nor 1 - 1/G: check what the credit is divided by"
        yield Finding("scaled", problem, text=said, when=when)


def _difficulty(estimate: Estimate, fit: Fit) -> str:
    pairs = zip(estimate.rewards.items(), fit.by_question, strict=True)
    weights = ", ".join(f"{name} ({mean:.2f}): {scale:.2f}" for (name, mean), (scale, _) in pairs)
    return f"questions count by their difficulty (mean reward: weight; {weights})"


def _turns(estimate: Estimate, fit: Fit) -> str:
    return "the turns of a rollout count differently, or get the rewards of other turns"


def _rewards(estimate: Estimate, fit: Fit) -> str:
    linearity = estimate.linearity
    text = "rewards do not count in proportion to their size"
    if linearity is None:
        return text
    if linearity.keeps_spread and linearity.keeps_level:
        return (
            f"{text}, as after a division by the group's standard deviation, or with ranks: at a "
            "quarter of the spread the update is the same"
        )
    if linearity.keeps_spread:
        return (
            f"{text}, as after a division by the group's mean or its largest reward: at a quarter "
            "of the rewards the update is the same"
        )
    if not linearity.keeps_level:
        return f"{text}: one point more for every reply changes the update"
    if not linearity.is_proportional:
        return f"{text}: at a quarter of the spread the update is not a quarter"
    if not linearity.is_odd:
        return (
            f"{text}: good and bad rewards count differently, and with the sign of all rewards "
            "turned the update is not the opposite"
        )
    return f"{text}: the update by the sum of two rewards is not the sum of their updates"


def _place(estimate: Estimate, fit: Fit) -> str:
    return "tokens count by their place in the reply"


def _cut_off(estimate: Estimate, fit: Fit) -> str:
    return "replies that were cut off, without a stop token, count differently"


def _likelihood(estimate: Estimate, fit: Fit) -> str:
    return "tokens count by how likely the policy was to sample them"


def _token(estimate: Estimate, fit: Fit) -> str:
    return "tokens count by which token of the vocabulary they are, wherever they stand"


def _apart(estimate: Estimate, fit: Fit) -> str:
    return (
        "the part of the credit that does not depend on the rewards: with all rewards at 0, the "
        "update is not that of the objective"
    )


def _entropy(estimate: Estimate, fit: Fit) -> str:
    return "tokens count by the entropy of the policy in their place"


def _length(estimate: Estimate, fit: Fit) -> str:
    if fit.push is None:
        return "replies count by their length"
    good, bad = fit.push
    said = []
    if abs(good) >= 0.2 * abs(bad):
        said.append(f"{'long' if good > 0 else 'short'} replies when right")
    if abs(bad) >= 0.2 * abs(good):
        said.append(f"{'long' if bad > 0 else 'short'} replies when wrong")
    return f"towards {' and '.join(said)}"


def _other(estimate: Estimate, fit: Fit) -> str:
    where = "; ".join(f"{name} ({share:.0%})" for name, share in fit.parameters)
    return f"no cause that the lab knows, and most of it lies in {where}"


TEXT_OF: Mapping[str, Callable[[Estimate, Fit], str]] = {
    "difficulty": _difficulty,
    "rewards": _rewards,
    "length": _length,
    "turns": _turns,
    "cut_off": _cut_off,
    "place": _place,
    "likelihood": _likelihood,
    "entropy": _entropy,
    "token": _token,
    "apart": _apart,
    "other": _other,
}
"""The name of a cause, in words."""
