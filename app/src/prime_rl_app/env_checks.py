"""Config checks of environments and their algorithms: labels, sizes, and sources of rollouts."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from prime_rl import Algorithm
from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoConfig,
    AlgoSamplingConfig,
    EnvConfig,
    PastConfig,
    SourceTable,
)
from prime_rl.config.run import RunConfig
from prime_rl.entries import entries
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import (
    check_taskset,
    current_id,
    env_hooks,
    find_agents,
    module_of,
    shipped_by_verifiers,
)
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.agents import make_algorithm, parts_of
from prime_rl.registry.checks import marked_hooks
from prime_rl.registry.components import Component, Components
from prime_rl.registry.import_path import folder_only_here
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import (
    ALGORITHM,
    RENDERER,
    SOURCE,
    bringer,
    check_attribution,
    choose,
    collect,
    select,
)
from prime_rl.rundir.launch import PAST
from prime_rl.streams import OBSERVATION_WEIGHTS, WEIGHTS, LossComponent
from prime_rl_app.config import installed_defaults

RESERVED_LABELS = ("agg", "all", "effective")
"""Labels that metrics use for all envs together."""


def check_trains(config: RunConfig) -> None:
    """There is an environment to train on. Raises ``ConfigError``."""
    if not config.orchestrator.train.env:
        raise ConfigError(
            "orchestrator.train.env: the run has no training environment. Add a table "
            "[[orchestrator.train.env]] with an id."
        )


def check_envs(config: RunConfig) -> None:
    """Environments exist and have distinct labels; groups divide the batch, suffice for its
    minibatches and fit in flight; a row holds a sample. Raises ``ConfigError``."""
    orchestrator = config.orchestrator
    row = config.trainer.micro_batch_tokens
    envs = orchestrator.train.env
    inflight = orchestrator.max_inflight_rollouts
    check_trains(config)
    for part, group in (("train", envs), ("eval", orchestrator.eval.env)):
        for label, count in Counter(env.label for env in group).items():
            if count > 1:
                raise ConfigError(
                    f"orchestrator.{part}.env: {count} envs are called {label!r}. Give each its "
                    "own name."
                )
            if label in RESERVED_LABELS:
                raise ConfigError(
                    f"orchestrator.{part}.env: the name {label!r} is taken by metrics"
                )

    # Else a batch would end within a group, whose credit compares all members.
    sizes = [env.group_size or orchestrator.group_size for env in envs]
    for env, size in zip(envs, sizes, strict=True):
        if orchestrator.batch_size is not None and orchestrator.batch_size % size:
            raise ConfigError(
                f"env {env.label!r}: group_size {size} does not divide orchestrator.batch_size "
                f"{orchestrator.batch_size}. Make the batch a multiple of every group size."
            )

    if row is not None and row < config.seq_len:
        raise ConfigError(
            f"trainer.micro_batch_tokens: a row of {row} tokens cannot hold a sample of seq_len = "
            f"{config.seq_len}. Raise it to seq_len or more, or leave it out."
        )

    sources = [(env.algo or orchestrator.algo).sampling.source for env in envs]
    if any(isinstance(source, SourceTable) for source in sources):  # groups of any size
        sizes.append(1)
    largest = max(sizes)
    # A batch of tokens has no fixed number of groups: the packer warns where they are too few.
    groups = (orchestrator.batch_size or sys.maxsize) // min(sizes)
    if config.trainer.minibatches > groups:
        raise ConfigError(
            f"trainer.minibatches: a batch of {orchestrator.batch_size} rollouts has at most "
            f"{groups} groups, which are not split, so it cannot have {config.trainer.minibatches} "
            "minibatches. Lower it, or raise orchestrator.batch_size."
        )

    if inflight is not None and inflight < largest:
        raise ConfigError(
            f"orchestrator.max_inflight_rollouts: {inflight} cannot hold one group of {largest}. "
            "Raise it, or lower group_size."
        )


def check_algorithms(
    config: RunConfig,
    hooks: Hooks,
    losses: Components,
    algorithms: Iterable[tuple[EnvConfig, Algorithm]],
) -> None:
    """Each env's algorithm and its loss are installed and can train on the env's rollouts. Raises
    ``ConfigError`` for the first env that fails."""
    shared = config.orchestrator.algo
    default = installed_defaults().get("orchestrator", {}).get("algo", {})
    envs = config.orchestrator.train.env
    # No env uses the shared table: it must be valid if the user has written it.
    if shared not in (AlgoConfig(), AlgoConfig(**default)) and all(env.algo for env in envs):
        choose(
            ALGORITHM, shared.type, table=shared.settings, hooks=hooks, where="orchestrator.algo"
        )
    chosen = []
    of_envs = [*algorithms]
    for env, part in ((env, part) for env, whole in of_envs for part in parts_of(whole)):
        algorithm = part.algorithm
        cls = type(algorithm)
        action_loss = algorithm.action_loss
        where = part.where(env.label)
        try:
            component = losses[action_loss]
        except ConfigError as error:
            # The loss `rl` is that of [trainer.loss], which belongs to no env.
            where = "" if action_loss == "rl" else f"{where} trains the loss {action_loss!r}. "
            raise ConfigError(f"{where}{error}") from error

        # A user's function, given by an import path, is no offer of an installed plugin.
        offered = collect(hooks, ALGORITHM).get(cls.name)
        source = f"plugin {offered.source}" if offered is not None else "its package"
        _check_losses(where, algorithm, losses=losses, source=source)
        missing = [name for name in algorithm.needs_heads if name not in losses.heads]
        if missing:
            raise ConfigError(
                f"{where} needs the head {missing[0]!r}, which is no part of this run. Add a table "
                f"[trainer.heads.{missing[0]}]; it may be empty."
            )

        _check_env(
            where,
            cls,
            component=component,
            env=env,
            config=config,
            heads_of_groups=[n for n in algorithm.needs_heads if n in losses.heads_of_groups],
        )
        _check_source(
            where, cls, env=env, algo=env.algo or shared, component=component, hooks=hooks
        )
        if env.measure_every is not None:
            _check_measured(where, component)
        if config.orchestrator.partial_groups is not None and component.scope == "group":
            raise ConfigError(
                f"{where} trains the loss {component.cls.name!r}, which compares whole groups, and "
                "[orchestrator.partial_groups] divides them. Remove the table, or choose another "
                "algorithm or loss."
            )
        chosen.append((where, algorithm))
        renderer = config.orchestrator.renderer.name
        if cls.needs_attribution:
            rendering = select(
                RENDERER, renderer, offers=collect(hooks, RENDERER), where=RENDERER.key
            )
            check_attribution(where, cls, rendering)

    _check_group_limits(config, hooks, [whole for _, whole in of_envs])
    _check_unread(config, hooks, losses=losses, algorithms=[algorithm for _, algorithm in chosen])
    _check_earlier_weights(chosen, config, losses)


def _check_group_limits(config: RunConfig, hooks: Hooks, algorithms: Sequence[Algorithm]) -> None:
    """``max_group_size`` is read, and not below the size that it limits; no group whose size a
    plugin decides is divided. Raises ``ConfigError``."""
    orchestrator = config.orchestrator
    shared = orchestrator.max_group_size
    is_read = False
    for env, algorithm in zip(orchestrator.train.env, algorithms, strict=True):
        where = f"env {env.label!r}: "
        size = env.group_size or orchestrator.group_size
        largest = env.max_group_size or shared
        # The env's scope is not made yet: classes tell which hooks its plugins will have.
        plugins = [type(algorithm), *env_hooks(env.id, env.args)]
        has_source = isinstance((env.algo or orchestrator.algo).sampling.source, SourceTable)
        decides = not has_source and (
            hooks.decides_sizes or any(DECIDES in marked_hooks(each) for each in plugins)
        )
        is_read |= decides
        if decides and orchestrator.partial_groups is not None:
            raise ConfigError(
                f"{where}a plugin decides how many members a group has (the hook {DECIDES}), and "
                "[orchestrator.partial_groups] hands groups on before. Remove the table."
            )
        if decides and largest is not None and largest < size:
            raise ConfigError(
                f"{where}max_group_size = {largest} is less than group_size = {size}, with which a "
                "group begins. Raise it, or lower group_size."
            )
        if decides and algorithm.grows_groups and (largest or size) == size:
            raise ConfigError(
                f"{where}algorithm {algorithm.name!r} samples more members of groups that need "
                f"them, and group_size = {size} is the limit. Set max_group_size to more, such as "
                f"{4 * size}."
            )
        if env.max_group_size is not None and not decides:
            raise ConfigError(f"{where}max_group_size = {env.max_group_size} {NOT_READ}")

    if shared is not None and not is_read:
        raise ConfigError(f"orchestrator.max_group_size = {shared} {NOT_READ}")


DECIDES = "wanted_members"
NOT_READ = (
    "is read by no plugin of the run: none asks for more members of a group (the hook "
    "wanted_members). Leave it out, or choose an algorithm that does."
)


def algorithm_of(env: EnvConfig, config: RunConfig, hooks: Hooks) -> Algorithm:
    """The algorithm of a training env, or those of its agents in one. With a table of an agent, it
    imports verifiers and the taskset, which takes seconds. Raises ``ConfigError``."""
    orchestrator = config.orchestrator
    if not env.agents:
        return make_algorithm(env, orchestrator.algo, hooks=hooks)

    where = f"env {env.label!r}: "
    check_taskset(env.id, f"{where}id", env.args)
    source = (env.algo or orchestrator.algo).sampling.source
    if isinstance(source, SourceTable):
        raise ConfigError(
            f"{where}agents is set, and the rollouts of this env come from source "
            f"{source.type!r}, not from its agents. Leave the table out."
        )
    known = EnvSettings.of(env, default_harness=orchestrator.train.harness)
    agents = find_agents(known, env.agents)
    # The env's table also says where rollouts come from, which no agent's does.
    with_algorithm = {
        name for name, agent in env.agents.items() if isinstance(agent.algo, AlgoConfig)
    }
    if (
        env.algo is not None
        and env.algo.sampling == AlgoSamplingConfig()
        and with_algorithm >= {*agents}
    ):
        raise ConfigError(
            f"{where}algo is read by no agent: each that trains ({', '.join(agents)}) has an "
            "algorithm of its own. Leave it out."
        )
    return make_algorithm(env, orchestrator.algo, hooks=hooks, agents=agents)


def _check_earlier_weights(
    chosen: Sequence[tuple[str, Algorithm]], config: RunConfig, losses: Components
) -> None:
    """The run has the earlier weights that losses and algorithms read, and no others."""
    initial = config.orchestrator.initial
    decay = config.trainer.ema_decay
    key = ""  # why the run starts no engine for earlier weights
    if config.inference.base_url is not None:
        key = "inference.base_url"
    elif config.deployment.colocated:
        key = "deployment.colocated"

    # Losses read earlier weights in the trainer. Algorithms ask an engine for them.
    is_average_read = False
    for where, algorithm in chosen:
        trained = [losses[name] for name in trained_by(algorithm)]
        readers = [each.cls.name for each in trained if "ema_logprobs" in each.computed]
        reads = ""
        if readers:
            reads = f"trains the loss {readers[0]!r}, which reads ema_logprobs"
        elif algorithm.needs_ema:
            reads = "reads host.ema"
        if reads:
            is_average_read = True
        if reads and decay is None:
            raise ConfigError(
                f"{where} {reads}, and trainer.ema_decay is not set. Set it, 0.99 for example."
            )

        if algorithm.needs_ema and key:
            raise ConfigError(f"{where} reads host.ema. A run with {key} starts no engine for it.")
        if algorithm.needs_initial and key and config.trainer.reference_reset is not None:
            raise ConfigError(
                f"{where} reads host.initial, which trainer.reference_reset changes, and with "
                f"{key} the run starts no engine for it. Leave one of the two out."
            )
        if algorithm.needs_initial and initial is None and key:
            raise ConfigError(
                f"{where} asks an engine with the weights that the run began with, and with {key} "
                f"the run starts none. Serve them (prime-rl serve {config.model.name}), and set "
                "orchestrator.initial to the model's name and base_url."
            )

    _check_reference_reset([algorithm for _, algorithm in chosen], config, losses)
    _check_past(chosen, config)
    if initial is not None and not any(each.needs_initial for _, each in chosen):
        raise ConfigError("orchestrator.initial: no env's algorithm reads it. Leave it out.")
    if decay is not None and not is_average_read:
        raise ConfigError("trainer.ema_decay: no env reads ema_logprobs or host.ema. Leave it out.")


def _check_reference_reset(
    algorithms: Sequence[Algorithm], config: RunConfig, losses: Components
) -> None:
    """Something reads the reference, and nothing reads one that a reset does not reach."""
    if config.trainer.reference_reset is None:
        return
    key = "trainer.reference_reset"
    initial = config.orchestrator.initial
    if initial is not None:
        raise ConfigError(
            f"{key}: orchestrator.initial names {initial.name!r}, whose weights the run cannot "
            "change. Leave orchestrator.initial out, so that the run starts an engine for it, or "
            f"leave {key} out."
        )

    names = {name for each in algorithms for name in trained_by(each)}
    is_read = any("initial_logprobs" in losses[name].computed for name in names)
    if not is_read and not any(algorithm.needs_initial for algorithm in algorithms):
        raise ConfigError(
            f"{key}: no env reads initial_logprobs or host.initial. Leave it out, or train a loss "
            "that compares with the reference (kl_to_initial of prime-rl-baselines)."
        )


def _check_past(chosen: Sequence[tuple[str, Algorithm]], config: RunConfig) -> None:
    """Earlier versions are kept, and served, if an agent or an algorithm meets them."""
    orchestrator = config.orchestrator
    table = orchestrator.past
    readers = [f"{where} reads host.past" for where, each in chosen if each.needs_past]
    readers += [
        f"env {env.label!r}: an earlier version plays agent {name!r}"
        for env in orchestrator.train.env
        for name in sorted(env.past_agents)
    ]
    if not readers:
        if table != PastConfig():
            raise ConfigError(
                "orchestrator.past: no algorithm reads host.past, and no agent has "
                'model = "past". Leave the table out.'
            )
        return

    for env in orchestrator.train.env:
        if env.past_agents and env.address:
            raise ConfigError(
                f"env {env.label!r}: an earlier version plays agent {min(env.past_agents)!r}, and "
                "a server of serve-env does not know its engine, which this run starts. Leave "
                "address out."
            )

    where = readers[0]
    runs_elsewhere = config.inference.base_url is not None
    if runs_elsewhere and not table.base_url:
        raise ConfigError(
            f"{where}, and with inference.base_url the run starts no engine for it. Serve the "
            f"model once more (prime-rl serve {config.model.name}), with the same admin key, and "
            "set orchestrator.past.base_url."
        )
    if table.base_url and not runs_elsewhere:
        raise ConfigError(
            "orchestrator.past.base_url is for a run with inference.base_url: this run starts its "
            "engines, and the one of earlier versions too. Leave it out."
        )
    if config.deployment.colocated:
        raise ConfigError(
            f"{where}, and with deployment.colocated the run starts no engine for it. Leave "
            "deployment.colocated out."
        )
    if not config.has_engines:
        raise ConfigError(f"{where}, and the run has no engine. Set inference.replicas to 1.")
    if not config.weight_broadcast.as_files:
        raise ConfigError(
            f"{where}, and versions are kept as files, which weight_broadcast.type = "
            f"{config.weight_broadcast.type!r} does not write. Set it to 'filesystem'."
        )


@dataclass(frozen=True, kw_only=True)
class EarlierWeights:
    """Weights of the policy before the newest, that the run needs too."""

    are_read: bool
    """A loss reads the policy's first weights."""
    engines: tuple[str, ...]
    """References that algorithms query and for which the run must start engines: ``initial``,
    ``ema``, ``past``."""


