"""Set-up of the orchestrator: named builders, one for each thing the loop holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoSamplingConfig,
    EnvConfig,
    FilterConfig,
    OrchestratorConfig,
    SourceConfig,
    SourceTable,
)
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings, ModelEndpoint
from prime_rl.env.loading import env_hooks
from prime_rl.env.rendering import load_tokenizer
from prime_rl.errors import ConfigError
from prime_rl.inference.fleet import Fleet, FleetOptions, NoFleet
from prime_rl.orchestrator.agents import make_algorithm, parts_of
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.branches import Branches
from prime_rl.orchestrator.buffer import POST, PRE, Buffer, FilterSlot
from prime_rl.orchestrator.checkpoint import Checkpointing
from prime_rl.orchestrator.context import (
    EarlierEngine,
    Engines,
    EnvHost,
    GroupLimits,
    Outages,
    RunContext,
    Shared,
    TrainEnv,
    installed,
    rendering_of,
    scorer_over,
)
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.engines import EngineKeeper, report_engines
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.measure import Measurement
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.past import PastPolicies
from prime_rl.orchestrator.policy import LivePolicy, WeightWatcher
from prime_rl.orchestrator.reporter import Reporter, in_background
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import ExternalSource, RolloutSource, Sampled, SampledFrozen
from prime_rl.plugins.algorithm import Algorithm, Filter
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.model import RendererOffer
from prime_rl.plugins.observer import Monitor, Observer, ObserverHost
from prime_rl.plugins.sampler import SampledEnv, Sampler, Source
from prime_rl.registry.manager import Hooks, load_plugins, scope
from prime_rl.registry.offers import (
    FILTER,
    MONITOR,
    OBSERVER,
    RENDERER,
    SAMPLER,
    SOURCE,
    check_attribution,
    collect,
    make,
    make_optimizer,
    make_transport,
)
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, PAST
from prime_rl.rundir.status import ENGINES, Status
from prime_rl.variables import all_headers, check_headers
from prime_rl.weights.versions import AVERAGES, REFERENCES, Weights
from prime_rl.wire.transport import Sender

ENV_WORKERS = "prime_rl.env_workers"


def build_orchestrator(
    shared: Shared, envs: Sequence[TrainEnv], monitors: Sequence[Monitor], wire: Sender
) -> Orchestrator:
    """The loop with its observers, in the order in which they are called."""
    run = shared.run
    engines = shared.engines

    # Envs with `measure_every` do not train: the trainer only measures their loss.
    every = {env.label: env.measure_every for env in run.config.orchestrator.train.env}
    measured: dict[TrainEnv, int] = {}

    for env in envs:
        steps = every[env.name]
        if steps is not None:
            measured[env] = steps

    envs = [env for env in envs if env not in measured]
    reporter = Reporter(run.hooks, monitors)
    # The lambdas here and below name parts that are built further down: they run later.
    curriculum = Curriculum(
        run.config.orchestrator.train.env,
        step=lambda: sampling.dispatcher.next_step,
        last_sent=lambda: buffer.batch.step - 1,
    )
    # Gates read the metrics of each batch, before it is sent.
    reporter.measured = curriculum.measured
    sampler = build_sampler(
        run.config,
        run.hooks,
        envs=envs,
        curriculum=curriculum,
        rollouts_per_group=lambda env: sampling.dispatcher.rollouts_per_group(env),
        dispatcher=lambda: sampling.dispatcher,
    )

    size = BatchSize(
        run.config.orchestrator.batch_size,
        tokens=run.config.orchestrator.token_batch_size,
        longest=run.config.seq_len,
    )

    buffer = build_buffer(run, envs, size)
    environment = partial(_environment, shared)
    compared = compared_by(run, envs, sampler=sampler, buffer=buffer)
    # Rollouts of an env in which nothing compares siblings are handed on alone.
    alone = frozenset(env.name for env in envs if not compared[env.name])

    host = ObserverHost(
        shared=shared,
        log=reporter.log,
        num_inflight=lambda: sampling.dispatcher.num_inflight,
        environment=environment,
        is_scoring=lambda: sampling.is_scoring,
        num_waiting=lambda: sampling.dispatcher.num_waiting,
        scored_alone=lambda env: env in sampling.dispatcher.alone,
        max_inflight=lambda: sampling.dispatcher.max_inflight,
        evaluated=curriculum.evaluated,
    )

    installed = build_observers(run, host)
    sampling = Sampling(
        run,
        engines,
        envs=envs,
        sampler=sampler,
        buffer=buffer,
        installed=installed,
        alone=alone,
        size=size,
    )
    sampling.curriculum = curriculum

    checkpointing = Checkpointing(
        run,
        sampler,
        envs=envs,
        dispatcher=sampling.dispatcher,
        buffer=buffer,
        curriculum=curriculum if curriculum.gates else None,
    )

    observers: list[Observer] = [
        reporter,  # hears `batch_lost` last, after the others have counted
        *installed,  # before sampling, which drops what is stale after they held a version back
        checkpointing,
        sampling,
        *([engines.past] if engines.past else []),
        EngineKeeper(run, engines, installed),
        *([Measurement(run, measured)] if measured else []),
    ]

    # `checkpointing` is an observer itself, so it gets the list afterwards.
    checkpointing.observers = observers
    # The optimizer runs in the trainer. Here it only tells how rows have to be packed.
    optimizer = make_optimizer(
        run.config.trainer.optim, load_plugins(TRAINER_GROUP, disabled=run.config.plugins.disabled)
    )
    packer = Packer(
        run.config,
        run.launch.num_ranks,
        hooks=run.hooks,
        losses=run.losses,
        one_env_per_row=optimizer.weighs_envs,
    )

    weights = WeightWatcher(run.run_dir, engines.policy, fleet=engines.fleet, observers=observers)
    weights.announced = wire.announced

    reporter.sources += [
        run.waited.take,
        buffer.take_metrics,
        weights.take_metrics,
        curriculum.take_metrics,
        *(observer.take_metrics for observer in observers),
        *(env.host.take_metrics for env in envs),
        *(env.environment.take_metrics for env in envs),
    ]

    # The state is restored last, when every part exists.
    if run.launch.checkpoint is not None:
        checkpointing.restore(run.launch.checkpoint.orchestrator)
    return Orchestrator(
        run,
        sampling,
        buffer=buffer,
        packer=packer,
        wire=wire,
        weights=weights,
        observers=observers,
        checkpoints=checkpointing,
    )


def compared_by(
    run: RunContext, envs: Sequence[TrainEnv], sampler: Sampler, buffer: Buffer
) -> dict[str, list[str]]:
    """The parts that compare the siblings of a group, by env. Where nothing does, rollouts are
    handed on alone, as each of them ends. Raises ``ConfigError`` where a partial group would be no
    group, and where no group is left to divide."""
    in_all_envs = [f"filter {name!r}" for name in buffer.group_filters]
    # A sampler sees groups through these two methods only.
    if _overrides(sampler, Sampler, "observe", "reject"):
        in_all_envs.append(f"sampler {sampler.name!r}")

    for env in envs:
        source = env.source.source if isinstance(env.source, ExternalSource) else None
        if source is not None and source.needs_siblings and _overrides(source, Source, "observe"):
            # The source observes the groups of all envs, so all envs wait for siblings.
            in_all_envs.append(f"the source of env {env.name!r}")

    divides_groups = run.config.orchestrator.partial_groups is not None
    compared = {}

    for env in envs:
        group_losses = []
        for part in parts_of(env.algorithm):
            action_loss = part.algorithm.action_loss
            if run.losses[action_loss].scope == "group":
                group_losses.append(action_loss)

        if divides_groups and group_losses:
            raise ConfigError(
                f"env {env.name!r}: its loss {group_losses[0]!r} compares whole groups, and "
                "[orchestrator.partial_groups] divides them. Remove the table, or choose another "
                "algorithm."
            )

        comparing = env.hooks.implementers("score_group", without=env.algorithm)
        if env.limits is not None:
            comparing += env.hooks.implementers("wanted_members", without=None)

        if divides_groups and env.limits is not None:
            raise ConfigError(
                f"env {env.name!r}: {comparing[-1]} decides how many members a group has, and "
                "[orchestrator.partial_groups] hands groups on before. Remove the table."
            )

        for part in parts_of(env.algorithm):
            if part.algorithm.compares_siblings:
                comparing.append(f"algorithm {part.algorithm.name!r}")

        comparing += [f"loss {name!r}" for name in group_losses]
        compared[env.name] = comparing + in_all_envs

    if divides_groups and not any(compared.values()):
        raise ConfigError(
            "orchestrator.partial_groups: nothing compares the members of a group in any env, so "
            "each rollout is handed on as soon as it ends, and no group waits. Remove the table."
        )

    return compared


def _overrides(component: object, base: type, *methods: str) -> bool:
    return any(getattr(type(component), name) is not getattr(base, name) for name in methods)


def build_observers(run: RunContext, host: ObserverHost) -> list[Observer]:
    """Every installed observer, by name."""
    tables = run.config.observers
    names = collect(run.hooks, OBSERVER)
    return [
        make(
            OBSERVER,
            name,
            table=tables.get(name, {}),
            hooks=run.hooks,
            where=f"observers.{name}",
            arguments=(host,),
        )
        for name in names
    ]


def build_engines(run: RunContext) -> Engines:
    """The engines of the live policy: those of this run, or ``inference.base_url``."""
    inference = run.config.inference
    table = run.config.weight_broadcast
    launch = run.launch
    # Engines load weights only for requests with the run's own key.
    key = os.environ.get(ADMIN_KEY, "")
    # Step n makes version n, so the run goes on from the version before its first step.
    version = launch.first_step - 1
    check_headers(inference.headers_from_env, "inference")
    headers = all_headers(inference.headers, inference.headers_from_env)

    options = FleetOptions(
        model=launch.served_model_name,
        own=inference.base_url is None,
        # Engines that outlived an earlier attempt may have any version.
        have_first=launch.engine_version == version and not launch.engines_kept,
        timeout=inference.ready_timeout,
        hang_timeout=inference.hang_timeout,
        headers=tuple(headers.items()),
    )

    transport = make_transport(table, run.hooks)
    delivery = None
    if transport is not None:
        delivery = transport.delivery(run.run_dir / "broadcasts", table.timeout)

    # Without engines, a version counts as served as soon as it is announced.
    kind = Fleet if run.config.has_engines else NoFleet
    fleet = kind(
        launch.engine_urls,
        admin_key=key,
        first=Weights(launch.first_weights, version),
        options=options,
        delivery=delivery,
    )

    outages = Outages()
    fleet.on_waiting = outages.reporter()
    fleet.names = dict(zip(launch.engine_urls, launch.engine_names, strict=False))
    fleet.on_change = partial(report_engines, fleet, Status(run.run_dir / f"status/{ENGINES}.json"))
    fleet.on_change()

    reset = run.config.trainer.reference_reset
    reference = 0 if launch.checkpoint is None else launch.checkpoint.reference
    earlier = {}

    for name, url in launch.reference_urls.items():
        follows = partial(_earlier_engine, run, url=url, key=key, options=options, outages=outages)
        if name == "ema":
            # The average changes with each version, the reference only when it is reset.
            earlier[name] = follows(folder=AVERAGES, version=version, interval=1)
        elif name == "initial":
            interval = None if reset is None else reset.interval
            earlier[name] = follows(folder=REFERENCES, version=reference, interval=interval)

    past = _past_policies(run, key, options)
    if past is not None:
        past.fleet.on_waiting = outages.reporter()
    return Engines(fleet, LivePolicy(version), outages=outages, earlier=earlier, past=past)


def _earlier_engine(
    run: RunContext,
    *,
    url: str,
    key: str,
    options: FleetOptions,
    outages: Outages,
    folder: str,
    version: int,
    interval: int | None,
) -> EarlierEngine:
    """It starts with the policy's first weights, which are those of version 0 of ``folder``."""
    path = run.run_dir / folder / f"step_{version}" if version else run.launch.initial
    # Without an interval it has loaded nothing in the last attempt either.
    is_first = interval is None or not run.launch.engines_kept
    options = replace(options, have_first=version == 0 and is_first)
    fleet = Fleet([url], admin_key=key, first=Weights(path, version), options=options)
    fleet.on_waiting = outages.reporter()
    since = run.launch.first_step - 1
    return EarlierEngine(
        fleet, folder=run.run_dir / folder, version=version, interval=interval, since=since
    )


