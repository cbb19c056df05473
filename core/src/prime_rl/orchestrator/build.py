"""Set-up of the orchestrator: named builders, one for each thing the loop holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoSamplingConfig,
    EnvConfig,
    FilterConfig,
    SourceConfig,
    SourceTable,
)
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.context import (
    Engines,
    EnvHost,
    Outages,
    RunContext,
    Shared,
    TrainEnv,
    installed,
    rendering_of,
    scorer_over,
)
from prime_rl.orchestrator.engines import EngineKeeper, report_engines
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.policy import Policy, WeightWatcher
from prime_rl.orchestrator.progress import Checkpointing
from prime_rl.orchestrator.reporter import Reporter, in_background
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import ExternalSource, RolloutSource, Sampled, SampledFrozen
from prime_rl.plugins.algorithm import Filter
from prime_rl.plugins.model import RendererOffer
from prime_rl.plugins.observer import Monitor, Observer, ObserverHost
from prime_rl.plugins.sampler import SampledEnv, Sampler
from prime_rl.registry.manager import Hooks, scope
from prime_rl.registry.offers import (
    ALGORITHM,
    FILTER,
    MONITOR,
    OBSERVER,
    RENDERER,
    SAMPLER,
    SOURCE,
    collect,
    make,
    make_transport,
)
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY
from prime_rl.rundir.status import ENGINES, Status
from prime_rl.weights.versions import AVERAGES, Weights
from prime_rl.wire.transport import Sender

ENV_WORKERS = "prime_rl.env_workers"


def build_orchestrator(
    shared: Shared, envs: Sequence[TrainEnv], monitors: Sequence[Monitor], wire: Sender
) -> Orchestrator:
    """The loop with its observers, in the order in which they are called."""
    run = shared.run
    engines = shared.engines
    reporter = Reporter(run.hooks, monitors)
    sampler = build_sampler(run.config, run.hooks, envs)
    buffer = build_buffer(run, envs)
    environment = partial(_environment, shared)
    host = ObserverHost(
        shared,
        reporter.log,
        lambda: sampling.dispatcher.num_inflight,
        environment,
        lambda: sampling.is_scoring,
        lambda: sampling.dispatcher.num_waiting,
    )
    installed = build_observers(run, host)
    sampling = Sampling(run, engines, envs, sampler, buffer, installed)
    checkpointing = Checkpointing(run, sampler, envs, sampling.dispatcher, buffer)
    observers: list[Observer] = [
        reporter,
        *installed,  # before sampling, which drops what is stale after they held a version back
        checkpointing,
        sampling,
        EngineKeeper(run, engines, installed),
    ]
    packer = Packer(run.config, run.launch.num_ranks, run.hooks, run.losses)
    weights = WeightWatcher(run.run_dir, engines.policy, engines.fleet, observers)
    weights.announced = wire.announced
    reporter.sources += [
        run.waited.take,
        buffer.take_metrics,
        weights.take_metrics,
        *(observer.take_metrics for observer in observers),
        *(env.host.take_metrics for env in envs),
        *(env.environment.take_metrics for env in envs),
    ]
    if run.launch.checkpoint is not None:
        checkpointing.restore(run.launch.checkpoint.orchestrator)
    return Orchestrator(run, sampling, buffer, packer, wire, weights, observers)


def build_observers(run: RunContext, host: ObserverHost) -> list[Observer]:
    """Every installed observer, by name."""
    tables = run.config.observers
    names = collect(run.hooks, OBSERVER)
    return [
        make(OBSERVER, name, tables.get(name, {}), run.hooks, f"observers.{name}", host)
        for name in names
    ]


def build_engines(run: RunContext) -> Engines:
    """The engines of the live policy: those of this run, or ``inference.base_url``."""
    inference = run.config.inference
    table = run.config.weight_broadcast
    launch = run.launch
    transport = make_transport(table, run.hooks)
    broadcasts = run.run_dir / "broadcasts"
    key = os.environ.get(ADMIN_KEY, "")
    version = launch.first_step - 1
    own = inference.base_url is None
    kept = launch.engines_kept
    have_first = launch.engine_version == version and not kept
    timeouts = inference.ready_timeout, inference.hang_timeout
    options = FleetOptions(launch.served_model_name, own, have_first, *timeouts)
    fleet = Fleet(
        launch.engine_urls,
        key,
        Weights(launch.first_weights, version),
        options,
        delivery=None if transport is None else transport.delivery(broadcasts, table.timeout),
    )
    outages = Outages()
    fleet.on_waiting = outages.reporter()
    fleet.names = dict(zip(launch.engine_urls, launch.engine_names, strict=False))
    fleet.on_change = partial(report_engines, fleet, Status(run.run_dir / f"status/{ENGINES}.json"))
    fleet.on_change()
    path = run.run_dir / AVERAGES / f"step_{version}" if version else launch.initial
    options = replace(options, have_first=not (version or kept))  # it begins with the first
    urls = [url for name, url in launch.reference_urls.items() if name == "ema"]
    average = [Fleet([url], key, Weights(path, version), options) for url in urls]
    for each in average:
        each.on_waiting = outages.reporter()
    return Engines(fleet, Policy(version), outages, average)


def build_shared(run: RunContext, engines: Engines) -> Shared:
    """The renderer, and the live policy to sample from and to score with."""
    os.environ.setdefault(ENGINE_KEY, "EMPTY")
    name = run.launch.served_model_name
    key = os.environ[ENGINE_KEY]
    renderer_named = partial(build_renderer, run.config, run.hooks)
    renderer = renderer_named()

    def salt() -> str:
        return str(engines.policy.version)

    scores = partial(scorer_over, engines.fleet, name, api_key=key, cache_salt=salt)
    return Shared(
        run,
        engines,
        renderer,
        renderer_named,
        cache(partial(rendering_of, Path(run.launch.model_path), renderer)),
        cache(scores),  # one for all envs: its limit of requests in flight is the run's
        EngineRouter(engines.fleet, name, ENGINE_KEY),
    )


def renderer_offer(config: RunConfig, hooks: Hooks, name: str | None = None) -> RendererOffer:
    """The component that ``[orchestrator.renderer]`` names, or ``name`` with its defaults."""
    table = config.orchestrator.renderer
    settings = table.settings if name is None else {}
    return make(RENDERER, name or table.name, settings, hooks, "orchestrator.renderer")


def build_renderer(config: RunConfig, hooks: Hooks, name: str | None = None) -> Any:
    """The ``renderers`` config object every env renders with; ``name`` requests another one."""
    offer = renderer_offer(config, hooks, name)
    return offer.build(config.model.name, offer.config.model_dump())


def build_train_env(shared: Shared, env: EnvConfig) -> TrainEnv:
    """A training env with its scope."""
    config = shared.run.config.orchestrator
    hooks = shared.run.hooks
    algo = env.algo or config.algo
    algorithm = make(ALGORITHM, algo.type, algo.settings, hooks, f"env {env.label!r}: algo")
    environment = _environment(shared, env, config.train.harness)
    source = build_source(shared, env, environment)
    return TrainEnv(
        name=env.label,
        environment=environment,
        source=source,
        algorithm=algorithm,
        hooks=scope(env.label, hooks, [algorithm]),
        host=EnvHost(env.label, environment, shared),
        group_size=1 if source.whole_group else env.group_size or config.group_size,
    )


def build_source(shared: Shared, env: EnvConfig, environment: Environment) -> RolloutSource:
    """The source of the env's rollouts, by its algorithm's ``sampling.source``."""
    config = shared.run.config.orchestrator
    table: AlgoSamplingConfig = (env.algo or config.algo).sampling
    source = table.source
    where = f"env {env.label!r}: algo.sampling.source"
    sampling = env.sampling or config.train.sampling
    if isinstance(source, SourceTable):
        built = make(SOURCE, source.type, source.settings, shared.run.hooks, where)
        return ExternalSource(env.label, environment, built)

    if isinstance(source, FrozenModel):
        return SampledFrozen(
            env.label,
            environment,
            source,
            table.client,
            sampling,
            shared.rendering,
            shared.engines.outages.reporter(),
        )

    return Sampled(env.label, environment, shared.router, sampling)


def _environment(
    shared: Shared, env: SourceConfig, default_harness: dict[str, Any] | None
) -> Environment:
    settings = EnvSettings.of(
        env,
        default_harness=default_harness,
        renderer=shared.renderer,
        tokenizer_path=Path(shared.run.launch.model_path),
    )
    shared_number = shared.run.config.orchestrator.env_workers
    if not (env.address or (shared_number if env.env_workers is None else env.env_workers)):
        return Environment(settings)
    make_environment = installed(ENV_WORKERS, "prime-rl-env-workers")
    made: Environment = make_environment(settings, env, shared.run.config, shared.run.run_dir)
    return made


def build_sampler(config: RunConfig, hooks: Hooks, envs: Sequence[TrainEnv]) -> Sampler:
    """The sampler of ``[orchestrator.sampler]``, over the envs."""
    table = config.orchestrator.sampler_table
    where = "orchestrator.sampler" if config.orchestrator.buffer is None else "orchestrator.buffer"
    known = [
        SampledEnv(
            name=env.name,
            num_examples=env.source.num_examples,
            ratio=configured.ratio,
            is_ready=env.source.is_ready,
            task=env.source.task,
        )
        for env, configured in zip(envs, config.orchestrator.train.env, strict=True)
    ]
    return make(SAMPLER, table.type, table.settings, hooks, where, known, config.seed)


def build_buffer(run: RunContext, envs: Sequence[TrainEnv]) -> Buffer:
    """The buffer with both filter slots."""
    config = run.config.orchestrator
    pre = "pre_batch_filters"
    post = "post_batch_filters"
    return Buffer(
        batch_size=config.batch_size,
        max_off_policy_steps=config.max_off_policy_steps,
        pre=FilterSlot(pre, run.hooks, build_filters(run.hooks, config.pre_batch_filters, pre)),
        post=FilterSlot(post, run.hooks, build_filters(run.hooks, config.post_batch_filters, post)),
        max_empty_batches=config.max_empty_batches,
        first_step=run.launch.first_step,
        whole_groups=any(run.losses[e.algorithm.action_loss].scope == "group" for e in envs),
    )


def build_filters(
    hooks: Hooks, configs: Sequence[FilterConfig], slot: str
) -> list[tuple[Filter, bool]]:
    """The filters of one slot with their ``enforce`` flags. Raises ``ConfigError``."""
    where = f"orchestrator.{slot}"
    return [(make(FILTER, c.type, c.settings, hooks, where), c.enforce) for c in configs]


def build_monitors(config: RunConfig, hooks: Hooks, run_dir: Path) -> list[Monitor]:
    """Every monitor that has a table."""
    return [
        in_background(make(MONITOR, name, table, hooks, f"monitors.{name}", run_dir))
        for name, table in config.monitors.items()
    ]
