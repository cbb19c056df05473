"""What the highest value of a held-out metric decides: the checkpoint that stays (``[ckpt] best``),
and the end of the run (``[stop]``)."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from prime_rl.config.run import RunConfig, StopConfig
from prime_rl.errors import ConfigError
from prime_rl.rundir.checkpoints import BEST, checkpoints_dir
from prime_rl.rundir.control import STOP
from prime_rl.rundir.status import replace_text

log = logging.getLogger(__name__)

LINK = "best"


class BestCheckpoint:
    """Writes ``checkpoints/best.json``, which keeps that checkpoint from being deleted, and the
    link ``checkpoints/best``. Step 0, the first weights, has no checkpoint and no link."""

    def __init__(self, metric: str | None, run_dir: Path) -> None:
        self._metric, self._folder = metric, checkpoints_dir(run_dir)
        self.step, self.value = 0, float("-inf")

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of the weights of ``step``. Raises ``ConfigError`` if it lacks the
        metric."""
        value = _value("ckpt.best", self._metric, metrics)
        if value is None:
            return
        if value > self.value:
            self.step, self.value = step, value
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_text(self._folder / BEST, json.dumps([self.step, step]))
        link = self._folder / f".{LINK}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"step_{self.step}")
        link.replace(self._folder / LINK)
        if not self.step:
            (self._folder / LINK).unlink()
        log.info("%s: best %.4f at step %d", self._metric, self.value, self.step)


class EarlyStop:
    """Ends the run as Ctrl-C would, once the metric has reached its goal or stopped to rise."""

    def __init__(self, config: StopConfig, run_dir: Path) -> None:
        self._config, self._marker = config, run_dir / STOP
        self._best, self._step, self._fruitless = float("-inf"), 0, 0

    def measured(self, step: int, metrics: Mapping[str, float], *, may_end: bool) -> None:
        """An evaluation of the weights of ``step``. Raises ``ConfigError`` if it lacks the
        metric."""
        config = self._config
        value = _value("stop.metric", config.metric, metrics)
        if value is None:
            return
        if value > self._best:
            self._best, self._step, self._fruitless = value, step, 0
        else:
            self._fruitless += 1
        reached = config.reach is not None and value >= config.reach
        if may_end and (reached or self._fruitless >= config.patience):
            why = (
                f"reached {config.reach:g}"
                if reached
                else f"no new best in {self._fruitless} evaluations"
            )
            text = (
                f"early stop: {config.metric} is {value:.4f} at step {step}, {why}; best "
                f"{self._best:.4f} at step {self._step}"
            )
            log.info("%s", text)
            self._marker.write_text(text)


def check(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a metric is not measured at the steps where it decides."""
    envs = {env.label: env.interval for env in config.orchestrator.eval.env}
    for key, metric, every in (
        ("ckpt.best", config.ckpt.best, config.ckpt.interval),
        ("stop.metric", config.stop.metric, 1),
    ):
        due = [n for name, n in envs.items() if n and f"{metric}".startswith(f"eval/{name}/")]
        if metric is not None and not (due and every and due[0] % every == 0):
            raise ConfigError(
                f"{key} = {metric!r}: expected eval/ENV/NAME of an [[orchestrator.eval.env]] with "
                f"an interval that is a multiple of {every or 'ckpt.interval, unset'}; found the "
                f"envs and intervals {envs}. Set the intervals."
            )


def _value(key: str, metric: str | None, metrics: Mapping[str, float]) -> float | None:
    """None for the evaluation of another env."""
    if metric is None or metric in metrics:
        return None if metric is None else metrics[metric]
    env = next(name for name in metrics if name.endswith("/num_failed")).removesuffix("num_failed")
    if not metric.startswith(env):
        return None
    usual = [name for name in metrics if name.endswith("/mean") or "@" in name]
    close = difflib.get_close_matches(metric, usual, n=3, cutoff=0.3)
    raise ConfigError(
        f"{key} = {metric!r}: an evaluation has no such metric. Close: {', '.join(close)}"
    )