def _past_policies(run: RunContext, key: str, options: FleetOptions) -> PastPolicies | None:
    """The earlier versions of the policy, if the run has an engine for them."""
    launch = run.launch
    table = run.config.orchestrator.past
    url = launch.reference_urls.get(PAST) or next(iter(table.base_url), None)
    if url is None:
        return None

    starts_first = not table.base_url and not launch.engines_kept
    options = replace(options, own=not table.base_url, have_first=starts_first)
    return PastPolicies(
        run.run_dir,
        table,
        fleet=Fleet(
            # A fleet takes the address of the engine itself, without its `/v1`.
            [url.removesuffix("/").removesuffix("/v1")],
            admin_key=key,
            first=Weights(launch.initial, 0),
            options=options,
        ),
        first=launch.initial,
        step=launch.first_step - 1,
        seed=run.config.seed,
    )


def build_shared(run: RunContext, engines: Engines) -> Shared:
    """The renderer, and the live policy to sample from and to score with."""
    os.environ.setdefault(ENGINE_KEY, "EMPTY")
    name = run.launch.served_model_name

    key = os.environ[ENGINE_KEY]
    model_path = Path(run.launch.model_path)

    def renderer_named(other: str | None = None) -> Any:
        return build_renderer(run.config, run.hooks, folder=model_path, name=other)

    renderer = renderer_named()

    # A new version is a new salt: no engine may reuse keys and values of older weights.
    def salt() -> str:
        return str(engines.policy.version)

    scores = partial(scorer_over, engines.fleet, name, api_key=key, cache_salt=salt)
    rendering = cache(partial(rendering_of, model_path, renderer))

    router = EngineRouter(
        engines.fleet,
        name,
        ENGINE_KEY,
        headers=run.config.inference.headers,
        headers_from_env=run.config.inference.headers_from_env,
    )

    orchestrator = run.config.orchestrator
    branches = Branches(
        router,
        stop_token_ids=lambda: rendering().stop_token_ids(),
        version=lambda: engines.policy.version,
        most_inflight=orchestrator.max_inflight_rollouts or orchestrator.max_inflight,
    )
    return Shared(
        run,
        engines,
        renderer=renderer,
        renderer_named=renderer_named,
        rendering=rendering,
        scores=cache(scores),  # one for all envs: its limit of requests in flight is the run's
        router=router,
        branches=branches,
    )


