"""Score saved rollouts again, in the order in which they were scored.

    files of steps 1..N -> groups by place -> score_rollout, observation_weights, score_group
                        -> what trained    -> score_batch, score_envs, stamp

Streams that an algorithm wrote are taken off first, and what a plugin made of the reward;
``ref_logprobs`` come from the file where it asks a model for them. Order matters to algorithms that
remember (a running baseline), so every group from the first step on is scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import explain
from prime_rl.config.orchestrator import AlgoConfig, EnvConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.loading import env_hooks
from prime_rl.errors import ConfigError, PrimeRLError, RunError
from prime_rl.orchestrator.agents import action_loss_of, make_algorithm
from prime_rl.orchestrator.scoring import (
    FACTS,
    score_batch,
    score_envs,
    score_group,
    score_rollout,
    sharing,
    stamp,
)
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks, load_plugins, scope
from prime_rl.rollout import Rollout
from prime_rl.rundir.rows import read_table
from prime_rl.streams import STREAMS, stream_names
from prime_rl_app.config import without_replaced
from prime_rl_app.saved_rollouts import (
    ScoringPlace,
    StoredRollout,
    StoredStep,
    read_step,
    step_files,
)
from prime_rl_tools.replay.host import NotRecorded, ReplayHost, losses_of

Algorithms = Mapping[str, AlgoConfig]
"""By env."""


def read_run_config(run_dir: Path) -> RunConfig:
    """The resolved config of a run. Raises ``ConfigError`` if the folder is not a run, or one that
    this version cannot read."""
    path = run_dir / "configs" / "run.json"
    try:
        table = without_replaced(read_table(path))
        return RunConfig.model_validate_json(json.dumps(table))
    except FileNotFoundError as error:
        raise ConfigError(f"{run_dir}: not a run directory: no {path.name} in configs/") from error
    except ValidationError as error:
        problems = explain(error, RunConfig).split("\n")
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"{path}: not a config of this version of prime-rl; use the one that wrote it "
            f"({run_dir / 'plugins.json'}): {'; '.join(problems[:5])}{more}"
        ) from error
    except (RunError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged, expected a table as JSON: {error}") from error


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
    scored: Mapping[ScoringPlace, Scored]

    def of(self, stored: StoredRollout) -> Scored:
        """The pair of a saved rollout."""
        return self.scored[place_of(stored)]

    def kept_again(self, step: StoredStep) -> list[Rollout]:
        """The trained rollouts of a step, scored again, in packing order."""
        again = [self.of(each).again for each in step.rollouts if each.dropped_by is None]
        return sorted(again, key=lambda rollout: rollout.group_id)


def place_of(stored: StoredRollout) -> ScoringPlace:
    """The position at which it was scored. Raises ``RunError`` if the file lacks it."""
    if stored.rollout.place is None:
        raise RunError(
            "the saved rollouts lack the order in which they were scored: another version of "
            "prime-rl-core wrote them. Sample them again."
        )
    return stored.rollout.place


def read_steps(run_dir: Path, until: int | None = None) -> list[StoredStep]:
    """Every saved step up to ``until``. Raises ``RunError`` if no step is saved, or
    step ``until`` is not."""
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

    Raises ``NotRecorded`` if an algorithm other than the run's own asks a model for something,
    ``RunError`` for rollouts of an env without an algorithm.
    """
    for step in steps:
        unknown = {each.rollout.env for each in step.rollouts} - algorithms.keys()
        if unknown:
            raise RunError(
                f"rollouts/step_{step.step}.msgpack has rollouts of env {min(unknown)!r}, and the "
                f"run's configs/run.json has the envs {', '.join(sorted(algorithms)) or '(none)'}. "
                "One of the files is not of this run, or damaged."
            )
    members = {place_of(s): s for step in steps for s in (*step.waiting, *step.rollouts)}
    rollouts = [stored.rollout for stored in members.values()]
    shared = load_plugins(disabled=config.plugins.disabled)
    configured = algorithms_of(config)
    losses = losses_of(config)
    ids = {env.label: env.id for env in config.orchestrator.train.env}
    agents = {env.label: env.agents for env in config.orchestrator.train.env}
    scorers = {}
    for env, table in algorithms.items():
        host = ReplayHost(env, config, rollouts)
        brought = env_hooks(ids[env], None) if env in ids else []
        is_own = configured.get(env) == table  # another algorithm is for all agents
        scorers[env] = await _EnvScorer.build(
            shared,
            losses,
            env=EnvConfig(
                id=ids.get(env, env), name=env, algo=table, agents=agents[env] if is_own else {}
            ),
            host=host,
            brought=brought,
        )
    groups: dict[tuple[int, int], list[StoredRollout]] = {}
    for place in sorted(members):
        groups.setdefault(place[:2], []).append(members[place])
    scored: dict[ScoringPlace, Scored] = {}
    for step in steps:
        with _naming(step):
            await _score_step(step, scorers, groups, scored, configured=configured, by=algorithms)

    for scorer in scorers.values():
        await scorer.algorithm.close()
    return Replayed(steps, scored)


