"""What the page shows of a run, as plain values.

facts     name, model, each env's algorithm, curves           once, then what is new
table     one column a field, one entry a rollout             once, then what is new
chunks    the tokens of some rollouts, read when one is shown many
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.config.run import RunConfig
from prime_rl.rollout import Rollout
from prime_rl.rundir.rows import metrics_of, parse_row_of, whole_lines
from prime_rl_app.files import reading
from prime_rl_app.saved_rollouts import StoredRollout
from prime_rl_tools.replay.compare import credit
from prime_rl_tools.replay.score import Scored
from prime_rl_tools.report.exports import StepExports
from prime_rl_tools.report.tokens import DIGITS, columns_of, short

TEXT_LIMIT = 2000
"""Most characters shown of a value in ``info`` or ``task``."""


def describe(table: AlgoConfig) -> dict[str, Any]:
    """An algorithm and its settings."""
    return {"type": table.type, "settings": table.model_dump(mode="json", exclude={"type"})}


def facts(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """The values about the run as a whole."""
    return {
        "name": run_dir.resolve().name,
        "model": config.model.name,
        "max_steps": config.max_steps,
        "seed": config.seed,
        "seq_len": config.seq_len,
        "loss": config.trainer.loss.type,
    }


def differences(configs: Sequence[RunConfig]) -> list[list[str]]:
    """The keys in which runs differ, and each run's value."""
    flat = [dict(_flat(config.model_dump(mode="json"))) for config in configs]
    keys = sorted({key for each in flat for key in each} - {"run.name", "output_dir"})
    rows = [[key, *(each.get(key, "") for each in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(table: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(table, Mapping | list):
        items = table.items() if isinstance(table, Mapping) else enumerate(table)
        for name, value in items:
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, str(table)


def curves(path: Path, start: int = 0) -> tuple[dict[str, list[list[float]]], int]:
    """Every metric as ``[step, value]`` pairs, in the order of steps, from the byte ``start`` on;
    and the byte after them."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    if not path.exists():
        return {}, 0
    with reading(path):
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read()

        for line in filter(bytes.strip, whole_lines(lines)):
            record = metrics_of(parse_row_of(path, line))
            step = record["step"]
            for name, value in record.items():
                if name not in ("step", "time") and isinstance(value, int | float):
                    curves[name][step] = float(f"{value:.6g}")

    curves |= _dropped(curves)
    ordered = {
        name: [[step, value] for step, value in sorted(points.items())]
        for name, points in sorted(curves.items())
    }
    return ordered, start + lines.rfind(b"\n") + 1


def _dropped(curves: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """``train/A/all/is_dropped/mean``: the share of the rollouts considered for a batch that do not
    train, from the counts of the batch."""
    dropped = {}
    for name, seen in curves.items():
        label = name.removeprefix("batch/").removesuffix("/seen")
        if name != f"batch/{label}/seen":
            continue
        trainable = curves.get(f"batch/{label}/trainable", {})
        dropped[f"train/{label}/all/is_dropped/mean"] = {
            step: float(f"{1 - trainable[step] / number:.6g}")
            for step, number in seen.items()
            if number and step in trainable
        }

    return dropped


class Table:
    """The rollouts, one column per field; texts are stored as numbers."""

    TEXTS = ("set", "env", "agent", "dropped", "prompt")

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.texts: dict[str, dict[str, int]] = {name: {} for name in self.TEXTS}

    @property
    def num_rows(self) -> int:
        return len(self.columns["step"])

    def add(self, values: Mapping[str, Any]) -> None:
        """One rollout."""
        for name, value in values.items():
            if name in self.texts:
                value = self.texts[name].setdefault(value, len(self.texts[name]))
            self.columns[name].append(value)

    def since(self, row: int) -> dict[str, Any]:
        """``columns`` from a row on, and the ``texts`` of their numbers."""
        return {
            "columns": {name: values[row:] for name, values in self.columns.items()},
            "texts": {name: list(known) for name, known in self.texts.items()},
        }


def row(step: int, stored: StoredRollout, scored: Scored | None) -> dict[str, Any]:
    """The values of one rollout in the table."""
    rollout = stored.rollout
    again = {} if scored is None else {"credit_again": _mean_credit(scored.again)}
    return again | {
        "step": step,
        "env": rollout.env,
        "group": rollout.group_id,
        "episode": rollout.episode_id,
        "agent": rollout.agent,
        "example": rollout.example_id,
        "reward": round(float(rollout.reward), DIGITS),
        "credit": _mean_credit(rollout),
        "tokens": rollout.num_tokens,
        "sampled": rollout.num_trainable_tokens,
        "turns": rollout.num_turns,
        "version": rollout.policy_version,
        "dropped": stored.dropped_by or "",
    }


def _mean_credit(rollout: Rollout) -> float | None:
    """Mean advantage of its trainable tokens; None: none was assigned."""
    if all(sample.advantages is None for sample in rollout.samples):
        return None
    values = credit(rollout)
    return round(float(values.mean()), DIGITS) if len(values) else 0.0


def shown(stored: StoredRollout, scored: Scored | None, exports: StepExports) -> dict[str, Any]:
    """One rollout with its tokens."""
    rollout = stored.rollout
    return {
        "samples": list(_samples(stored, scored, exports)),
        "rewards": _numbers(rollout.rewards),
        "metrics": _numbers(rollout.metrics),
        "info": _texts(rollout.info),
        "task": _texts(rollout.task),
        "stop": rollout.stop_condition,
        "truncated": rollout.is_truncated,
        "source": rollout.source,
        "objections": dict(stored.objections),
    }


def _samples(
    stored: StoredRollout, scored: Scored | None, exports: StepExports
) -> Iterator[dict[str, Any]]:
    for index, sample in enumerate(stored.rollout.samples):
        columns = columns_of(sample) | {"temperature": sample.temperature}
        if stored.dropped_by is None:
            seen = exports.take(stored.rollout.env, sample)
            columns |= {name: _rounded(values) for name, values in seen.items()}
        if scored is not None:
            again = scored.again.samples[index].advantages
            if again is not None:
                columns["advantages_again"] = short(again)
        yield columns


def _rounded(values: Iterable[Any]) -> list[Any]:
    return [round(v, DIGITS) if isinstance(v, float) else v for v in values]


def _numbers(table: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in table.items()}


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in table.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        texts[name] = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + " …"
    return texts


def scale(values: Iterable[float | None]) -> float:
    """The credit that is drawn in full color: the 98th percentile, or 1.0 if all credit is 0."""
    sizes = [abs(value) for value in values if value]
    return float(f"{np.quantile(sizes, 0.98):.3g}") if sizes else 1.0