def renderer_offer(config: RunConfig, hooks: Hooks, name: str | None = None) -> RendererOffer:
    """The component that ``[orchestrator.renderer]`` names, or ``name`` with its defaults."""
    table = config.orchestrator.renderer
    settings = table.settings if name is None else {}
    return make(
        RENDERER, name or table.name, table=settings, hooks=hooks, where="orchestrator.renderer"
    )


def build_renderer(config: RunConfig, hooks: Hooks, folder: Path, name: str | None = None) -> Any:
    """The ``renderers`` config object every env renders with; ``name`` requests another one.
    ``folder`` has the tokenizer."""
    offer = renderer_offer(config, hooks, name)
    tokenizer = partial(load_tokenizer, folder)
    return offer.build_for(tokenizer, config.model.name, offer.config.model_dump())


def build_train_env(shared: Shared, env: EnvConfig) -> TrainEnv:
    """A training env with its scope."""
    config = shared.run.config.orchestrator
    hooks = shared.run.hooks
    environment = _environment(shared, env, config.train.harness)
    algorithm = make_algorithm(env, config.algo, hooks=hooks, agents=environment.agents)
    rendering = collect(hooks, RENDERER).get(shared.renderer.name)
    if rendering is not None:
        for part in parts_of(algorithm):
            check_attribution(part.where(env.label), type(part.algorithm), rendering.cls)

    source = build_source(shared, env, environment)
    # The last registered plugin runs first, so the algorithm runs before the env's hooks.
    env_scope = scope(env.label, hooks, [*env_hooks(env.id, env.args), algorithm])

    limits = None
    if not source.whole_group:
        limits = _group_limits(config, env, algorithm=algorithm, hooks=env_scope)

    return TrainEnv(
        name=env.label,
        environment=environment,
        source=source,
        algorithm=algorithm,
        hooks=env_scope,
        host=EnvHost(env.label, environment, shared),
        group_size=1 if source.whole_group else env.group_size or config.group_size,
        limits=limits,
    )


