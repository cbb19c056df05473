"""The runs of a race: one for each config and seed, one after the other, within one budget."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

import psutil

from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.rows import Step, each_row, read_rows, read_table
from prime_rl_app.config import load_config

RECORD = "race.json"
"""In the directory of a run whose result counts."""
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Budget:
    """What each run may use. All None: the ``max_steps`` of its config."""

    steps: int | None = None
    tokens: int | None = None
    """Tokens of the rollouts in trained batches, prompts included."""
    cpu_seconds: float | None = None
    """CPU seconds of every process of the run on this machine, its start included."""

    @property
    def needs_interval(self) -> bool:
        """Whether a run may end before its last step, so that an evaluation during it counts."""
        return self.tokens is not None or self.cpu_seconds is not None

    def allows(self, point: Point) -> bool:
        return (self.tokens is None or point.tokens <= self.tokens) and (
            self.cpu_seconds is None or point.cpu_seconds <= self.cpu_seconds
        )


@dataclass(frozen=True)
class Point:
    """A run at one of its evaluations."""

    step: int
    reward: float
    """Held out; the mean over the envs of ``[orchestrator.eval]``."""
    tokens: int
    cpu_seconds: float
    before: float | None = None
    """The reward before training. None: not measured."""


@dataclass(frozen=True)
class Entry:
    """A config of the race, with the arguments that made it."""

    name: str
    files: tuple[Path, ...]
    """The base, if there is one, and the config."""
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def path(self) -> Path:
        return self.files[-1]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()


def read_entries(
    paths: Sequence[Path], overrides: Sequence[str], budget: Budget, base: Path | None = None
) -> list[Entry]:
    """The configs, each laid over ``base``, checked before anything runs. Raises ``ConfigError``
    for configs that cannot be compared."""
    overrides = [*overrides, *([] if budget.steps is None else [f"--max_steps={budget.steps}"])]
    names = _names(paths)
    below = () if base is None else (base,)
    entries = [
        Entry(
            name,
            (*below, path),
            overrides=tuple(overrides),
            config=load_config([*below, path], overrides),
        )
        for name, path in zip(names, paths, strict=True)
    ]
    for entry in entries:
        evaluated = entry.config.orchestrator.eval.env
        if not evaluated:
            raise ConfigError(
                f"{entry.path}: no held-out env, so there is nothing to compare. Add a table "
                "[[orchestrator.eval.env]]."
            )

        if budget.needs_interval and any(env.interval is None for env in evaluated):
            raise ConfigError(
                f"{entry.path}: with a budget of tokens or CPU seconds, the last evaluation within "
                "the budget counts, and this config evaluates after its last step only. Set "
                "interval in each [[orchestrator.eval.env]]."
            )

        if _held_out(entry) != _held_out(entries[0]):
            raise ConfigError(
                f"{entry.path} and {entries[0].path} have different [orchestrator.eval] tables: "
                "their rewards cannot be compared. Make the tables equal."
            )

    if len(entries) < 2:
        raise ConfigError("a race needs two configs or more")
    return entries


def _names(paths: Sequence[Path]) -> list[str]:
    """The file names without their ending; with their folder where two are equal."""
    stems = [path.stem for path in paths]
    unique = len(set(stems)) == len(stems)
    names = stems if unique else [f"{path.absolute().parent.name}.{path.stem}" for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError(f"two configs have the same name: {', '.join(names)}. Rename a file.")
    return names


def _held_out(entry: Entry) -> Any:
    """What is evaluated and how. How often is each config's own affair."""
    table = entry.config.orchestrator.eval.model_dump()
    return {**table, "env": [{**env, "interval": None} for env in table["env"]]}


@dataclass(frozen=True)
class _Record:
    """What a finished run of a race leaves in its directory."""

    key: dict[str, Any]
    point: Point