def earlier_weights(
    config: RunConfig, algorithms: Iterable[Algorithm], losses: Components
) -> EarlierWeights:
    initial = False
    ema = False
    orchestrator = config.orchestrator
    past = any(env.past_agents for env in orchestrator.train.env)
    # A table stands for what a plugin of the run may assign, without an algorithm that declares it.
    names = set(config.trainer.losses)
    for algorithm in (part.algorithm for whole in algorithms for part in parts_of(whole)):
        names.update(trained_by(algorithm))
        initial |= algorithm.needs_initial and config.orchestrator.initial is None
        ema |= algorithm.needs_ema
        past |= algorithm.needs_past

    asked = {"initial": initial, "ema": ema, PAST: past and not orchestrator.past.base_url}
    return EarlierWeights(
        are_read=any("initial_logprobs" in losses[name].computed for name in names),
        engines=tuple(name for name, is_asked in asked.items() if is_asked),
    )


def trained_by(algorithm: Algorithm) -> list[LossComponent]:
    """The losses that an algorithm trains: its action loss, and those that ``assign_weights`` may
    name beside it."""
    declared = {*algorithm.losses}
    # Without these two, it declares for which losses of [trainer.loss] it was written, and that
    # table is the action loss.
    if declared.isdisjoint({"rl", algorithm.action_loss}):
        return [algorithm.action_loss]
    return [algorithm.action_loss, *sorted(declared - {algorithm.action_loss})]


