"""What the highest value of a held-out metric decides: the checkpoint that stays (``[ckpt] best``),
and the end of the run (``[stop]``)."""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
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
        self._metric = metric
        self._folder = checkpoints_dir(run_dir)
        self.step = 0
        self.value = float("-inf")

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of the weights of ``step``. One that lacks the metric decides nothing: its
        checkpoint is not the best."""
        if self._metric is None or not _is_of(self._metric, metrics):
            return
        value = _value("ckpt.best", self._metric, step=step, metrics=metrics)
        if value is not None and value > self.value:
            self.step = step
            self.value = value

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
        self._config = config
        self._marker = run_dir / STOP
        self._best = float("-inf")
        self._step = 0
        self._fruitless = 0

    def measured(self, step: int, metrics: Mapping[str, float], *, may_end: bool) -> None:
        """An evaluation of the weights of ``step``. One that lacks the metric decides nothing."""
        config = self._config
        if config.metric is None or not _is_of(config.metric, metrics):
            return
        value = _value("stop.metric", config.metric, step=step, metrics=metrics)
        if value is None:
            return
        if value > self._best:
            self._best = value
            self._step = step
            self._fruitless = 0
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
            self._marker.write_text(text, "utf-8")


FORMS = re.compile(
    r"avg@\d+|pass[@^]\d+|num_failed|cancelled|num_policy_versions"
    r"|(all|effective)/reward/(mean|max|min|p10|p90|stderr)"
    r"|all/(num_\w+|rewards/.+|timing/.+)/(mean|max|min|p10|p90)"
    r"|all/(metrics/.+|is_completed|is_truncated|has_error)/mean"
    r"|all/(stop_condition|error)/.+"
)
"""Names that may follow ``eval/ENV/`` (``figures.py``)."""


def check(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a metric is not measured at the steps where it decides, or has a
    name that no evaluation measures."""
    envs = {env.label: env for env in config.orchestrator.eval.env}
    if not config.orchestrator.eval.max_hold_seconds:
        _check_holds_nothing(config)
    for key, metric, every in (
        ("ckpt.best", config.ckpt.best, config.ckpt.interval),
        ("stop.metric", config.stop.metric, 1),
    ):
        if metric is None:
            continue
        due = [env for env in envs.values() if env.interval and _name_in(metric, env.label)]
        interval = due[0].interval if due else None
        if not (interval and every and interval % every == 0):
            wanted = "an interval"
            if key == "ckpt.best":
                of_checkpoints = f"= {every}" if every else "(not set)"
                wanted += f" that is a multiple of ckpt.interval {of_checkpoints}"
            intervals = [f"{name} with interval {env.interval}" for name, env in envs.items()]
            raise ConfigError(
                f"{key} = {metric!r}: expected eval/ENV/NAME, such as eval/ENV/all/reward/mean, of "
                f"an [[orchestrator.eval.env]] that has {wanted}; found "
                f"{', '.join(intervals) or 'no [[orchestrator.eval.env]]'}. Set the intervals."
            )

        name = _name_in(metric, due[0].label) or ""
        if not FORMS.fullmatch(name):
            size = due[0].group_size
            usual = [f"avg@{size}", "pass@1", f"pass@{size}", f"pass^{size}", "all/reward/mean"]
            usual += ["effective/reward/mean", "all/metrics/NAME/mean", "all/rewards/NAME/mean"]
            close = difflib.get_close_matches(name, usual, n=3, cutoff=0.3) or usual
            raise ConfigError(
                f"{key} = {metric!r}: no evaluation measures {name!r}. Close: "
                + ", ".join(f"eval/{due[0].label}/{each}" for each in close)
            )


def _check_holds_nothing(config: RunConfig) -> None:
    """Raise ``ConfigError`` where a mixture of versions, or none at all, would be measured."""
    where = "orchestrator.eval.max_hold_seconds = 0"
    if config.ckpt.best is not None:
        raise ConfigError(
            f"{where} measures a mixture of versions, and ckpt.best keeps the checkpoint of one. "
            "Leave one of them out."
        )
    if config.deployment.colocated:
        raise ConfigError(
            f"{where}: with deployment.colocated the engines sleep while the trainer works, and an "
            "evaluation has to end before. Leave one of them out."
        )


def _name_in(metric: str, env: str) -> str | None:
    """``NAME`` of ``eval/ENV/NAME``; None: it is of another env."""
    start = f"eval/{env}/"
    return metric.removeprefix(start) if metric.startswith(start) else None


def _is_of(metric: str, metrics: Mapping[str, float]) -> bool:
    """Whether these are the metrics of the metric's env."""
    end = "/num_failed"  # every evaluation has it
    return any(
        metric.startswith(name.removesuffix(end) + "/") for name in metrics if name.endswith(end)
    )


def _value(key: str, metric: str, step: int, metrics: Mapping[str, float]) -> float | None:
    """None, with a warning, if this evaluation lacks the metric: ``pass@1`` if a reward is neither
    0 nor 1, the mean of rollouts that did not fail if all have failed."""
    value = metrics.get(metric)
    if value is not None and math.isfinite(value):
        return value
    usual = [name for name in metrics if name.endswith("/mean") or "@" in name]
    close = difflib.get_close_matches(metric, usual, n=3, cutoff=0.3)
    log.warning(
        "%s = %r: the evaluation at step %d has %s, so it decides nothing. Close: %s",
        key,
        metric,
        step,
        "no such metric" if value is None else value,
        ", ".join(close),
    )
    return None
