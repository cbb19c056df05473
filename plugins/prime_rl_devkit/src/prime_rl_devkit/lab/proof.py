"""The result of a proof."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prime_rl_devkit.lab.fit import TINY, Fit, Linearity
from prime_rl_devkit.lab.stale import Stale


@dataclass(frozen=True)
class Estimate:
    """One problem at one group size and staleness under one loss."""

    problem: str
    group_size: int
    staleness: int
    """Versions between the policy that sampled and the one in training."""
    loss: str
    """``own``; at a staleness above 0 also ``ratio``, the importance ratio of each token without a
    clip, ``no_ratio``, and ``exact``: the credit of fresh tokens times the ratio of the reply."""
    one: Fit | None
    """A step of one group. None: no objective is declared here."""
    many: Fit | None
    """A step of many groups, whose divisor is its expectation. Scales are per rollout: the divisor
    is the number of rollouts."""
    noise: float
    """Variance of a step of one group, over the square of its part along the gradient."""
    against: Mapping[str, float]
    """``noise`` over that of ``reinforce`` (no baseline) and of ``rloo``, with as many rollouts."""
    off_mask: float
    """Expected sum of |dL/dlogπ| on tokens that may not train, per rollout."""
    observed: float
    """Share of the update's norm in the prediction of the environment's tokens."""
    divides_by_length: bool
    """Whether the divisor of a step counts tokens, sequences, rollouts or groups: it depends on the
    lengths of the replies, and on nothing else."""
    metrics: Mapping[str, float]
    """The loss's own shares of tokens, expected."""
    rewards: Mapping[str, float]
    """Expected reward of each question."""
    linearity: Linearity | None = None
    """Linearity of the algorithm's credit in the rewards of this problem. None: not known."""
    left: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Where members fail: cosine and residual of the update by the groups of which so many are
    left. Numbers without an update are missing."""
    stale: Stale | None = None
    """With a staleness: the loss beside the same credit under the exact ratio. None: the algorithm
    trains in another component than rl, which has no ratio."""

    @property
    def is_biased(self) -> bool:
        """Beyond rounding, in steps of one group or of many."""
        return any(fit is not None and fit.residual >= TINY for fit in (self.one, self.many))


SOUND = frozenset({"unbiased", "beside", "stale", "divisor"})
"""Codes of what no estimator is blamed for: what else it trains, what approximates the ratio of
stale samples, and the divisor of a step of one group."""


@dataclass(frozen=True)
class Finding:
    """One thing that the proof says."""

    code: str
    """A fault of the credit: ``opposite``, ``zero``, ``scaled``, ``failed``, ``batch``, ``envs``,
    ``order``, ``token``, ``likelihood``, ``entropy``, ``other``, ``off_mask``, or a cause
    (``fit.CAUSES``); of its state: ``memory``, ``shared``, ``random``; of the ratio of stale
    samples (``stale.FAULTS``). No fault: those of ``SOUND``. Nothing is known: ``refused``,
    ``undeclared``."""
    problem: str
    text: str
    when: str = ""
    """``one``: only in a step of one group, whose divisor varies with its replies."""


@dataclass(frozen=True)
class Proof:
    """What an algorithm's expected update is."""

    algorithm: str
    loss: str
    normalize_by: str
    objective: str
    estimates: tuple[Estimate, ...]
    refused: Mapping[str, str]
    """By problem: the group that the plugin, or core, refused, and why."""
    findings: tuple[Finding, ...]

    @property
    def codes(self) -> set[str]:
        """The codes of all findings."""
        return {finding.code for finding in self.findings}

    @property
    def is_unbiased(self) -> bool:
        """On every problem, up to the scale that is reported, with no fault in the ratio of stale
        samples. The divisor of a step of one group, and an approximation of the ratio, are reported
        apart (``SOUND``)."""
        return {"unbiased"} <= self.codes <= SOUND

    @property
    def headline(self) -> str:
        """The worst finding, as a sentence."""
        return self.verdict.partition("\n")[0]

    @property
    def residual(self) -> float:
        """The largest of a step of one group, without staleness. NaN: nothing was declared."""
        fits = [e.one for e in self.estimates if e.one is not None and not e.staleness]
        return max((fit.residual for fit in fits), default=math.nan)

    def estimate(self, problem: str = "plain", group_size: int | None = None) -> Estimate:
        """The first of a problem, without staleness. Raises ``LookupError``."""
        for each in self.estimates:
            if each.problem == problem and group_size in (None, each.group_size):
                return each
        raise LookupError(f"no estimate of the problem {problem!r} with groups of {group_size}")

    @property
    def verdict(self) -> str:
        """All findings as sentences, the worst first."""
        lines: list[str] = []
        for finding in self.findings:
            same = [f for f in self.findings if (f.text, f.when) == (finding.text, finding.when)]
            where = ", ".join(dict.fromkeys(f.problem for f in same))
            step = ", in a step of one group" if finding.when else ""
            line = f"{where}{step}: {finding.text}"
            if line not in lines:
                lines.append(line)

        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite are None."""
        plain: dict[str, Any] = _plain(asdict(self) | {"verdict": self.verdict})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
