"""Config checks of environments and their algorithms: labels, sizes, and sources of rollouts."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from prime_rl import Algorithm
from prime_rl.config.contract import FrozenModel
from prime_rl.config.orchestrator import AlgoConfig, EnvConfig, SourceTable
from prime_rl.config.run import RunConfig
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import (
    check_taskset,
    find_agents,
    module_of,
    shipped_by_verifiers,
)
from prime_rl.errors import ConfigError
from prime_rl.registry.checks import marked_hooks
from prime_rl.registry.components import Component, Components
from prime_rl.registry.import_path import folder_only_here
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import ALGORITHM, RENDERER, SOURCE, choose, collect, make, select
from prime_rl.streams import OBSERVATION_WEIGHTS, WEIGHTS
from prime_rl_app.config import installed_defaults

RESERVED_LABELS = ("agg", "all", "effective")
"""Labels that metrics use for all envs together."""


def check_envs(config: RunConfig) -> None:
    """Environments exist and have distinct labels; groups divide the batch, suffice for its
    minibatches and fit in flight; a row holds a sample. Raises ``ConfigError``."""
    orchestrator = config.orchestrator
    row = config.trainer.micro_batch_tokens
    envs = orchestrator.train.env
    inflight = orchestrator.max_inflight_rollouts
    if not envs:
        raise ConfigError(
            "orchestrator.train.env: the run has no training environment. Add a table "
            "[[orchestrator.train.env]] with an id."
        )

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

    sizes = [env.group_size or orchestrator.group_size for env in envs]
    for env, size in zip(envs, sizes, strict=True):
        if orchestrator.batch_size % size:
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
    groups = orchestrator.batch_size // min(sizes)
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
    ``ConfigError``, of the first env that has one."""
    shared = config.orchestrator.algo
    default = installed_defaults().get("orchestrator", {}).get("algo", {})
    envs = config.orchestrator.train.env
    # No env uses the shared table: it must be valid if the user has written it.
    if shared not in (AlgoConfig(), AlgoConfig(**default)) and all(env.algo for env in envs):
        choose(ALGORITHM, shared.type, shared.settings, hooks, "orchestrator.algo")
    chosen = []
    for env, algorithm in algorithms:
        cls = type(algorithm)
        action_loss = algorithm.action_loss
        where = f"env {env.label!r}: algorithm {cls.name!r}"
        try:
            component = losses[action_loss]
        except ConfigError as error:
            where = "" if action_loss == "rl" else f"{where} trains the loss {action_loss!r}. "
            raise ConfigError(f"{where}{error}") from error

        _check_losses(where, algorithm, losses)
        missing = [name for name in cls.needs_heads if name not in losses.heads]
        if missing:
            raise ConfigError(
                f"{where} needs the head {missing[0]!r}, which is no part of this run. Add a table "
                f"[trainer.heads.{missing[0]}]; it may be empty."
            )

        _check_env(where, cls, component, env, config)
        _check_source(where, cls, env, env.algo or shared, component, hooks)
        chosen.append((where, algorithm, component))
        renderer = config.orchestrator.renderer.name
        if cls.needs_attribution:
            rendering = select(RENDERER, renderer, collect(hooks, RENDERER), RENDERER.key)
            if not rendering.gives_attribution:
                raise ConfigError(
                    f"{where} tells tokens apart by their message's role and body, and renderer "
                    f"{renderer!r} does not tell it. Set orchestrator.renderer.name to the "
                    "renderer of the model's family."
                )

    _check_unread(config, hooks, losses, [algorithm for _, algorithm, _ in chosen])
    _check_earlier_weights(chosen, config)


def algorithm_of(env: EnvConfig, config: RunConfig, hooks: Hooks) -> Algorithm:
    """The algorithm of a training env. Raises ``ConfigError``."""
    algo = env.algo or config.orchestrator.algo
    where = f"env {env.label!r}: algo"
    return make(ALGORITHM, algo.type, algo.settings, hooks, where)


