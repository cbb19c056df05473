"""One env's examples in order, without the retired ones.

A retired example is in exactly one pool. All other examples are normal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Pool = Literal["easy", "hard"]

POOLS: tuple[Pool, ...] = ("easy", "hard")


@dataclass
class EnvTally:
    """Counts of one env since the metrics were last read."""

    groups: int = 0
    rollouts: int = 0
    evicted: Counter[str] = field(default_factory=Counter)
    """Retired examples, by pool."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Rollouts that online difficulty filtering rejected, by kind."""

    def as_metrics(self, env: str) -> dict[str, float]:
        """``evicted_examples/...`` are shares of the env's groups, ``filtered_rollouts/...`` of its
        rollouts; 0.0 if there are none."""
        metrics = {}
        for pool in POOLS:
            metrics[f"evicted_examples/{env}/{pool}"] = self.evicted[pool] / max(self.groups, 1)
            metrics[f"filtered_rollouts/{env}/{pool}"] = self.filtered[pool] / max(self.rollouts, 1)
        return metrics


@dataclass
class Rotation:
    """The next example of one env, and its retired examples."""

    size: int | None
    """Number of the env's examples. None: unlimited, so none can be retired."""
    cursor: int = 0
    """The next example in order, unless it is retired."""
    retired: dict[int, Pool] = field(default_factory=dict)
    tally: EnvTally = field(default_factory=EnvTally)

    @property
    def num_normal(self) -> int | None:
        """Number of examples left. None: unlimited."""
        return None if self.size is None else self.size - len(self.retired)

    def next(self) -> int:
        """The next normal example, starting over at the end. At least one must be left."""
        while self.cursor in self.retired:
            self._advance()
        example = self.cursor
        self._advance()
        return example

    def retire(self, example: int, pool: Pool) -> None:
        """Retire a normal example. A retired example stays in its pool: a late group of the same
        example changes nothing."""
        if example not in self.retired:
            self.retired[example] = pool
            self.tally.evicted[pool] += 1

    def in_pool(self, pool: Pool) -> list[int]:
        """The examples of one pool, in the order of retirement."""
        return [example for example, where in self.retired.items() if where == pool]

    def state(self) -> dict[str, Any]:
        """Everything except the pools, as plain data."""
        tally = self.tally
        counts = {"groups": tally.groups, "rollouts": tally.rollouts}
        kinds = {"evicted": dict(tally.evicted), "filtered": dict(tally.filtered)}
        return {"cursor": self.cursor, **counts, **kinds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a ``state``. A cursor beyond the end (the env has fewer examples now) becomes 0."""
        cursor = int(state["cursor"])
        self.cursor = cursor if self.size is None or cursor < self.size else 0
        evicted = Counter(state["evicted"])
        filtered = Counter(state["filtered"])
        self.tally = EnvTally(
            int(state["groups"]), int(state["rollouts"]), evicted=evicted, filtered=filtered
        )

    def _advance(self) -> None:
        self.cursor = self.cursor + 1 if self.size is None else (self.cursor + 1) % self.size


def shares_of(name: str, rotations: Sequence[Rotation]) -> dict[str, float]:
    """Easy, normal and hard examples as shares of all examples of these envs."""
    total = sum(rotation.size or 0 for rotation in rotations)
    easy, hard = (sum(len(r.in_pool(pool)) for r in rotations) for pool in POOLS)
    counts = {"easy": easy, "normal": total - easy - hard, "hard": hard}
    return {f"{name}/{pool}": count / total for pool, count in counts.items()}