async def _score_step(
    step: StoredStep,
    scorers: Mapping[str, _EnvScorer],
    groups: dict[tuple[int, int], list[StoredRollout]],
    scored: dict[ScoringPlace, Scored],
    *,
    configured: Algorithms,
    by: Algorithms,
) -> None:
    """Score the groups of ``step`` that no earlier step took from ``groups``, then its batch,
    into ``scored``. ``by``: the algorithms that score now."""
    for key in sorted({place_of(stored)[:2] for stored in step.rollouts}):
        group = groups.pop(key, None)
        if group is not None:
            env = group[0].rollout.env
            may_copy = configured.get(env) == by[env]
            scored |= {place_of(s.stored): s for s in await scorers[env].score(group, may_copy)}

    for envs in sharing({env: scorer.algorithm for env, scorer in scorers.items()}):
        parts = []
        for env in envs:
            kept = [s for s in step.rollouts if s.dropped_by is None and s.rollout.env == env]
            batch = [scored[place_of(stored)] for stored in kept]
            may_copy = configured.get(env) == by[env]
            parts.append(_Part(scorers[env], batch, may_copy))
        for each in await _score_batches(parts):
            scored[place_of(each.stored)] = each


@dataclass(frozen=True)
class _Part:
    """One env's rollouts of a batch. ``may_copy``: see ``_EnvScorer.score``."""

    scorer: _EnvScorer
    batch: list[Scored]
    may_copy: bool


async def _score_batches(parts: Sequence[_Part]) -> list[Scored]:
    """A batch of the envs that share an algorithm. If one rollout keeps its saved streams, all do
    that a hook compares with it. Raises ``NotRecorded`` if one of them may not."""
    hooks = parts[0].scorer.hooks
    waiting = {}
    copied = set()
    for number, part in enumerate(parts):
        scored = await part.scorer.score_batch(part.batch, may_copy=part.may_copy)
        if scored is None:
            copied.add(number)
        else:
            waiting[part.scorer.host.env] = scored

    if hooks.scores_envs:
        if not copied:
            try:
                await score_envs(hooks, waiting)
            except NotRecorded:
                if not all(part.may_copy for part in parts):
                    raise
                copied = {*range(len(parts))}
        elif others := [p.scorer.host.env for p in parts if not p.may_copy]:
            first = parts[min(copied)].scorer.host.env
            what = f"one credit with env {first!r}, whose streams cannot be computed again"
            raise NotRecorded(others[0], what)
        else:
            copied = {*range(len(parts))}

    done = []
    for number, part in enumerate(parts):
        if number in copied:
            done += [_copied(each.stored) for each in part.batch]
            continue
        for rollout in waiting[part.scorer.host.env]:
            loss = action_loss_of(part.scorer.algorithm, rollout)
            stamp(rollout, loss, part.scorer.losses)
        done += part.batch
    return done


@contextmanager
def _naming(step: StoredStep) -> Iterator[None]:
    """Begin an error of scoring with the file that holds the step."""
    try:
        yield
    except NotRecorded:
        raise
    except PrimeRLError as error:
        raise RunError(f"rollouts/step_{step.step}.msgpack, scored again: {error}") from error


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
        env: EnvConfig,
        host: ReplayHost,
        brought: Sequence[object] = (),
    ) -> _EnvScorer:
        """``env``: with the algorithm that scores now. ``brought``: the env's own hooks."""
        assert env.algo is not None
        # Of an env without a saved rollout, the agents are unknown.
        algorithm = make_algorithm(env, env.algo, shared, host.agents or None)
        await algorithm.setup(host)
        hooks = scope(host.env, shared, [*brought, algorithm])
        return cls(algorithm, hooks, host, losses)

    async def score(self, group: Sequence[StoredRollout], may_copy: bool) -> list[Scored]:
        """``may_copy``: if scoring needs a model, or a sibling that is not saved, keep the saved
        streams."""
        if may_copy and len(group) < place_of(group[0])[3]:
            scored = [_copied(stored) for stored in group]
        else:
            scored = [await self._one(stored, may_copy) for stored in group]
            await score_group(self.hooks, [each.again for each in scored])
        for each in () if self.hooks.scores_batches else scored:
            stamp(each.again, action_loss_of(self.algorithm, each.again), self.losses)
        return scored

    async def score_batch(self, batch: list[Scored], may_copy: bool) -> list[Rollout] | None:
        """Score the env's rollouts of a batch; those to be stamped. None: all of them keep their
        saved streams."""
        if self.hooks.scores_batches and may_copy and any(each.from_file for each in batch):
            return None
        try:
            return await score_batch(self.hooks, [each.again for each in batch])
        except NotRecorded:
            if not may_copy:
                raise
        return None

    async def _one(self, stored: StoredRollout, may_copy: bool) -> Scored:
        again = unscored(stored.rollout)
        self.host.show(stored.rollout)
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
    copies: dict[str, Any] = {
        name: dict(v) if isinstance(v, dict) else v for name, v in facts.items()
    }
    return replace(rollout, samples=samples, assigned=set(), frozen=False, **copies)


def as_saved(rollout: Rollout) -> Rollout:
    """A copy with the streams that were saved; stamping does not change them."""
    samples = [replace(sample, streams=dict(sample.streams)) for sample in rollout.samples]
    present = {name for sample in rollout.samples for name in stream_names(sample)}
    return replace(rollout, samples=samples, assigned=present, frozen=False)
