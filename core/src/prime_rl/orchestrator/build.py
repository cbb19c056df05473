"""Set-up of the orchestrator: named builders, one for each thing the loop holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from prime_rl.env.environment import Environment, EnvSettings, SamplingSettings
from prime_rl.env.rendering import Rendering
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.inference.scorer import PromptScorer
from prime_rl.monitor.background import in_background
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, RunContext, TrainEnv
from prime_rl.orchestrator.engines import EngineRouter, EnginesStatus
from prime_rl.orchestrator.evals import EvalEnv
from prime_rl.orchestrator.evaluation import Evaluation
from prime_rl.orchestrator.filters import FilterSlot, build_filters
from prime_rl.orchestrator.host import EnvHost, Outages, RunFacts
from prime_rl.orchestrator.keeper import EngineKeeper
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.observers import HookCalls
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.policy import WeightWatcher
from prime_rl.orchestrator.progress import Checkpointing, State
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import ExternalSource, RolloutSource, Sampled, SampledFrozen
from prime_rl.orchestrator.watchdog import Watchdog
from prime_rl.plugins.base import (
    Algorithm,
    Monitor,
    PluginConfig,
    RendererOffer,
    SampledEnv,
    Sampler,
)
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
from prime_rl.run.restarts import ENGINES, engine_names
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, Launch
from prime_rl.rundir.status import Status
from prime_rl.weights.transports import make_transport
from prime_rl.weights.versions import Weights
from prime_rl.wire.transport import Sender


def build_orchestrator(
    run: RunContext,
    engines: Engines,
    router: EngineRouter,
    envs: Sequence[TrainEnv],
    eval_envs: Sequence[EvalEnv],
    monitors: Sequence[Monitor],
    wire: Sender,
) -> tuple[Orchestrator, Evaluation]:
    """The loop with its observers, in the order in which they are called; and the one of them that
    has the results."""
    config, hooks = run.config, run.hooks
    save_rollouts = config.orchestrator.save_rollouts
    reporter = Reporter(run.run_dir, monitors, config.max_steps, save_rollouts)
    sampler, buffer = build_sampler(config, hooks, envs), build_buffer(config, hooks, run.launch)
    sampling = Sampling(run, engines, envs, sampler, buffer, reporter)
    evaluation = Evaluation(run, engines, eval_envs, router, reporter, sampling.free_slots)
    keeper = EngineKeeper(run, engines, evaluation)
    state = State(sampler, envs, sampling.dispatcher, buffer)
    observers = [
        reporter,
        HookCalls(hooks),
        evaluation,
        Checkpointing(run, state),
        sampling,
        keeper,
        Watchdog(run, engines, sampling),
    ]
    packer = Packer(config, run.launch.num_ranks, hooks)
    weights = WeightWatcher(run.run_dir, engines.policy, engines.fleet, observers)
    reporter.sources += [
        run.waited.take,
        packer.take_metrics,
        buffer.take_metrics,
        sampling.take_metrics,
        evaluation.evaluator.take_metrics,
        keeper.watch.take,
        engines.fleet.take_metrics,
        weights.take_metrics,
    ]
    if run.launch.checkpoint is not None:
        state.restore(run.launch.checkpoint.orchestrator)
    return Orchestrator(run, sampling, buffer, packer, wire, weights, observers), evaluation


@dataclass(frozen=True, eq=False)
class Shared:
    """What every env of a run is built from."""

    config: RunConfig
    hooks: Hooks
    launch: Launch
    renderer: Any
    rendering: Rendering
    policy: PromptScorer
    router: EngineRouter
    """Where the policy samples."""
    outages: Outages


def build_fleet(
    config: RunConfig, hooks: Hooks, launch: Launch, outages: Outages, run_dir: Path
) -> Fleet:
    """The engines of the live policy: those of this run, or ``inference.base_url``."""
    inference, table = config.inference, config.weight_broadcast
    transport = make_transport(table, hooks)
    broadcasts = run_dir / "broadcasts"
    fleet = Fleet(
        launch.engine_urls,
        os.environ.get(ADMIN_KEY, ""),
        Weights(launch.first_weights, launch.first_step - 1),
        FleetOptions(
            model=launch.served_model_name,
            own=inference.base_url is None,
            have_first=launch.engine_version == launch.first_step - 1,
            timeout=inference.ready_timeout,
            hang_timeout=inference.hang_timeout,
        ),
        delivery=None if transport is None else transport.delivery(broadcasts, table.timeout),
    )
    fleet.on_waiting = outages.reporter()
    return fleet


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
    policy = PromptScorer(fleet, name, api_key=key, cache_salt=lambda: str(version()))
    router = EngineRouter(fleet, name, ENGINE_KEY)
    rendering = Rendering(Path(launch.model_path), renderer)
    return Shared(config, hooks, launch, renderer, rendering, policy, router, outages)


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


def renderer_offer(
    config: RunConfig, hooks: Hooks, name: str | None = None
) -> tuple[RendererOffer, PluginConfig]:
    """The component that ``[orchestrator.renderer]`` names, or ``name``, and its settings."""
    table = config.orchestrator.renderer
    cls = select(RENDERER, name or table.name, collect(hooks, RENDERER), "orchestrator.renderer")
    fields = table.settings if name is None else {}
    settings = settings_of(cls, RENDERER, fields, "orchestrator.renderer")
    return cls(settings), settings


def build_renderer(config: RunConfig, hooks: Hooks, name: str | None = None) -> Any:
    """The ``renderers`` config object every env renders with; ``name`` asks for another one."""
    offer, settings = renderer_offer(config, hooks, name)
    return offer.build(config.model.name, settings.model_dump())


def build_train_envs(shared: Shared) -> list[TrainEnv]:
    """Every training env with its scope."""
    algorithms = build_algorithms(shared.config, shared.hooks)
    envs = shared.config.orchestrator.train.env
    return [_train_env(shared, *pair) for pair in zip(envs, algorithms, strict=True)]


def _train_env(shared: Shared, env: EnvConfig, algorithm: Algorithm) -> TrainEnv:
    config = shared.config.orchestrator
    environment = _environment(shared, env, config.train.harness)
    source = build_source(shared, env, environment)
    return TrainEnv(
        name=env.label,
        environment=environment,
        source=source,
        algorithm=algorithm,
        hooks=scope(env.label, shared.hooks, [algorithm]),
        host=EnvHost(
            env.label,
            environment,
            shared.rendering,
            shared.policy,
            shared.outages,
            RunFacts(
                renderer_named=lambda name: build_renderer(shared.config, shared.hooks, name),
                envs=tuple(other.label for other in config.train.env),
                context=shared.config.inference.max_model_len or shared.config.seq_len,
            ),
        ),
        group_size=1 if source.whole_group else env.group_size or config.group_size,
    )


def build_source(shared: Shared, env: EnvConfig, environment: Environment) -> RolloutSource:
    """Where the env's rollouts come from, by its algorithm's ``sampling.source``."""
    config = shared.config.orchestrator
    table: AlgoSamplingConfig = (env.algo or config.algo).sampling
    source, where = table.source, f"env {env.label!r}: algo.sampling.source"
    sampling = train_sampling(env.sampling or config.train.sampling)
    if isinstance(source, SourceTable):
        cls = select(SOURCE, source.type, collect(shared.hooks, SOURCE), where)
        built = cls(settings_of(cls, SOURCE, source.settings, where))
        return ExternalSource(env.label, environment, built)
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
    return Sampled(env.label, environment, shared.router, sampling)


def build_eval_envs(shared: Shared) -> list[EvalEnv]:
    """Every held-out env."""
    evaluation = shared.config.orchestrator.eval
    return [
        EvalEnv(
            name=env.label,
            environment=_environment(shared, env, evaluation.harness),
            sampling=eval_sampling(env.sampling or evaluation.sampling),
            num_examples=env.num_examples,
            group_size=env.group_size,
            interval=env.interval,
        )
        for env in evaluation.env
    ]


def _environment(
    shared: Shared, env: SourceConfig, default_harness: dict[str, Any] | None
) -> Environment:
    return Environment(
        EnvSettings(
            id=env.id,
            name=env.label,
            args=env.args,
            harness=env.harness,
            default_harness=default_harness,
            timeout=env.timeout,
            max_turns=env.max_turns,
            renderer=shared.renderer,
            tokenizer_path=Path(shared.launch.model_path),
        )
    )


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
            num_examples=env.source.num_examples,
            ratio=configured.ratio,
            is_ready=partial(getattr, env.source, "is_ready"),
            task=env.source.task,
        )
        for env, configured in zip(envs, config.orchestrator.train.env, strict=True)
    ]
    return cls(settings, known, config.seed)


def build_buffer(config: RunConfig, hooks: Hooks, launch: Launch) -> Buffer:
    """Both filter slots and the batch they guard."""
    offers = collect(hooks, FILTER)
    slots = [
        FilterSlot(label, hooks, build_filters(configs, offers, f"orchestrator.{label}"))
        for label, configs in (
            ("pre_batch_filters", config.orchestrator.pre_batch_filters),
            ("post_batch_filters", config.orchestrator.post_batch_filters),
        )
    ]
    return Buffer(
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
