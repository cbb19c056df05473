"""Score saved rollouts again, in the order in which they were scored.

    files of steps 1..N -> groups by place -> score_rollout, observation_weights, score_group
                        -> what trained    -> score_batch, stamp

Streams that an algorithm wrote are taken off first, and what a plugin made of the reward;
``ref_logprobs`` come from the file where it asks a model for them. Order matters to algorithms that
remember (a running baseline), so every group from the first step on is scored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import explain
from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.scoring import FACTS, score_batch, score_group, score_rollout, stamp
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks, load_plugins, scope
from prime_rl.registry.offers import ALGORITHM, collect, select, settings_of
from prime_rl.rollout import Rollout
from prime_rl.streams import STREAMS, stream_names
from prime_rl_app.config import without_replaced
from prime_rl_app.rollouts import Place, StoredRollout, StoredStep, read_step, step_files
from prime_rl_tools.replay.host import NotRecorded, ReplayHost, losses_of

Algorithms = Mapping[str, AlgoConfig]
"""By env."""


def read_run_config(run_dir: Path) -> RunConfig:
    """The resolved config of a run. Raises ``ConfigError`` if the folder is not a run, or one that
    this version cannot read."""
    path = run_dir / "configs" / "run.json"
    try:
        table = without_replaced(dict(json.loads(path.read_bytes())))
        return RunConfig.model_validate_json(json.dumps(table))
    except OSError as error:
        raise ConfigError(f"{run_dir}: not a run directory: no {path.name} in configs/") from error
    except ValidationError as error:
        problems = explain(error, RunConfig).split("\n")
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"{path}: not a config of this version of prime-rl; use the one that wrote it "
            f"({run_dir / 'plugins.json'}): {'; '.join(problems[:5])}{more}"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        fault = type(error).__name__ if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path}: damaged, expected a table as JSON: {fault}") from error


def algorithms_of(config: RunConfig, envs: Sequence[str] = ()) -> dict[str, AlgoConfig]:
    """The algorithm of each env; ``envs`` may have labels that are not in the config."""
    table = config.orchestrator
    named = {env.label: env.algo or table.algo for env in table.train.env}
    return {env: named.get(env, table.algo) for env in envs or named}


@dataclass(frozen=True)
class Scored:
    """A saved rollout, and the same rollout scored again."""

    stored: StoredRollout
    again: Rollout
    from_file: bool
    """The streams were copied: scoring needs a model, or siblings that are not saved."""


@dataclass(frozen=True, repr=False)  # asyncio logs the repr of a task's result
class Replayed:
    """Every step of a run up to the requested one, scored again."""

    steps: list[StoredStep]
    scored: Mapping[Place, Scored]

    def of(self, stored: StoredRollout) -> Scored:
        """The pair of a saved rollout."""
        return self.scored[place_of(stored)]

    def kept_again(self, step: StoredStep) -> list[Rollout]:
        """The trained rollouts of a step, scored again, in packing order."""
        again = [self.of(each).again for each in step.rollouts if each.dropped_by is None]
        return sorted(again, key=lambda rollout: rollout.group_id)


def place_of(stored: StoredRollout) -> Place:
    """The position at which it was scored. Raises ``RunError`` if the file lacks it."""
    if stored.rollout.place is None:
        raise RunError(
            "the saved rollouts lack the order in which they were scored: another version of "
            "prime-rl-core wrote them. Sample them again."
        )
    return stored.rollout.place


def read_steps(run_dir: Path, until: int | None = None) -> list[StoredStep]:
    """Every saved step up to ``until``. Raises ``RunError`` if there is none, or not ``until``."""
    files = step_files(run_dir)
    if not files:
        raise RunError(
            f"{run_dir / 'rollouts'}: no saved rollouts. Run with orchestrator.save_rollouts = "
            "true."
        )

    if until is not None and until not in files:
        raise RunError(
            f"{run_dir / 'rollouts'}: no step {until}; there are {min(files)} to {max(files)}."
        )

    return [read_step(path) for step, path in files.items() if until is None or step <= until]


async def replay(config: RunConfig, steps: list[StoredStep], algorithms: Algorithms) -> Replayed:
    """Score every rollout of ``steps`` by ``algorithms``.

    Raises ``NotRecorded`` if an algorithm other than the run's own asks a model for something.
    """
    members = {place_of(s): s for step in steps for s in (*step.waiting, *step.rollouts)}
    rollouts = [stored.rollout for stored in members.values()]
    shared = load_plugins(disabled=config.plugins.disabled)
    own = algorithms_of(config)
    losses = losses_of(config)
    scorers = {
        env: await _EnvScorer.build(shared, losses, table, ReplayHost(env, config, rollouts))
        for env, table in algorithms.items()
    }
    groups: dict[tuple[int, int], list[StoredRollout]] = {}
    for place in sorted(members):
        groups.setdefault(place[:2], []).append(members[place])
    scored: dict[Place, Scored] = {}
    for step in steps:
        for key in sorted({place_of(stored)[:2] for stored in step.rollouts}):
            group = groups.pop(key, None)
            if group is not None:
                env = group[0].rollout.env
                may_copy = own.get(env) == algorithms[env]
                scored |= {place_of(s.stored): s for s in await scorers[env].score(group, may_copy)}

        for env, scorer in scorers.items():
            kept = [s for s in step.rollouts if s.dropped_by is None and s.rollout.env == env]
            batch = [scored[place_of(stored)] for stored in kept]
            batch = await scorer.score_batch(batch, may_copy=own.get(env) == algorithms[env])
            scored |= {place_of(s.stored): s for s in batch}

    for scorer in scorers.values():
        await scorer.algorithm.close()
    return Replayed(steps, scored)


@dataclass(frozen=True)
class _EnvScorer:
    """One env's algorithm with every installed plugin around it."""

    algorithm: Algorithm
    hooks: Hooks
    host: ReplayHost
    losses: Components

    @classmethod
    async def build(
        cls,
        shared: Hooks,
        losses: Components,
        table: AlgoConfig,
        host: ReplayHost,
    ) -> _EnvScorer:
        where = f"env {host.env!r}: algo"
        chosen = select(ALGORITHM, table.type, collect(shared, ALGORITHM), where)
        algorithm = chosen(settings_of(chosen, ALGORITHM, table.settings, where))
        await algorithm.setup(host)
        return cls(algorithm, scope(host.env, shared, [algorithm]), host, losses)

    async def score(self, group: Sequence[StoredRollout], may_copy: bool) -> list[Scored]:
        """``may_copy``: if scoring needs a model, or a sibling that is not saved, keep the saved
        streams."""
        if may_copy and len(group) < place_of(group[0])[3]:
            scored = [_copied(stored) for stored in group]
        else:
            scored = [await self._one(stored, may_copy) for stored in group]
            await score_group(self.hooks, [each.again for each in scored])
        for each in () if self.hooks.scores_batches else scored:
            stamp(each.again, self.algorithm.action_loss, self.losses)
        return scored

    async def score_batch(self, batch: list[Scored], may_copy: bool) -> list[Scored]:
        """The env's rollouts of a batch. All keep the saved streams if one does: what compares
        rollouts needs every one of them."""
        again = [each.again for each in batch]
        if not (self.hooks.scores_batches and may_copy and any(each.from_file for each in batch)):
            try:
                for rollout in await score_batch(self.hooks, again):
                    stamp(rollout, self.algorithm.action_loss, self.losses)
                return batch
            except NotRecorded:
                if not may_copy:
                    raise

        return [_copied(each.stored) for each in batch]

    async def _one(self, stored: StoredRollout, may_copy: bool) -> Scored:
        again = unscored(stored.rollout)
        self.host.reference.rollout = stored.rollout
        try:
            await score_rollout(self.hooks, again)
        except NotRecorded:
            if not may_copy:
                raise
            return _copied(stored)

        return Scored(stored, again, from_file=False)


def _copied(stored: StoredRollout) -> Scored:
    return Scored(stored, as_saved(stored.rollout), from_file=True)


def unscored(rollout: Rollout) -> Rollout:
    """A copy without any stream an algorithm wrote, and without what a plugin made of the env's
    reward: it will do so again."""
    off: dict[str, Any] = dict.fromkeys(STREAMS)
    samples = [replace(sample, **off, streams={}) for sample in rollout.samples]
    facts = rollout.given or {name: getattr(rollout, name) for name in FACTS}
    own: dict[str, Any] = {name: dict(v) if isinstance(v, dict) else v for name, v in facts.items()}
    return replace(rollout, samples=samples, assigned=set(), frozen=False, **own)


def as_saved(rollout: Rollout) -> Rollout:
    """A copy with the streams it was saved with, which stamping leaves as they are."""
    samples = [replace(sample, streams=dict(sample.streams)) for sample in rollout.samples]
    present = {name for sample in rollout.samples for name in stream_names(sample)}
    return replace(rollout, samples=samples, assigned=present, frozen=False)