def _check_losses(where: str, algorithm: Algorithm, losses: Components, source: str) -> None:
    """The losses that the algorithm declares are installed, and its sampled tokens train in one of
    them. ``source``: the plugin that brings the algorithm."""
    declared = {*algorithm.losses}
    for name in sorted(declared - {"rl"}):
        try:
            losses[name]
        except ConfigError as error:
            raise ConfigError(f"{where} trains the loss {name!r}. {error}") from error

    action_loss = algorithm.action_loss
    if not declared & {"rl", action_loss} and declared and action_loss != "rl":
        names = ", ".join(map(repr, sorted(declared)))
        raise ConfigError(
            f"{where} declares losses = ({names},), and its action_loss {action_loss!r}, in which "
            f"its sampled tokens train, is not among them. That is for the author of {source}: add "
            f"{action_loss!r} to losses, or set action_loss to one of them."
        )

    # The name `rl` stands for whatever loss [trainer.loss] selects, so compare with that one.
    used = losses["rl"].loss.name if declared and action_loss == "rl" else "rl"
    if declared and not declared & {"rl", used, action_loss}:
        # What compares with the sampler trains sampled tokens; the others imitate, or train heads.
        fit = [name for name in sorted(declared) if losses[name].cls.compares_with_sampler]
        first = (fit or sorted(declared))[0]
        raise ConfigError(
            f"{where} needs the loss {' or '.join(sorted(declared))}, and trainer.loss.type is "
            f"{used!r}: its tokens would train in another loss than it was written for. Set "
            f"trainer.loss.type to {first!r}. (If the algorithm trains {first!r} beside any loss "
            f"of [trainer.loss], by assign_weights, the author of {source} declares that: losses = "
            f"('rl', {first!r}).)"
        )


