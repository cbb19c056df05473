"""Config checks of environments and their algorithms: labels, sizes, and sources of rollouts."""

from __future__ import annotations

from collections import Counter

from prime_rl import Algorithm
from prime_rl.config.load import installed_defaults
from prime_rl.config.models import FrozenModel
from prime_rl.config.orchestrator import AlgoConfig, EnvConfig, SourceTable
from prime_rl.config.run import RunConfig
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import check_taskset, find_agents
from prime_rl.errors import ConfigError
from prime_rl.plugins.components import Component, Components
from prime_rl.plugins.manager import Hooks
from prime_rl.plugins.offers import (
    ALGORITHM,
    RENDERER,
    SOURCE,
    choose,
    collect,
    select,
)

RESERVED_LABELS = ("agg", "all", "effective")
"""Labels that metrics use for all envs together."""


def check_envs(config: RunConfig) -> None:
    """Environments exist and have distinct labels; groups divide the batch, suffice for its
    minibatches and fit in flight; a row holds a sample. Raises ``ConfigError``."""
    orchestrator, row = config.orchestrator, config.trainer.micro_batch_tokens
    envs, inflight = orchestrator.train.env, orchestrator.max_inflight_rollouts
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
    for env in envs:
        size = env.group_size or orchestrator.group_size
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
    sizes = [env.group_size or orchestrator.group_size for env in envs]
    sources = [(env.algo or orchestrator.algo).sampling.source for env in envs]
    if any(isinstance(source, SourceTable) for source in sources):  # groups of any size
        sizes.append(1)
    largest, groups = max(sizes), orchestrator.batch_size // min(sizes)
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


def check_algorithms(config: RunConfig, hooks: Hooks, losses: Components) -> None:
    """Each env's algorithm and its loss are installed and can train on the env's rollouts. Raises
    ``ConfigError``."""
    shared = config.orchestrator.algo
    default = installed_defaults().get("orchestrator", {}).get("algo", {})
    envs = config.orchestrator.train.env
    # No env uses the shared table: it must be valid if the user has written it.
    if shared not in (AlgoConfig(), AlgoConfig(**default)) and all(env.algo for env in envs):
        choose(ALGORITHM, shared.type, shared.settings, hooks, "orchestrator.algo")
    initial, readers = config.orchestrator.initial, 0
    for env in envs:
        algo = env.algo or shared
        where = f"env {env.label!r}: algo"
        cls, settings = choose(ALGORITHM, algo.type, algo.settings, hooks, where)
        action_loss = cls(settings).action_loss
        where = f"env {env.label!r}: algorithm {cls.name!r}"
        _check_env(where, cls, env, config)
        try:
            component = losses[action_loss]
        except ConfigError as error:
            where = "" if action_loss == "rl" else f"{where} trains the loss {action_loss!r}. "
            raise ConfigError(f"{where}{error}") from error
        if missing := [name for name in cls.needs_heads if name not in losses.heads]:
            raise ConfigError(
                f"{where} needs the head {missing[0]!r}, which is no part of this run. Add a table "
                f"[trainer.heads.{missing[0]}]; it may be empty."
            )
        _check_scope(where, component, env, config)
        _check_source(where, cls, env, algo, component, hooks)
        readers += cls.needs_initial
        if cls.needs_initial and initial is None:
            raise ConfigError(
                f"{where} compares the policy with the weights that the run began with. Serve them "
                f"(prime-rl serve {config.model.name}), and set orchestrator.initial to the "
                "model's name and base_url."
            )
        renderer = config.orchestrator.renderer.name
        if cls.needs_attribution:
            rendering = select(RENDERER, renderer, collect(hooks, RENDERER), RENDERER.key)
            if not rendering.gives_attribution:
                raise ConfigError(
                    f"{where} tells tokens apart by their message's role and body, and renderer "
                    f"{renderer!r} does not tell it. Set orchestrator.renderer.name to the "
                    "renderer of the model's family."
                )
    if initial is not None and not readers:
        raise ConfigError("orchestrator.initial: no env's algorithm reads it. Leave it out.")


def _check_env(where: str, cls: type[Algorithm], env: EnvConfig, config: RunConfig) -> None:
    """The algorithm's needs: siblings to compare with, and a temperature."""
    if cls.group_relative and (env.group_size or config.orchestrator.group_size) == 1:
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


def _check_scope(where: str, component: Component, env: EnvConfig, config: RunConfig) -> None:
    """A row holds the longest group that a loss may see whole."""
    size, longest = env.group_size or config.orchestrator.group_size, config.seq_len
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
    sampling, name = algo.sampling, component.name
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


def check_tasksets(config: RunConfig, hooks: Hooks) -> None:
    """Every taskset is installed and has the agents that the algorithm names. Raises
    ``ConfigError``."""
    for label in ("train", "eval"):
        for number, env in enumerate(getattr(config.orchestrator, label).env):
            check_taskset(env.id, f"orchestrator.{label}.env.{number}.id")
    for env in config.orchestrator.train.env:
        algo, where = env.algo or config.orchestrator.algo, f"env {env.label!r}: algo"
        cls, settings = choose(ALGORITHM, algo.type, algo.settings, hooks, where)
        if cls.check_agents is not Algorithm.check_agents:  # it takes seconds
            known = EnvSettings.of(env, default_harness=config.orchestrator.train.harness)
            cls(settings).check_agents(env.label, find_agents(known))
