"""Set-up of the orchestrator: named builders, one for each thing the loop holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.config.base import Settings
from prime_rl.config.models import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoSamplingConfig,
    EnvConfig,
    EvalSamplingConfig,
    SamplingConfig,
    SourceConfig,
    SourceTable,
)
from prime_rl.config.run import RunConfig
from prime_rl.inference.client import Weights
from prime_rl.inference.fleet import Fleet
from prime_rl.inference.meetings import Meetings
from prime_rl.inference.policy_scores import PolicyScores
from prime_rl.monitor.background import in_background
from prime_rl.orchestrator.batch import BatchAssembler
from prime_rl.orchestrator.engines import EnginesStatus, PolicyEngines
from prime_rl.orchestrator.env import Environment, EnvSettings, SamplingSettings
from prime_rl.orchestrator.evals import EvalEnv
from prime_rl.orchestrator.filters import FilterSlot, build_filters
from prime_rl.orchestrator.host import EnvHost, Outages
from prime_rl.orchestrator.producers import Producer, Sampled, SampledFrozen, Supplied
from prime_rl.orchestrator.rendering import Rendering
from prime_rl.plugins.base import Algorithm, Monitor, SampledEnv, Sampler
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.plugins.offers import (
    ALGORITHM,
    FILTER,
    MONITOR,
    RENDERER,
    SAMPLER,
    SOURCE,
    collect,
    select,
    settings_of,
)
from prime_rl.run.launch import ADMIN_KEY, ENGINE_KEY, Launch
from prime_rl.run.restarts import ENGINES, engine_names
from prime_rl.run.status import Status

AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True, eq=False)
class TrainEnv:
    """One training environment: where rollouts come from, and who credits them."""

    name: str
    environment: Environment
    producer: Producer
    algorithm: Algorithm
    hooks: Hooks
    """This env's scope: every installed plugin and its own algorithm."""
    host: EnvHost
    group_size: int
    """Asks a group: 1 where one ask brings the whole group."""


@dataclass(frozen=True, eq=False)
class Shared:
    """What every env of a run is built from."""

    config: RunConfig
    hooks: Hooks
    launch: Launch
    renderer: Any
    rendering: Rendering
    policy: PolicyScores
    place: PolicyEngines
    """Where the policy samples."""
    outages: Outages


def build_fleet(config: RunConfig, launch: Launch, outages: Outages, run_dir: Path) -> Fleet:
    """The engines of the live policy: those of this run, or ``inference.base_url``."""
    inference = config.inference
    fleet = Fleet(
        launch.engine_urls,
        os.environ.get(ADMIN_KEY, ""),
        Weights(launch.first_weights, launch.first_step - 1),
        model=launch.served_model_name,
        own=inference.base_url is None,
        have_first=launch.engine_version == launch.first_step - 1,
        timeout=inference.ready_timeout,
        hang_timeout=inference.hang_timeout,
        meetings=make_meetings(config, run_dir),
    )
    fleet.on_waiting = outages.reporter()
    return fleet


def make_meetings(config: RunConfig, run_dir: Path) -> Meetings | None:
    """Where weights go from memory to memory; None where they go as files."""
    table = config.weight_broadcast
    if table.backend is None:
        return None
    return Meetings(run_dir / "broadcasts", table.backend, table.timeout)


def report_engines(config: RunConfig, launch: Launch, fleet: Fleet, run_dir: Path) -> None:
    """Have the fleet tell of its engines in ``status/engines.json``."""
    names = list(config.inference.base_url or engine_names(len(launch.engine_urls)))
    told = EnginesStatus(fleet, Status(run_dir / "status" / f"{ENGINES}.json"), names)
    fleet.on_change = told.report
    told.report()


def build_shared(
    config: RunConfig,
    hooks: Hooks,
    launch: Launch,
    fleet: Fleet,
    version: Callable[[], int],
    outages: Outages,
) -> Shared:
    """The renderer, and the live policy to sample from and to score with; ``version`` tells which
    one samples now."""
    renderer = build_renderer(config, hooks)
    os.environ.setdefault(ENGINE_KEY, "EMPTY")
    name, key = launch.served_model_name, os.environ[ENGINE_KEY]
    policy = PolicyScores(fleet, name, api_key=key, version=version)
    place = PolicyEngines(fleet, name, ENGINE_KEY)
    rendering = Rendering(Path(launch.model_path), renderer)
    return Shared(config, hooks, launch, renderer, rendering, policy, place, outages)


def build_algorithms(config: RunConfig, hooks: Hooks) -> list[Algorithm]:
    """Each env's own algorithm, in the order of the envs."""
    offers = collect(hooks, ALGORITHM)
    built = []
    for env in config.orchestrator.train.env:
        algo = env.algo or config.orchestrator.algo
        where = f"env {env.label!r}: algo"
        cls = select(ALGORITHM, algo.type, offers, where)
        built.append(cls(settings_of(cls, ALGORITHM, algo.settings, where)))
    return built


def build_renderer(config: RunConfig, hooks: Hooks, name: str | None = None) -> Any:
    """The ``renderers`` config object every env renders with; ``name`` asks for another one."""
    table = config.orchestrator.renderer
    cls = select(RENDERER, name or table.name, collect(hooks, RENDERER), "orchestrator.renderer")
    fields = table.settings if name is None else {}
    settings = settings_of(cls, RENDERER, fields, "orchestrator.renderer")
    return cls(settings).build(config.model.name, settings.model_dump())


def build_train_envs(shared: Shared) -> list[TrainEnv]:
    """Every training env with its scope."""
    algorithms = build_algorithms(shared.config, shared.hooks)
    envs = shared.config.orchestrator.train.env
    return [_train_env(shared, *pair) for pair in zip(envs, algorithms, strict=True)]