def _check_unread(
    config: RunConfig, hooks: Hooks, losses: Components, algorithms: Iterable[Algorithm]
) -> None:
    """Refuse a table of an installed loss that no env trains."""
    observed = {OBSERVATION_WEIGHTS.removesuffix(WEIGHTS)}
    named = observed if hooks.hook.observation_weights.get_hookimpls() else set[str]()
    for algorithm in algorithms:
        named |= {algorithm.action_loss, *algorithm.losses}
        named |= observed if "observation_weights" in marked_hooks(type(algorithm)) else set()

    # Its settings would look as if they had an effect.
    for name in sorted(config.trainer.losses.keys() - named):
        if name in losses:  # otherwise the message about its name says more
            raise ConfigError(
                f"trainer.losses.{name}: no env's algorithm trains this loss (they train "
                f"{', '.join(sorted(named))}). Leave the table out, choose an algorithm that names "
                "the loss, or have yours declare it (Algorithm.losses)."
            )


EXTRA_PASSES = frozenset({"old_logprobs", "top_logprobs", "initial_logprobs", "ema_logprobs"})
"""Computed columns that need more than the one forward pass of ``measure_every``."""


def _check_measured(where: str, component: Component) -> None:
    """What is measured goes through the model once, beside what trains: no head writes streams for
    it, and no earlier weights see it."""
    unfit = EXTRA_PASSES & component.computed
    names = sorted(unfit | {head.name for head in component.read_heads})
    if names:
        raise ConfigError(
            f"{where}: measure_every cannot measure the loss {component.cls.name!r}, which reads "
            f"{names[0]!r}. Use an algorithm for demonstrations, such as sft."
        )


