"""What the checks measure in the windows of a history."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl_tools.doctor.history import History, Seen, Values

NOISE = 3.0
"""Standard errors from which on a change of the reward counts."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One finding, as plain text."""

    name: str
    """``entropy_collapse`` ..."""
    finding: str
    """What is wrong, in one sentence."""
    evidence: str
    """The numbers, with their steps."""
    threshold: str
    """From where on it counts, and why there."""
    advice: str
    """The keys to change, and in which direction."""
    env: str | None = None
    """The env it is about; None: the run."""

    @property
    def line(self) -> str:
        """Name, env and finding."""
        where = "" if self.env is None else f" in {self.env}"
        return f"{self.name}{where}: {self.finding}"


STALE = "stale"
"""Why a rollout was dropped that got too old."""


def max_of(name: str) -> str:
    return name.removesuffix("mean") + "max"


def mean_of(values: Values) -> float:
    return float(values.mean()) if len(values) else 0.0


def median_of(values: Values) -> float:
    return float(np.median(values)) if len(values) else 0.0


def span(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"


def by_env(seen: Iterable[Seen]) -> dict[str, list[Seen]]:
    rollouts_of: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        if each.rollout.is_live:
            rollouts_of[each.rollout.env].append(each)
    return rollouts_of


def centred_by(columns: Values, groups: Sequence[object]) -> Values:
    """Each row minus the mean of its group."""
    index = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    member = np.array([index[group] for group in groups])
    sums = np.zeros((len(index), columns.shape[1]))
    np.add.at(sums, member, columns)
    centred: Values = columns - (sums / np.bincount(member)[:, None])[member]
    return centred


def teaching_share(run: History, env: str) -> tuple[float, int]:
    """The share of an env's rollouts in the last window that have credit, and their number. From
    the saved rollouts; without them, the share that filters left."""
    of_env = by_env(run.last_rollouts).get(env)
    if of_env:
        decided = [each for each in of_env if each.dropped_by != STALE]
        return sum(each.teaches for each in decided) / max(len(decided), 1), len(decided)
    seen, kept = (run.values(f"batch/{env}/{key}", run.late).sum() for key in ("seen", "trainable"))
    return float(kept / max(seen, 1)), int(seen)


def increase(run: History, name: str) -> float:
    """How much a counter rose over the last window; a resumed run starts it again."""
    values = run.values(name, run.late)
    return float(np.diff(values).clip(0).sum()) if len(values) else 0.0


def mean_length(seen: Sequence[Seen]) -> float:
    return float(np.mean([each.rollout.num_trainable_tokens for each in seen]))


def most_common_reply(seen: Sequence[Seen]) -> tuple[float, bytes, int]:
    """The share of examples that got the most common reply, that reply, and their number."""
    pairs = {(each.reply, each.rollout.example_id) for each in seen if each.reply}
    examples = len({example for _, example in pairs})
    if not pairs:
        return 0.0, b"", 0
    reply, count = Counter(reply for reply, _ in pairs).most_common(1)[0]
    return count / examples, reply, examples


def share_of(run: History, parts: Sequence[str], whole: str) -> float:
    total = run.values(whole, run.late).sum()
    spent = sum(run.values(part, run.late).sum() for part in parts)
    return float(spent / total) if total > 0 else 0.0