def _check_earlier_weights(
    chosen: Sequence[tuple[str, Algorithm, Component]], config: RunConfig
) -> None:
    """The run has the earlier weights that losses and algorithms read, and no others."""
    initial = config.orchestrator.initial
    decay = config.trainer.ema_decay
    key = "deployment.colocated" if config.deployment.colocated else ""
    num_readers = 0
    key = key if config.inference.base_url is None else "inference.base_url"
    for where, algorithm, component in chosen:
        num_readers += (of_loss := "ema_logprobs" in component.computed) or algorithm.needs_ema
        if num_readers and decay is None:
            loss = of_loss and f"trains the loss {component.cls.name!r}, which reads ema_logprobs"
            raise ConfigError(
                f"{where} {loss or 'reads host.ema'}, and trainer.ema_decay is not "
                "set. Set it, 0.99 for example."
            )

        if algorithm.needs_ema and key:
            raise ConfigError(f"{where} reads host.ema, an engine that no run with {key} starts.")
        if algorithm.needs_initial and initial is None and key:
            raise ConfigError(
                f"{where} asks an engine with the weights that the run began with, and with {key} "
                f"the run starts none. Serve them (prime-rl serve {config.model.name}), and set "
                "orchestrator.initial to the model's name and base_url."
            )

    if initial is not None and not any(each.needs_initial for _, each, _ in chosen):
        raise ConfigError("orchestrator.initial: no env's algorithm reads it. Leave it out.")
    if decay is not None and not num_readers:
        raise ConfigError("trainer.ema_decay: no env reads ema_logprobs or host.ema. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class EarlierWeights:
    """Weights of the policy before the newest, that the run needs too."""

    are_read: bool
    """A loss reads the policy's first weights."""
    engines: tuple[str, ...]
    """Those that algorithms ask engines for which the run has to start: ``initial``, ``ema``."""


def earlier_weights(
    config: RunConfig, algorithms: Iterable[Algorithm], losses: Components
) -> EarlierWeights:
    initial = False
    ema = False
    names = set(config.trainer.losses)
    for algorithm in algorithms:
        names.add(algorithm.action_loss)
        initial |= algorithm.needs_initial and config.orchestrator.initial is None
        ema |= algorithm.needs_ema

    asked = {"initial": initial, "ema": ema}
    return EarlierWeights(
        are_read=any("initial_logprobs" in losses[name].computed for name in names),
        engines=tuple(name for name, is_asked in asked.items() if is_asked),
    )


def _check_losses(where: str, algorithm: Algorithm, losses: Components) -> None:
    """The losses that the algorithm declares are installed, and rl is one of them."""
    declared = {*algorithm.losses}
    for name in sorted(declared - {"rl"}):
        try:
            losses[name]
        except ConfigError as error:
            raise ConfigError(f"{where} trains the loss {name!r}. {error}") from error

    used = losses["rl"].loss.name if algorithm.action_loss == "rl" and declared else "rl"
    if declared and not declared & {"rl", used, algorithm.action_loss}:
        raise ConfigError(
            f"{where} needs the loss {' or '.join(sorted(declared))}, and trainer.loss.type is "
            f"{used!r}: its tokens would train in another loss than it was written for. Set "
            f"trainer.loss.type to {sorted(declared)[0]!r}."
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

    for name in sorted(config.trainer.losses.keys() - named):
        if name in losses:  # else the message about its name says more
            raise ConfigError(
                f"trainer.losses.{name}: no env's algorithm trains this loss (they train "
                f"{', '.join(sorted(named))}). Leave the table out, choose an algorithm that names "
                "the loss, or have yours declare it (Algorithm.losses)."
            )


def _check_env(
    where: str, cls: type[Algorithm], component: Component, env: EnvConfig, config: RunConfig
) -> None:
    """The algorithm's needs: siblings to compare with, a temperature, and a row that holds the
    longest group that its loss may see whole."""
    size = env.group_size or config.orchestrator.group_size
    longest = config.seq_len
    if cls.group_relative and size == 1:
        raise ConfigError(
            f"{where} credits a rollout relative to its siblings, so with group_size = 1 every "
            "advantage is zero and nothing is learned. Set group_size to 2 or more."
        )

    wanted = cls.needs_temperature
    found = (env.sampling or config.orchestrator.train.sampling).temperature
    if wanted is not None and found != wanted:
        raise ConfigError(
            f"{where} can learn at a sampling temperature of {wanted:g} only, got {found:g}. Set "
            "orchestrator.train.sampling.temperature, or the env's own."
        )

    if component.scope == "group" and size * longest > config.row_tokens:
        raise ConfigError(
            f"{where}: its loss {component.cls.name!r} sees a group whole, so one row has to hold "
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
        offered, _ = choose(SOURCE, source.type, source.settings, hooks, key)
        if cls.needs_frozen_source and offered.from_policy:
            raise ConfigError(
                f"{where} imitates its source, and source {source.type!r} gives rollouts of the "
                "policy itself. Use a source of demonstrations or a frozen model."
            )

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
            _check_found_by_all("tasksets", env.id, f"{where}.id")
            if env.harness is not None:
                _check_harness(env.harness, f"{where}.harness")

        # Whether it is installed matters only to an env that brings none.
        default = (table.harness or {}).get("id", "")
        _check_found_by_all("harnesses", str(default), f"orchestrator.{label}.harness.id")

    for env, algorithm in algorithms:
        if type(algorithm).check_agents is not Algorithm.check_agents:  # it takes seconds
            known = EnvSettings.of(env, default_harness=config.orchestrator.train.harness)
            algorithm.check_agents(env.label, find_agents(known))


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
        close = difflib.get_close_matches(module, {*shipped, "in_process"}, n=1, cutoff=0.8)
        hint = f"Did you mean {close[0].replace('_', '-')!r}?" if close else "Install its package."
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
