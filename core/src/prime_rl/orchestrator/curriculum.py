"""Which training envs are sampled, and with which weights: ``weight`` and ``opens`` of each env.

A weight is that of the batch that a group is chosen for. A gate reads the metrics of each batch
before it is sent, and what is chosen from then on may be of the env that it opens.

A gate reads the evaluation of version v with the batch of step v + 2, or with the first batch after
it. Version v + 1 waits for this evaluation, and batch v + 2 of a synchronous run for version v + 1:
so the step at which the gate opens does not depend on how long the evaluation takes.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean

import msgspec

from prime_rl.config.curriculum import GateConfig, env_of
from prime_rl.config.orchestrator import EnvConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.rewards import at_least

log = logging.getLogger(__name__)

STATE = "gates.json"


VERSIONS_LATER = 2
"""Steps between the version that was evaluated and the batch with which gates read the result."""


REWARD = "/all/reward/mean"
"""Ends the name of a metric that each evaluation with a rollout has."""


class Window(msgspec.Struct):
    """What a gate has read."""

    metric: str
    values: list[float]
    """The metric in the last batches or evaluations that reported it, oldest first."""
    version: int = -1
    """The last one whose evaluation it has read. -1: none."""


class State(msgspec.Struct):
    """``gates.json``"""

    open: list[str]
    windows: dict[str, Window]
    """By the env that the gate opens."""


class Curriculum:
    """The weights of a run's training envs, and their gates."""

    name = "curriculum"

    def __init__(
        self,
        envs: Sequence[EnvConfig],
        step: Callable[[], int],
        last_sent: Callable[[], int] = lambda: 1,
    ) -> None:
        """``step``: the batch that a group chosen now is for. ``last_sent``: the batch that
        was completed last, for the metrics."""
        self._envs = {env.label: env for env in envs if env.measure_every is None}
        self._step = step
        self._last_sent = last_sent
        self.gates = {label: env.opens for label, env in self._envs.items() if env.opens}
        """The gates, by the env that each opens."""
        self._open = {label for label in self._envs if label not in self.gates}
        self._windows: dict[str, deque[float]] = {
            label: deque(maxlen=gate.over) for label, gate in self.gates.items()
        }
        self._checked: set[str] = set()
        """Envs whose gate reads a metric that a batch has reported."""
        self._results: dict[str, dict[int, float]] = {label: {} for label in self.gates}
        """Results of evaluations that the gate has not read yet, by the evaluated version."""
        self._versions = dict.fromkeys(self.gates, -1)
        """The last version whose evaluation a gate has read."""

    @property
    def open_envs(self) -> list[str]:
        """The envs that are sampled, in the order of the config."""
        return [label for label in self._envs if label in self._open]

    @property
    def is_configured(self) -> bool:
        """Whether an env has a ``weight`` or ``opens``."""
        return bool(self.gates) or any(env.weight is not None for env in self._envs.values())

    @property
    def summary(self) -> str:
        """Each env with its weight now, or ``closed``."""
        states = [
            f"{env} {self.weight(env):.3g}" if env in self._open else f"{env} closed"
            for env in self._envs
        ]
        return ", ".join(states)

    def weight(self, env: str) -> float:
        """Its share of the batch that a group chosen now is for, relative to the other envs."""
        return self._envs[env].weight_at(self._step())

    def is_open(self, env: str) -> bool:
        """Whether a group of it may be chosen now."""
        gate = self.gates.get(env)
        if env not in self._open and gate is not None and gate.from_step is not None:
            step = self._step()
            if step >= gate.from_step:
                self._opens(env, f"for the batch of step {step}")
        return env in self._open

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one env's evaluation of a version: new ones, or those that an earlier
        attempt at the run has found. Raises ``RunError`` if the metric of a gate is not among those
        of its env."""
        for env, gate in self.gates.items():
            if gate.metric is None or not gate.reads_evaluation or env in self._open:
                continue
            if gate.metric in metrics:
                self._results[env][version] = metrics[gate.metric]
                continue

            # The gate's env was evaluated without its metric: the gate would never open.
            rewards = [name for name in metrics if name.endswith(REWARD)]
            if any(gate.metric.startswith(name.removesuffix(REWARD) + "/") for name in rewards):
                where = f"the evaluation of version {version}"
                _refuse(env, gate.metric, where=where, metrics=metrics)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the batch of ``step``. Raises ``RunError`` if a batch of the env that a
        gate names lacks its metric."""
        for env, gate in self.gates.items():
            if gate.metric is None or env in self._open:
                continue
            if gate.reads_evaluation:
                self._read_evaluations(env, gate, step)
                continue

            value = metrics.get(gate.metric, math.nan)
            if gate.metric in metrics:
                self._checked.add(env)
            elif env not in self._checked:
                self._check(env, gate.metric, step=step, metrics=metrics)

            if math.isnan(value):
                continue

            self._read(env, gate, value=value, when=f"after step {step}")

    def _read_evaluations(self, env: str, gate: GateConfig, step: int) -> None:
        """Those of versions that are old enough by the batch of ``step``, oldest first."""
        results = self._results[env]
        for version in sorted(results):
            # Reading it earlier would make the step depend on how long the evaluation takes.
            if version + VERSIONS_LATER > step or env in self._open:
                break

            value = results.pop(version)
            if version <= self._versions[env] or math.isnan(value):
                continue  # the same weights again

            self._versions[env] = version
            self._read(env, gate, value=value, when=f"after version {version}")

    def _read(self, env: str, gate: GateConfig, value: float, when: str) -> None:
        window = self._windows[env]
        window.append(value)
        mean = fmean(window)
        if len(window) == gate.over and _has_passed(gate, mean):
            self._opens(env, f"{when}: {gate.metric} is {mean:.4g}")

    def _opens(self, env: str, why: str) -> None:
        self._open.add(env)
        log.info("env %r opens %s", env, why)

    def _check(self, env: str, metric: str, step: int, metrics: Mapping[str, float]) -> None:
        reads = env_of(metric, self._envs)
        counts = {name for name in metrics if name.startswith("batch/") and name.endswith("/seen")}
        if reads is not None and counts and f"batch/{reads}/seen" not in counts:
            return  # no rollout of that env yet
        _refuse(env, metric, where=f"the batch of step {step}", metrics=metrics)

    def take_metrics(self) -> Mapping[str, float]:
        """Weight and gate of each env in the last batch, where the config has any."""
        if not self.is_configured:
            return {}
        step = self._last_sent()
        metrics = {}
        for label, env in self._envs.items():
            metrics[f"sampler/weight/{label}"] = env.weight_at(step)
            metrics[f"sampler/open/{label}"] = float(label in self._open)
        return metrics

    # -- checkpoint -------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the open envs, and what the gates have read. Raises ``OSError``."""
        windows = {
            label: Window(gate.metric, list(self._windows[label]), self._versions[label])
            for label, gate in self.gates.items()
            if gate.metric is not None
        }

        # `batch_sent` saves a second time, so a rename keeps the file of the checkpoint complete.
        temporary = directory / f".{STATE}"
        temporary.write_bytes(msgspec.json.encode(State(self.open_envs, windows)))
        temporary.replace(directory / STATE)

    def load(self, directory: Path) -> None:
        """Continue from what ``save`` wrote. An env that was open stays open; a gate that reads
        another metric now begins afresh. Raises ``ConfigError``."""
        path = directory / STATE
        try:
            state = msgspec.json.decode(path.read_bytes(), type=State)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not the saved gates of a run: {error}") from error

        self._open |= self._envs.keys() & set(state.open)
        for label, window in state.windows.items():
            gate = self.gates.get(label)
            if gate is not None and gate.metric == window.metric:
                self._windows[label].extend(window.values)
                self._versions[label] = window.version


def _refuse(env: str, metric: str, where: str, metrics: Mapping[str, float]) -> None:
    closest = get_close_matches(metric, metrics, n=8, cutoff=0.0)
    raise RunError(
        f"env {env!r}: opens.metric = {metric!r}, and {where} has no such metric. The closest of "
        f"its {len(metrics)} metrics: {', '.join(closest)}."
    )


def _has_passed(gate: GateConfig, mean: float) -> bool:
    if gate.at_least is not None:
        return at_least(mean, gate.at_least)
    return gate.at_most is not None and at_least(gate.at_most, mean)