def _group_limits(
    config: OrchestratorConfig, env: EnvConfig, algorithm: Algorithm, hooks: Hooks
) -> GroupLimits | None:
    """Those of an env in which a plugin decides the size of groups."""
    if not hooks.decides_sizes:
        return None
    size = env.group_size or config.group_size
    largest = max(size, env.max_group_size or config.max_group_size or size)
    return GroupLimits(size=largest, trained=min(largest, algorithm.trains_at_most or largest))


def build_source(shared: Shared, env: EnvConfig, environment: Environment) -> RolloutSource:
    """The source of the env's rollouts, by its algorithm's ``sampling.source``."""
    config = shared.run.config.orchestrator
    table: AlgoSamplingConfig = (env.algo or config.algo).sampling
    source = table.source
    where = f"env {env.label!r}: algo.sampling.source"
    sampling = env.sampling or config.train.sampling

    if isinstance(source, SourceTable):
        built = make(
            SOURCE, source.type, table=source.settings, hooks=shared.run.hooks, where=where
        )
        return ExternalSource(env.label, environment, built)

    if isinstance(source, FrozenModel):
        return SampledFrozen(
            env.label,
            environment,
            model=source,
            client=table.client,
            sampling=sampling,
            rendering=shared.rendering,
            on_waiting=shared.engines.outages.reporter(),
        )

    past = shared.engines.past if env.past_agents else None
    return Sampled(env.label, environment, router=shared.router, sampling=sampling, past=past)