def result_of(entry: Entry, seed: int, budget: Budget, folder: Path) -> tuple[Point, bool]:
    """The result of one run, and whether an earlier race had it already.

    Raises ``RunError`` if the run fails or measures nothing within the budget, ``ConfigError`` if
    its directory holds something else.
    """
    run_dir = folder / f"{entry.name}-seed{seed}"
    key = {"config": entry.digest, "seed": seed, "budget": asdict(budget)}
    with suppress(OSError, RunError):
        record: _Record = read_table(run_dir / RECORD, _Record)
        if record.key == key:
            return record.point, True

    if run_dir.exists():
        raise ConfigError(
            f"{run_dir} is not a finished run of this race: its config, budget or seed is another, "
            "or it was interrupted. Delete the folder, or race in another one (--output-dir)."
        )

    points = [
        point
        for point in _train(entry, seed, budget=budget, run_dir=run_dir)
        if budget.allows(point)
    ]
    if not points or (points[-1].step == 0 and entry.config.max_steps > 0):
        raise RunError(
            f"{run_dir}: no evaluation after training began is within the budget. Raise it, or "
            "evaluate more often (interval in [[orchestrator.eval.env]])."
        )

    before = points[0].reward if points[0].step == 0 else None
    point = replace(points[-1], before=before)
    (run_dir / RECORD).write_text(
        json.dumps({"key": key, "point": asdict(point)}, indent=2), "utf-8"
    )
    return point, False


def _train(entry: Entry, seed: int, budget: Budget, run_dir: Path) -> list[Point]:
    """Run until the end or until the budget is used. Raises ``RunError`` if the run fails."""
    log = run_dir.parent / f"{run_dir.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"),
        *(*map(str, entry.files), *entry.overrides, f"--seed={seed}"),
        *(f"--run.name={run_dir.name}", f"--output_dir={run_dir.parent}"),
    ]
    points: list[Point] = []
    num_envs = len(entry.config.orchestrator.eval.env)
    stopping = False
    used = 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(  # a Ctrl-C reaches the race, which then stops the run once
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                used = cpu_seconds(process.pid)
                with suppress(RunError):  # a file that cannot be read now: the next look reads it
                    points += _new_points(run_dir, num_envs, known=points, used=used)
                    spent = Point(0, 0.0, tokens=_tokens(run_dir), cpu_seconds=used)
                    if not stopping and not budget.allows(spent):
                        stopping = True
                        process.send_signal(signal.SIGINT)  # saves and stops
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # the user stopped the race
                process.send_signal(signal.SIGINT)
                process.wait()

    points += _new_points(run_dir, num_envs, known=points, used=used)
    if process.returncode not in ((0, 130) if stopping else (0,)):
        raise RunError(
            f"{run_dir.name} failed with exit code {process.returncode}; its output is {log}"
        )

    return points


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, those that have ended included."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
    return total


class _Eval(TypedDict):
    """The fields that are read of a line of ``evals.jsonl``."""

    step: Step
    reward: float


def _new_points(run_dir: Path, num_envs: int, known: Sequence[Point], used: float) -> list[Point]:
    """The evaluations since the last look, each of all envs at one step."""
    by_step: dict[int, list[float]] = {}
    for row in read_rows(run_dir / "evals.jsonl", _Eval):
        by_step.setdefault(row["step"], []).append(row["reward"])
    new = sorted(by_step.keys() - {point.step for point in known})
    return [
        Point(step, fmean(by_step[step]), tokens=_tokens(run_dir, step), cpu_seconds=used)
        for step in new
        if len(by_step[step]) == num_envs
    ]


def _tokens(run_dir: Path, step: int | None = None) -> int:
    """Tokens of the batches up to a step, or of all so far."""
    name = "progress/total_tokens"
    num_tokens = 0
    for row in each_row(run_dir / "metrics.jsonl"):
        value = row.get(name)  # as any metric, it may be written as 1000.0
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if step is None or row["step"] <= step:
            num_tokens = int(value)
    return num_tokens