def _train_env(shared: Shared, env: EnvConfig, algorithm: Algorithm) -> TrainEnv:
    config = shared.config.orchestrator
    environment = _environment(env, shared.renderer, shared.launch)
    producer = build_producer(shared, env, environment)
    return TrainEnv(
        name=env.label,
        environment=environment,
        producer=producer,
        algorithm=algorithm,
        hooks=scope(env.label, shared.hooks, [algorithm]),
        host=EnvHost(
            env.label,
            environment,
            shared.rendering,
            shared.policy,
            shared.outages,
            lambda name: build_renderer(shared.config, shared.hooks, name),
            tuple(other.label for other in config.train.env),
            shared.config.inference.max_model_len or shared.config.seq_len,
        ),
        group_size=1 if producer.whole_group else env.group_size or config.group_size,
    )


def build_producer(shared: Shared, env: EnvConfig, environment: Environment) -> Producer:
    """Where the env's rollouts come from, by its algorithm's ``sampling.source``."""
    config = shared.config.orchestrator
    table: AlgoSamplingConfig = (env.algo or config.algo).sampling
    source, where = table.source, f"env {env.label!r}: algo.sampling.source"
    sampling = train_sampling(merged(config.train.sampling, env.sampling))
    if isinstance(source, SourceTable):
        cls = select(SOURCE, source.type, collect(shared.hooks, SOURCE), where)
        built = cls(settings_of(cls, SOURCE, source.settings, where))
        return Supplied(env.label, environment, built)
    if isinstance(source, FrozenModel):
        return SampledFrozen(
            env.label,
            environment,
            source,
            table.client,
            sampling,
            shared.rendering,
            shared.outages.reporter(),
        )
    return Sampled(env.label, environment, shared.place, sampling)


def build_eval_envs(shared: Shared) -> list[EvalEnv]:
    """Every held-out env."""
    config = shared.config
    return [
        EvalEnv(
            name=env.label,
            environment=_environment(env, shared.renderer, shared.launch),
            sampling=eval_sampling(merged(config.orchestrator.eval.sampling, env.sampling)),
            num_examples=env.num_examples,
            group_size=env.group_size,
            interval=env.interval,
        )
        for env in config.orchestrator.eval.env
    ]


def _environment(env: SourceConfig, renderer: Any, launch: Launch) -> Environment:
    return Environment(
        EnvSettings(
            id=env.id,
            name=env.label,
            args=env.args,
            harness=env.harness,
            timeout=env.timeout,
            max_turns=env.max_turns,
            renderer=renderer,
            tokenizer_path=Path(launch.model_path),
        )
    )


def merged(group: AnySettings, env: AnySettings | None) -> AnySettings:
    """The group's settings with what one env sets for itself laid over them."""
    if env is None:
        return group
    return group.model_copy(update={name: getattr(env, name) for name in env.model_fields_set})


def train_sampling(sampling: SamplingConfig) -> SamplingSettings:
    """The whole distribution at one temperature: what the trainer can reproduce."""
    return SamplingSettings(
        temperature=sampling.temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_completion_tokens=sampling.max_completion_tokens,
        extra_body=sampling.extra_body,
    )


def eval_sampling(sampling: EvalSamplingConfig) -> SamplingSettings:
    """As configured; None is the engine's default."""
    return SamplingSettings(**sampling.model_dump())


def build_sampler(config: RunConfig, hooks: Hooks, envs: Sequence[TrainEnv]) -> Sampler:
    """The sampler, told of the envs."""
    table = config.orchestrator.sampler_table
    where = "orchestrator.sampler" if config.orchestrator.buffer is None else "orchestrator.buffer"
    cls = select(SAMPLER, table.type, collect(hooks, SAMPLER), where)
    settings = settings_of(cls, SAMPLER, table.settings, where)
    known = [
        SampledEnv(
            name=env.name,
            num_examples=env.producer.num_examples,
            ratio=configured.ratio,
            is_ready=partial(getattr, env.producer, "is_ready"),
            task=env.producer.task,
        )
        for env, configured in zip(envs, config.orchestrator.train.env, strict=True)
    ]
    return cls(settings, known, config.seed)


def build_assembler(config: RunConfig, hooks: Hooks, launch: Launch) -> BatchAssembler:
    """Both filter slots and the batch they guard."""
    offers = collect(hooks, FILTER)
    slots = [
        FilterSlot(label, hooks, build_filters(configs, offers, f"orchestrator.{label}"))
        for label, configs in (
            ("pre_batch_filters", config.orchestrator.pre_batch_filters),
            ("post_batch_filters", config.orchestrator.post_batch_filters),
        )
    ]
    return BatchAssembler(
        batch_size=config.orchestrator.batch_size,
        max_off_policy_steps=config.orchestrator.max_off_policy_steps,
        pre=slots[0],
        post=slots[1],
        max_empty_batches=config.orchestrator.max_empty_batches,
        first_step=launch.first_step,
    )


def build_monitors(config: RunConfig, hooks: Hooks, run_dir: Path) -> list[Monitor]:
    """Every monitor that has a table, and ``file``, which the live view and the summary read."""
    offers, monitors = collect(hooks, MONITOR), []
    tables: dict[str, dict[str, Any]] = {"file": {}} | config.monitors
    for name, table in tables.items():
        where = f"monitors.{name}"
        cls = select(MONITOR, name, offers, where)
        monitors.append(in_background(cls(settings_of(cls, MONITOR, table, where), run_dir)))
    return monitors