def _environment(
    shared: Shared, env: SourceConfig, default_harness: dict[str, Any] | None
) -> Environment:
    engines = shared.engines
    endpoint = None
    if isinstance(env, EnvConfig) and env.past_agents and engines.past is not None:
        (engine,) = engines.past.fleet.engines
        endpoint = ModelEndpoint(
            shared.run.launch.served_model_name, f"{engine.url}/v1", api_key_var=ENGINE_KEY
        )

    settings = EnvSettings.of(
        env,
        default_harness=default_harness,
        renderer=shared.renderer,
        tokenizer_path=Path(shared.run.launch.model_path),
        past=endpoint,
        engines_sleep=shared.run.config.deployment.colocated,
    )

    # The env's own number overrides the shared one, even if it is 0.
    shared_number = shared.run.config.orchestrator.env_workers
    if not (env.address or (shared_number if env.env_workers is None else env.env_workers)):
        environment = Environment(settings)
        environment.awake = engines.awake
        return environment

    make_environment = installed(ENV_WORKERS, "prime-rl-env-workers")
    made: Environment = make_environment(
        settings, env, config=shared.run.config, run_dir=shared.run.run_dir
    )
    made.awake = engines.awake
    return made


def build_sampler(
    config: RunConfig,
    hooks: Hooks,
    envs: Sequence[TrainEnv],
    rollouts_per_group: Callable[[str], float] = lambda env: 1.0,
    curriculum: Curriculum | None = None,
    dispatcher: Callable[[], Dispatcher] | None = None,
) -> Sampler:
    """The sampler of ``[orchestrator.sampler]``, over the envs. ``rollouts_per_group``: for each
    env, by its name. ``curriculum``: None: the envs are as in the first step. ``dispatcher``: None:
    no env has failed."""
    table = config.orchestrator.sampler
    curriculum = curriculum or Curriculum(config.orchestrator.train.env, step=lambda: 1)
    tables = {env.label: env for env in config.orchestrator.train.env}
    sampled = [
        # Functions stand for values that change during the run.
        SampledEnv(
            name=env.name,
            num_examples=env.source.num_examples,
            ratio=tables[env.name].first_ratio,
            is_ready=partial(
                _may_be_sampled, env, envs, curriculum=curriculum, dispatcher=dispatcher
            ),
            task=env.source.task,
            rollouts_per_group=partial(rollouts_per_group, env.name),
            scheduled=partial(curriculum.weight, env.name) if tables[env.name].weight else None,
        )
        for env in envs
    ]
    return make(
        SAMPLER,
        table.type,
        table=table.settings,
        hooks=hooks,
        where=SAMPLER.key,
        arguments=(sampled, config.seed),
    )


