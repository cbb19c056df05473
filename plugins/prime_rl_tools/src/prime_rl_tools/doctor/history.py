"""The metrics and rollouts of a run, or of a segment of it, as the checks read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from prime_rl import Rollout
from prime_rl.rundir.rows import metrics_of, parse_row, read_table
from prime_rl_app.files import reading
from prime_rl_app.saved_rollouts import read_rollouts, step_files

Values = npt.NDArray[np.float64]

REWARD = "train/agg/all/reward/mean"
OF_ALL = (
    "batch/agg/seen",
    "mismatch_kl/all/mean",
    "off_policy/mean",
    "optim/grad_norm",
    "optim/lr",
    REWARD,
)
"""Metrics that a check reads outside of the windows too."""
MIN_STEPS = 12
"""Fewer steps hold no trend."""
MAX_WINDOW = 20
MAX_FILES = 8
"""Files of rollouts that are read per window, the last ones of it."""
PEAK = 0.5
"""Steps below this share of the highest learning rate are warm-up or decay."""


@dataclass(frozen=True)
class Seen:
    """One rollout of a window."""

    step: int
    rollout: Rollout
    dropped_by: str | None

    @property
    def teaches(self) -> bool:
        """Whether some token has credit, or trains by a loss without credit."""
        credit = self.rollout.advantages
        return self.rollout.trains_beside_rl or (credit is not None and bool(credit.any()))

    @property
    def reply(self) -> bytes:
        """The tokens that the policy sampled."""
        return b"|".join(s.token_ids[s.loss_mask].tobytes() for s in self.rollout.samples)


class History:
    """Steps ``first`` to ``last`` of a run. ``early`` and ``late`` are its first and last window: a
    quarter of the steps each, 20 at most. Raises ``RunError`` if a file is damaged."""

    def __init__(self, run_dir: Path, first: int = 1, last: int | None = None) -> None:
        self.run_dir = run_dir
        self.rows: dict[int, dict[str, Any]] = {}
        """The metrics ``OF_ALL`` of each step, and every metric of steps in a window: all metrics
        of a step take 100 KB."""
        path = run_dir / "metrics.jsonl"
        with reading(path), path.open("rb") if path.exists() else BytesIO() as file:
            places = list(self._begin(file))
            self.steps = sorted(
                step
                for step, row in self.rows.items()
                if step >= first and (last is None or step <= last) and "batch/agg/seen" in row
            )
            window = min(MAX_WINDOW, max(3, len(self.steps) // 4))
            self.early = self.steps[:window]
            self.late = self.steps[-window:]
            for step, start in places:
                if step in self.early or step in self.late:
                    file.seek(start)
                    self.rows[step].update(metrics_of(parse_row(file.readline())))

    def _begin(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Read the metrics ``OF_ALL``. Yields the step of each line, and where the line begins."""
        start = 0
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                row = metrics_of(parse_row(line, number=number))
                step = row["step"]
                kept = {name: row[name] for name in row if name in OF_ALL or is_held_out(name)}
                self.rows.setdefault(step, {}).update(kept)
                yield step, start
            start += len(line)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        path = self.run_dir / "configs" / "run.json"
        with reading(path):
            table: dict[str, Any] = read_table(path)
        return table

    def temperature_of(self, env: str) -> float:
        """At which an env is sampled."""
        train = self.config.get("orchestrator", {}).get("train", {})
        named = {each.get("name") or each["id"]: each for each in train.get("env", ())}
        of_env = named.get(env, {}).get("sampling") or {}
        shared = train.get("sampling", {}).get("temperature", 1.0)
        return float(of_env.get("temperature") or shared)

    @property
    def envs(self) -> list[str]:
        """Labels of the envs with scored rollouts in the last window."""
        return self._labels("batch/", "/seen")

    @property
    def requested_envs(self) -> list[str]:
        """Labels of the envs of which any rollout ended in the last window, also where all of them
        failed or were cancelled."""
        return sorted({*self.envs, *self._labels("train/", "/all/has_error/mean")})

    def _labels(self, prefix: str, suffix: str) -> list[str]:
        """What stands between the two in the names of metrics, without ``agg``."""
        labels = {
            name.removeprefix(prefix).removesuffix(suffix)
            for step in self.late
            for name in self.rows[step]
            if name.startswith(prefix) and name.endswith(suffix)
        }
        return sorted(labels - {"agg"})

    @cached_property
    def held_out(self) -> dict[str, list[float]]:
        """The rewards of each env's evaluations, in order. An evaluation without one is left
        out."""
        rewards = dict[str, list[float]]()
        for step in sorted(self.rows):
            for name, value in self.rows[step].items():
                if is_held_out(name) and value is not None and np.isfinite(value):
                    env = name.removeprefix(EVAL).removesuffix(EVAL_REWARD)
                    rewards.setdefault(env, []).append(float(value))
        return rewards

    def values(self, name: str, steps: list[int]) -> Values:
        """A metric at some steps; steps that lack it are left out. A metric that is not one
        ``OF_ALL``: at steps of the windows only."""
        assert name in OF_ALL or {*steps} <= {*self.early, *self.late}, name
        known = [self.rows[step][name] for step in steps if self.rows[step].get(name) is not None]
        return np.array([value for value in known if np.isfinite(value)], np.float64)

    @cached_property
    def at_peak(self) -> list[int]:
        """The steps near the run's peak learning rate; all where it is not known."""
        rates = {step: float(row.get("optim/lr") or 0.0) for step, row in self.rows.items()}
        peak = max(rates.values(), default=0.0)
        return [step for step in self.steps if rates[step] >= PEAK * peak]

    def change(self, name: str, early: list[int], late: list[int]) -> tuple[float, float]:
        """The difference of a metric's means, and in standard errors, which its variance within
        the windows gives. (0, 0) without values."""
        before = self.values(name, early)
        after = self.values(name, late)
        if len(before) < 2 or len(after) < 2:
            return 0.0, 0.0
        difference = float(after.mean() - before.mean())
        error = np.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
        return difference, difference / max(float(error), 1e-12)

    @cached_property
    def first_rollouts(self) -> list[Seen]:
        return list(self._read(self.early))

    @cached_property
    def last_rollouts(self) -> list[Seen]:
        return list(self._read(self.late))

    @cached_property
    def _files(self) -> dict[int, Path]:
        """The file of rollouts of each step that has one."""
        return step_files(self.run_dir)

    def _read(self, steps: list[int]) -> Iterator[Seen]:
        for step in [each for each in steps if each in self._files][-MAX_FILES:]:
            yield from self.read_step(step)

    def read_step(self, step: int) -> Iterator[Seen]:
        """The rollouts of one step."""
        number, rollouts, reasons = read_rollouts(self._files[step])
        for rollout, reason in zip(rollouts, reasons, strict=True):
            yield Seen(number, rollout, reason)


EVAL = "eval/"
EVAL_REWARD = "/all/reward/mean"


def is_held_out(name: str) -> bool:
    """Whether a metric is the mean reward of an evaluation."""
    return name.startswith(EVAL) and name.endswith(EVAL_REWARD)
