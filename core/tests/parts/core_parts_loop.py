"""What the orchestrator's side loads in core's tests: an algorithm, a filter and others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl import (
    Algorithm,
    Filter,
    Group,
    Monitor,
    Observer,
    ObserverHost,
    PluginConfig,
    RendererOffer,
    Rollout,
    RunObserver,
    Sampler,
    hookimpl,
)


class AboveMean(Algorithm):
    """The reward above the mean of the siblings."""

    name = "above_mean"
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)


class TooShort(Filter):
    """Drops rollouts with fewer than two sampled tokens."""

    name = "too_short"

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        return "too short" if rollout.num_trainable_tokens < 2 else None


class Plain(RendererOffer):
    """Qwen3's template."""

    name = "plain"

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        from renderers import Qwen3RendererConfig

        return Qwen3RendererConfig(thinking_retention="all")


class Kept(Monitor):
    """Keeps what it gets, by run directory."""

    name = "kept"
    in_background = False
    metrics: dict[Path, dict[int, dict[str, float]]] = {}

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.steps = self.metrics.setdefault(run_dir, {})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.setdefault(step, {}).update(metrics)


class Lent(Observer):
    """Keeps what core lends to an observer, by run directory."""

    name = "lent"
    hosts: dict[Path, ObserverHost] = {}

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self.hosts[host.shared.run.run_dir] = host


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [AboveMean]


@hookimpl
def register_filters() -> list[type[Filter]]:
    return [TooShort]


@hookimpl
def register_renderers() -> list[type[RendererOffer]]:
    return [Plain]


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    from rotating import RotatingSampler

    return [RotatingSampler]


@hookimpl
def register_observers() -> list[type[RunObserver]]:
    return [Lent, Kept]