def _may_be_sampled(
    env: TrainEnv,
    envs: Sequence[TrainEnv],
    curriculum: Curriculum,
    dispatcher: Callable[[], Dispatcher] | None,
) -> bool:
    """Whether the next group may be of an env. One that fails has one group on its way at a time:
    more would hold the places of the others until they time out. Unless no other env can give
    anything: then the run waits for this one."""

    def has_something(each: TrainEnv) -> bool:
        return curriculum.is_open(each.name) and each.source.is_ready()

    if not has_something(env):
        return False
    if dispatcher is None or not dispatcher().is_failing(env.name):
        return True
    if not dispatcher().is_asked(env.name):
        return True
    return not any(
        has_something(other) and curriculum.weight(other.name) > 0
        for other in envs
        if not dispatcher().is_failing(other.name)
    )


def build_buffer(run: RunContext, envs: Sequence[TrainEnv], size: BatchSize) -> Buffer:
    """The buffer with both filter slots."""
    config = run.config.orchestrator
    pre = build_filters(run.hooks, config.pre_batch_filters, PRE)
    post = build_filters(run.hooks, config.post_batch_filters, POST)

    algorithms = [part.algorithm for env in envs for part in parts_of(env.algorithm)]
    scopes = {run.losses[algorithm.action_loss].scope for algorithm in algorithms}
    return Buffer(
        size=size,
        max_off_policy_steps=config.max_off_policy_steps,
        pre=FilterSlot(PRE, run.hooks, pre),
        post=FilterSlot(POST, run.hooks, post),
        max_empty_batches=config.max_empty_batches,
        first_step=run.launch.first_step,
        # A loss or a head that sees whole groups must not get a part of one.
        whole_groups="group" in scopes or bool(run.losses.heads_of_groups),
    )


def build_filters(
    hooks: Hooks, configs: Sequence[FilterConfig], slot: str
) -> list[tuple[Filter, bool]]:
    """The filters of one slot with their ``enforce`` flags. Raises ``ConfigError``."""
    where = f"orchestrator.{slot}"
    return [
        (make(FILTER, each.type, table=each.settings, hooks=hooks, where=where), each.enforce)
        for each in configs
    ]


def build_monitors(config: RunConfig, hooks: Hooks, run_dir: Path) -> list[Monitor]:
    """Every monitor that has a table."""
    monitors = []
    for name, table in config.monitors.items():
        where = f"monitors.{name}"
        made = make(MONITOR, name, table=table, hooks=hooks, where=where, arguments=(run_dir,))
        monitors.append(in_background(made))

    return monitors