def _check_env(
    where: str,
    cls: type[Algorithm],
    component: Component,
    env: EnvConfig,
    config: RunConfig,
    heads_of_groups: Sequence[str],
) -> None:
    """The algorithm's needs: siblings to compare with, a temperature, and a row that holds the
    longest group that its loss, or a head, may see whole."""
    size = env.group_size or config.orchestrator.group_size
    longest = config.seq_len
    if cls.group_relative and size == 1:
        raise ConfigError(
            f"{where} credits a rollout relative to its siblings, so with group_size = 1 every "
            "advantage is zero and nothing is learned. Set group_size to 2 or more."
        )

    wanted = cls.needs_temperature
    temperature = (env.sampling or config.orchestrator.train.sampling).temperature
    if wanted is not None and temperature != wanted:
        raise ConfigError(
            f"{where} can learn at a sampling temperature of {wanted:g} only, got "
            f"{temperature:g}. Set orchestrator.train.sampling.temperature, or the env's own."
        )

    whole = [f"loss {component.cls.name!r}"] if component.scope == "group" else []
    whole += [f"head {name!r}" for name in heads_of_groups]
    if whole and size * longest > config.row_tokens:
        raise ConfigError(
            f"{where}: its {whole[0]} sees a group whole, so one row has to hold "
            f"{size} samples of seq_len {longest}, and it holds {config.row_tokens} tokens. Set "
            f"trainer.micro_batch_tokens to {size * longest} or more, or lower seq_len."
        )


