"""From numbers to sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prime_rl_devkit.lab.fit import TINY, Fit
from prime_rl_devkit.lab.proof import Estimate, Finding

SHOWN = 0.2
"""A cause is named if its share is at least this part of the residual."""


def findings(
    estimates: Sequence[Estimate], refused: Mapping[str, str], averages: bool
) -> Iterator[Finding]:
    """``averages``: the loss averages the tokens of a unit, so that its scale has no name."""
    for problem, said in refused.items():
        yield Finding("refused", problem, said)
    own = [each for each in estimates if not each.staleness]
    for problem in dict.fromkeys(each.problem for each in own):
        of_problem = [each for each in own if each.problem == problem]
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

        core = [*_of_fit(of_problem, "many", averages)]
        yield from core
        known = {finding.code for finding in core} - {"unbiased"}
        for finding in _of_fit(of_problem, "one", averages=True):
            if finding.code not in known | {"unbiased", "zero", "opposite"}:
                yield finding


def _of_fit(estimates: Sequence[Estimate], kind: str, averages: bool) -> Iterator[Finding]:
    """What the fits of one problem say, the largest group last."""
    last = estimates[-1]
    problem = estimates[-1].problem
    fits = [(each.group_size, getattr(each, kind)) for each in estimates]
    fit = fits[-1][1]
    when = kind if kind == "one" else ""
    if fit.vanishes:
        yield Finding("zero", problem, "the expected update is zero: nothing can be learned", when)
    elif fit.cosine < 0:
        text = f"the expected update points away from the gradient (cosine {fit.cosine:.3f})"
        yield Finding("opposite", problem, text, when)
    elif all(each.residual < TINY or each.vanishes for _, each in fits):
        named = problem in ("failed", "batch") or averages
        scales = [(n, each.scale) for n, each in fits if not each.vanishes]
        yield from _unbiased(problem, scales, when, named=named)
    else:
        text_of = {
            "difficulty": _difficulty,
            "turns": _turns,
            "rewards": _rewards,
            "length": _length,
            "other": _other,
        }
        for cause, share in fit.shares.items():
            if share >= max(SHOWN * fit.residual, TINY):
                text = f"{share:.1%} of the update is bias: {text_of[cause](last, fit)}"
                yield Finding(cause, problem, text, when)
        if fit.residual < TINY:  # a smaller group only
            smaller = ", ".join(f"{n}: {each.residual:.1%}" for n, each in fits[:-1])
            yield Finding("other", problem, f"biased in small groups ({smaller})", when)


def _unbiased(
    problem: str, scales: Sequence[tuple[int, float]], when: str, named: bool
) -> Iterator[Finding]:
    forms = {"": [1.0 for _ in scales], ", times 1 - 1/G": [1 - 1 / n for n, _ in scales]}
    claim = "an unbiased estimate of the declared gradient"
    for words, form in forms.items():
        if all(
            abs(scale - expected) < 1e-5 for (_, scale), expected in zip(scales, form, strict=True)
        ):
            yield Finding("unbiased", problem, claim + words, when)
            return

    text = ", ".join(f"{scale:.3g} at G = {n}" for n, scale in scales)
    yield Finding("unbiased", problem, f"{claim}, times {text}", when)
    if not named:
        said = f"the scale is {text}, neither 1 nor 1 - 1/G: check what the credit is divided by"
        yield Finding("scaled", problem, said, when)


def _difficulty(estimate: Estimate, fit: Fit) -> str:
    pairs = zip(estimate.rewards.items(), fit.by_question, strict=True)
    weights = ", ".join(f"{name} ({mean:.2f}): {scale:.2f}" for (name, mean), (scale, _) in pairs)
    return f"questions count by their difficulty (mean reward: weight; {weights})"


def _turns(estimate: Estimate, fit: Fit) -> str:
    return "the turns of a rollout count differently"


def _rewards(estimate: Estimate, fit: Fit) -> str:
    return (
        "rewards do not count in proportion to their size, as after a division by the group's "
        "standard deviation"
    )


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
    return f"most of it lies in {where}"
