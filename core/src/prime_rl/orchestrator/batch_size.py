"""What a batch holds: a number of rollouts, or of tokens.

A batch, what is buffered for it and what is requested for it are counted in places. With
``orchestrator.batch_size`` a rollout takes one place. With ``token_batch_size`` it takes as many as
its samples have tokens. How many that will be is not known when a rollout is requested, so it is
estimated by env: the mean of those that came back lately, at first the longest that may train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from prime_rl.rollout import Rollout

LATELY = 512
"""Rollouts of an env whose tokens the mean follows."""


class BatchSize:
    """The size of a batch, in places, and the places that rollouts take."""

    def __init__(self, rollouts: int | None, tokens: int | None = None, longest: int = 1) -> None:
        """Either ``rollouts`` or ``tokens``. ``longest``: tokens of the longest rollout."""
        self.by_tokens = rollouts is None
        self.places: int = (tokens or 0) if rollouts is None else rollouts
        self._longest = float(longest)
        self.means: dict[str, float] = {}
        """Tokens of a rollout, by env. Empty where rollouts are counted."""
        self._seen: Counter[str] = Counter()

    def of(self, rollout: Rollout) -> int:
        """The places that a finished rollout takes."""
        return rollout.num_tokens if self.by_tokens else 1

    def expected(self, env: str) -> float:
        """The places that a rollout of an env will take."""
        return self.means.get(env, self._longest) if self.by_tokens else 1.0

    def came_back(self, env: str, rollouts: Sequence[Rollout]) -> None:
        """Rollouts of an env: the estimate follows."""
        if not self.by_tokens or not rollouts:
            return

        mean = sum(map(self.of, rollouts)) / len(rollouts)
        # A running mean over the last LATELY rollouts; at first over all of them.
        self._seen[env] = min(self._seen[env] + len(rollouts), LATELY)

        before = self.means.get(env, mean)
        share = len(rollouts) / max(self._seen[env], len(rollouts))
        self.means[env] = max(before + share * (mean - before), 1.0)

    def resume(self, means: Mapping[str, float]) -> None:
        """Continue with the estimates of an earlier attempt."""
        self.means = dict(means) if self.by_tokens else {}
        self._seen = Counter(dict.fromkeys(self.means, LATELY))