def _check_source(
    where: str,
    cls: type[Algorithm],
    env: EnvConfig,
    algo: AlgoConfig,
    component: Component,
    hooks: Hooks,
) -> None:
    """Refuse a sampling source that the algorithm's component cannot train on."""
    sampling = algo.sampling
    name = component.name
    source = sampling.source
    if sampling.client != "tokens" and not isinstance(source, FrozenModel):
        raise ConfigError(
            f"{where}: sampling.client = {sampling.client!r} applies to a frozen model, and "
            "sampling.source is none. Leave it out."
        )

    if source == "policy" and cls.needs_frozen_source:
        raise ConfigError(
            f"{where} imitates its source, and sampling.source is 'policy': training on the "
            "policy's own tokens would teach it nothing. Set sampling.source to a frozen model "
            '(name and base_url) or to a source of demonstrations ({ type = "dataset", ... }).'
        )

    if isinstance(source, FrozenModel) and component.cls.compares_with_sampler:
        raise ConfigError(
            f"{where} trains the {name} component, whose importance ratio needs the policy's "
            f"own sampling logprobs, and sampling.source is the frozen model {source.name!r}. "
            "Leave sampling.source at 'policy', or use an algorithm that imitates, such as "
            "supervised fine-tuning."
        )

    if isinstance(source, SourceTable):
        key = f"{where}: sampling.source"
        offered, _ = choose(SOURCE, source.type, table=source.settings, hooks=hooks, where=key)
        if cls.needs_frozen_source and offered.from_policy:
            raise ConfigError(
                f"{where} imitates its source, and source {source.type!r} gives rollouts of the "
                "policy itself. Use a source of demonstrations or a frozen model."
            )

        # In `feeds`, `rl` stands for every loss that compares with the sampler.
        if component.cls.compares_with_sampler and not {"rl", name} & offered.feeds:
            raise ConfigError(
                f"{where} trains the {name} component, which compares with sampling logprobs, and "
                f"source {source.type!r} has none: its tokens were not sampled from the policy. "
                "Use an algorithm that imitates, such as supervised fine-tuning, or another source."
            )

        for unread in ("group_size", "sampling", "max_turns", "harness"):
            if getattr(env, unread) is not None:
                raise ConfigError(
                    f"{where}: {unread} is set, and this env samples nothing: its rollouts come "
                    "from sampling.source. Leave it out."
                )


