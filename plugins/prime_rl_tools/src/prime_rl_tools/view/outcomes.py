"""The outcomes of the rollouts that a reward leaves out, because it is the mean of rollouts that
ended well.

A reward that rises because the hard rollouts fail, or are cut off or dropped, is no progress. So
these shares stand beside it wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from prime_rl.rundir.rows import each_row
from prime_rl_app.run_states import REWARD as REWARD

Row = Mapping[str, Any]
"""Metrics of one step."""


KEYS = {"failed": "has_error", "truncated": "is_truncated", "cancelled": "cancelled"}
_NAMES = (
    *(f"train/agg/all/{key}/mean" for key in KEYS.values()),
    *("batch/agg/seen", "batch/agg/trainable", REWARD),
)
_Batch = TypedDict("_Batch", dict.fromkeys(_NAMES, float | None), total=False)  # type: ignore[misc]
"""The fields that are read of a line of ``metrics.jsonl``."""

LISTED = ("failed", "truncated", "dropped", "cancelled")
MANY_FAILED = 0.01
"""Share of failed rollouts that is shown as an error."""


def outcomes(row: Row, label: str = "agg") -> dict[str, float]:
    """Shares of the rollouts of one batch: failed and cancelled of those that ended, truncated and
    dropped (by age, a filter or the sampler) of those that were considered for it. Values that the
    row does not have are left out."""
    shares = {word: row.get(f"train/{label}/all/{key}/mean") for word, key in KEYS.items()}
    seen, trainable = (row.get(f"batch/{label}/{key}") for key in ("seen", "trainable"))
    if seen and trainable is not None:
        shares["dropped"] = 1 - trainable / seen
    return {word: float(shares[word]) for word in LISTED if shares.get(word) is not None}  # type: ignore[arg-type]


def mean_outcomes(rows: Iterable[Row]) -> dict[str, float]:
    """The means over steps, each over those that know it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for word, share in outcomes(row).items():
            values.setdefault(word, []).append(share)
    return {word: sum(values[word]) / len(values[word]) for word in LISTED if word in values}


def read_batches(path: Path) -> Iterator[Row]:
    """The metrics of each line of ``metrics.jsonl`` that are read here."""
    for row in each_row(path, _Batch):
        yield {name: row[name] for name in _NAMES if name in row}


def outcomes_text(shares: Mapping[str, float]) -> str:
    """``failed 20.0%, truncated 0.0%, dropped 3.1%``. Empty if nothing is known."""
    shown = {word: share for word, share in shares.items() if share or word != "cancelled"}
    return ", ".join(f"{word} {_percent(share)}" for word, share in shown.items())


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def outcomes_style(shares: Mapping[str, float]) -> str:
    return "red" if shares.get("failed", 0.0) >= MANY_FAILED else "dim"
