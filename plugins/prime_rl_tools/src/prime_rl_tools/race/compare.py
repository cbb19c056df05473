"""Which of several configs is better: paired differences, with intervals that hold at any time.

A pair is two runs of one seed. The differences of two configs are taken as normal with an unknown
mean and variance. The evidence against "the mean is m" is the Bayes factor of the t-test with a
normal prior, of variance g, on the effect size mean / sd and the right-Haar prior on the sd (Gönen
et al. 2005, The American Statistician 59(3), section 2). With n differences of standard deviation s
and t = sqrt(n) (their mean - m) / s:

    E_n(m) = (1 + n g)^(-1/2) [(1 + t^2 / (n - 1)) / (1 + t^2 / ((n - 1) (1 + n g)))]^(n / 2)

If the mean is m, E_n(m) ever exceeds 1/a with a probability of at most a (Hendriksen, de Heide and
Grünwald 2021, Bayesian Analysis 16(3), section 4). So the interval of all m with E_n(m) < 1/a
covers the mean at every n at once: one may look after each seed, and add seeds until it is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any

PRIOR = 6.0
"""Variance g of the effect size. About the value that makes intervals of 5 pairs shortest."""
LEVEL = 0.05
"""Probability that any interval of a race is ever wrong."""


def interval(differences: Sequence[float], level: float) -> tuple[float, float]:
    """The means that the differences do not rule out. Infinite for too few differences."""
    n = len(differences)
    grown = 1 + n * PRIOR
    if n < 2 or (ratio := (sqrt(grown) / level) ** (2 / n)) >= grown:
        return -inf, inf
    u = (ratio - 1) / (1 - ratio / grown)  # t^2 / (n - 1) at which E_n is 1 / level
    half = stdev(differences) * sqrt(u * (n - 1) / n)
    return fmean(differences) - half, fmean(differences) + half


@dataclass(frozen=True)
class Pair:
    """One config against another: held-out reward of ``better`` minus that of ``other``, where the
    first has the larger mean."""

    better: str
    other: str
    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def decided(self) -> bool:
        return self.low > 0

    def as_json(self) -> dict[str, Any]:
        """The fields; None for an infinite end of the interval."""
        return {k: None if v in (inf, -inf) else v for k, v in asdict(self).items()}

    @property
    def verdict(self) -> str:
        """One sentence."""
        seeds = f"{self.num_seeds} seed{'s' * (self.num_seeds != 1)}"
        if self.decided:
            sentence = f"{self.better} is better than {self.other} by {self.mean:.3f}"
        elif self.low == self.high == 0:
            return f"No difference found: {self.better} and {self.other} are equal in {seeds}."
        else:
            sentence = (
                f"No difference found between {self.better} and {self.other} ({self.mean:+.3f})"
            )

        if self.high == inf:
            return f"{sentence}: {seeds} {'is' if self.num_seeds == 1 else 'are'} too few to tell."
        return f"{sentence}: {seeds}, interval {self.low:+.3f} to {self.high:+.3f}."


def compare(rewards: Mapping[str, Mapping[int, float]], against: str | None = None) -> list[Pair]:
    """Every pair of configs, or only those of ``against``. ``rewards``: held-out reward by config
    and seed; seeds that a config lacks do not count for its pairs. The intervals of all these pairs
    hold together (Bonferroni)."""
    pairs = [pair for pair in combinations(rewards, 2) if against is None or against in pair]
    comparisons = []
    for first, second in pairs:
        seeds = sorted(rewards[first].keys() & rewards[second].keys())
        differences = [rewards[first][seed] - rewards[second][seed] for seed in seeds]
        mean = fmean(differences) if differences else 0.0
        names = (first, second) if mean >= 0 else (second, first)
        signed = differences if mean >= 0 else [-each for each in differences]
        comparisons.append(
            Pair(*names, abs(mean), *interval(signed, LEVEL / len(pairs)), num_seeds=len(seeds))
        )

    return comparisons