def check_tasksets(config: RunConfig, algorithms: Iterable[tuple[EnvConfig, Algorithm]]) -> None:
    """Every taskset is installed, where the processes of the run find it too, and has the agents
    that the algorithm names. Raises ``ConfigError``."""
    for label in ("train", "eval"):
        table = getattr(config.orchestrator, label)
        for number, env in enumerate(table.env):
            where = f"orchestrator.{label}.env.{number}"
            check_taskset(env.id, f"{where}.id", env.args)
            _check_found_by_all("tasksets", current_id(env.id), f"{where}.id")
            if env.harness is not None:
                _check_harness(env.harness, f"{where}.harness")
            for place, harness in _harnesses_in(env.args, f"{where}.args"):
                _check_harness(harness, place)

        # Whether it is installed matters only to an env that brings none.
        default = (table.harness or {}).get("id", "")
        _check_found_by_all("harnesses", str(default), f"orchestrator.{label}.harness.id")

    # An env with one algorithm for all agents has one part, which no agent names.
    for env, algorithm in algorithms:
        parts = parts_of(algorithm)
        with_algorithm = {part.agent for part in parts}
        for part in parts:
            if type(part.algorithm).check_agents is Algorithm.check_agents:
                continue
            known = EnvSettings.of(env, default_harness=config.orchestrator.train.harness)
            agents = find_agents(known)  # it takes seconds
            mine = (
                (part.agent,) if part.agent else tuple(n for n in agents if n not in with_algorithm)
            )
            part.algorithm.check_agents(env.label, mine)


def _harnesses_in(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables ``harness`` of an env's agents, such as a judge, and their places. Only the env's
    module knows its agents, and importing it may take a minute: what else is called ``harness`` and
    has no id passes."""
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from _harnesses_in(part, f"{where}.{number}")
    elif isinstance(value, Mapping):
        for name, part in value.items():
            place = f"{where}.{name}"
            if name == "harness" and isinstance(part, Mapping) and "id" in part:
                yield place, part
            else:
                yield from _harnesses_in(part, place)


def _check_harness(table: Mapping[str, Any], where: str) -> None:
    """Refuse a harness without an id, and one that no module can be."""
    name = table.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f'{where}: expected a table with the id of a harness, such as {{ id = "in-process" }}, '
            f"got {dict(table)!r}"
        )
    module = module_of(name)
    shipped = shipped_by_verifiers("harnesses")
    if module not in shipped and not (module.isidentifier() and find_spec(module)):
        package = bringer("harness", name)
        names = [entry.name.partition(".") for entry in entries("prime_rl.known")]
        known = {module_of(each) for kind, _, each in names if kind == "harness"}
        close = difflib.get_close_matches(module, {*shipped, *known}, n=1, cutoff=0.8)
        hint = "Install its package."
        if package is not None:
            hint = f"pip install {package}"
        elif close:
            hint = f"Did you mean {close[0].replace('_', '-')!r}?"
        raise ConfigError(f"{where}.id: no harness {name!r}: there is no module {module!r}. {hint}")
    _check_found_by_all("harnesses", name, f"{where}.id")


def _check_found_by_all(kind: str, component: str, where: str) -> None:
    """Refuse a taskset or harness that this process finds, and those of the run would not."""
    module = module_of(component)
    if not module.isidentifier() or module in shipped_by_verifiers(kind):
        return
    folder = folder_only_here(module)
    if folder is not None:
        raise ConfigError(
            f"{where}: module {module!r} of {component!r} is in {folder}, which is on the path of "
            "this process only: the processes of the run search what is installed and PYTHONPATH, "
            "neither a script's folder nor the working directory. Install its package "
            f"(pip install -e), or start the run with PYTHONPATH={folder}."
        )
