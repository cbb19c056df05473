"""Everything that can be known to fail before a process is started: names, plugin settings, sizes
that don't divide."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.adapter import is_adapter
from prime_rl.config.models import FrozenModel
from prime_rl.config.orchestrator import (
    AlgoConfig,
    AlgoSamplingConfig,
    EnvConfig,
    FilterConfig,
    SourceConfig,
    SourceTable,
)
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.env import check_taskset
from prime_rl.plugins.base import Algorithm, Engine, Filter, ModelMaker, RendererOffer
from prime_rl.plugins.errors import ConfigError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.manager import Hooks, installed_entries, load_plugins
from prime_rl.plugins.offers import (
    ALGORITHM,
    ENGINE,
    FILTER,
    LAUNCHER,
    LOSS,
    MODEL,
    MONITOR,
    RENDERER,
    SAMPLER,
    SOURCE,
    Kind,
    Offered,
    collect,
    select,
    settings_of,
)
from prime_rl.run.gpus import check_shares, gpus_of, num_ranks

RESERVED_LABELS = ("agg", "all", "effective")
"""Names that metrics use for what is over all envs."""


def check(config: RunConfig) -> Hooks:
    """Validate what needs plugins. Returns the loaded plugins; raises ``ConfigError`` or
    ``PluginError``."""
    hooks = load_plugins(disabled=config.plugins.disabled)
    trainer = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    _check_disabled(config, hooks, trainer)
    _check_envs(config)
    _check_sizes(config)
    config.trainer.scheduler.check(config.trainer.optim.lr, config.max_steps)
    _check_algorithms(config, hooks)
    _check_filters(config, hooks)
    build_model_maker(config, hooks)  # before the renderer, which depends on the model
    orchestrator = config.orchestrator
    sampler = orchestrator.sampler_table
    where = SAMPLER.key if orchestrator.buffer is None else "orchestrator.buffer"
    _check(SAMPLER, sampler.type, sampler.settings, hooks, where)
    _check_renderer(config, hooks)
    for name, table in config.monitors.items():
        _check(MONITOR, name, table, hooks, f"monitors.{name}")
    check_engine(config, hooks)
    _check_deployment(config, hooks)
    _check_broadcast(config)
    _check(LOSS, config.trainer.loss.type, config.trainer.loss.settings, trainer, "trainer.loss")
    for label in ("train", "eval"):
        for number, env in enumerate(getattr(orchestrator, label).env):
            check_taskset(env.id, f"orchestrator.{label}.env.{number}.id")
    return hooks


def build_engine(config: RunConfig, hooks: Hooks) -> Engine:
    """The engine plugin with its settings. Raises ``ConfigError``."""
    inference = config.inference
    cls = select(ENGINE, inference.engine, collect(hooks, ENGINE), "inference.engine")
    if inference.unread:
        raise ConfigError(
            f"inference.{inference.unread[0]}: unknown key; the engine's own settings go into "
            f"[inference.{inference.engine}]"
        )
    where = f"inference.{inference.engine}"
    return cls(settings_of(cls, ENGINE, inference.settings, where))


def check_engine(config: RunConfig, hooks: Hooks) -> None:
    """Whether the engine can be started here, or be steered elsewhere. Raises ``ConfigError``."""
    engine = build_engine(config, hooks)
    if config.inference.base_url is None:
        engine.check(config.inference.interpreter)
    else:
        _check_elsewhere(config)


def _check_deployment(config: RunConfig, hooks: Hooks) -> None:
    """Launcher, GPUs and ranks fit one another."""
    gpus = gpus_of(config, build_launcher(config, hooks))
    num_ranks(config, gpus)
    if config.inference.base_url is None:
        engine = build_engine(config, hooks)
        check_shares(gpus, engine.num_gpus)
        _check_precision(config, engine.dtype)


def _check_precision(config: RunConfig, served: str | None) -> None:
    """Weights lose nothing on their way that the engine would keep."""
    if config.trainer.publish_dtype == "bfloat16" and served not in (None, "bfloat16"):
        name = config.inference.engine
        raise ConfigError(
            f"trainer.publish_dtype is 'bfloat16', and inference.{name}.dtype is {served!r}: the "
            "engine would serve weights of less precision than it computes in. Set both to "
            "'bfloat16', or leave publish_dtype out."
        )


def _check_broadcast(config: RunConfig) -> None:
    """Weights can go the way they should."""
    way = config.weight_broadcast.type
    if way == "filesystem":
        return
    for where, is_so, why in (
        ("trainer.lora", config.trainer.lora is not None, "adapters are published as files"),
        ("deployment.colocated", config.deployment.colocated, "engines that wake read files"),
        ("trainer.device", way == "nccl" and config.trainer.device == "cpu", "NCCL needs GPUs"),
    ):
        if is_so:
            raise ConfigError(
                f"weight_broadcast.type is {way!r}, which does not go with {where}: {why}. Set it "
                "to 'filesystem', or change the other."
            )


def _check_elsewhere(config: RunConfig) -> None:
    """Engines that are running already."""
    variable = config.inference.admin_key_var
    if not os.environ.get(variable):
        raise ConfigError(
            "inference.base_url: new weights need the key of the engines' admin routes, and the "
            f"environment variable {variable} (inference.admin_key_var) is not set, or empty. "
            "Export the key they were started with; prime-rl serve --show-admin-key prints it."
        )
    if config.deployment.colocated:
        raise ConfigError(
            "deployment.colocated has engines and trainer take turns on one GPU, and "
            "inference.base_url names engines that this run does not start. Leave one of them out."
        )


def build_launcher(config: RunConfig, hooks: Hooks) -> Launcher:
    """The launcher plugin with its settings. Raises ``ConfigError``."""
    table = config.launcher
    cls = select(LAUNCHER, table.type, collect(hooks, LAUNCHER), "launcher.type")
    return cls(settings_of(cls, LAUNCHER, table.settings, "launcher"))


def build_model_maker(config: RunConfig, hooks: Hooks) -> ModelMaker | None:
    """The plugin that makes ``model.name`` here, or None if it is a checkpoint. Raises
    ``ConfigError``."""
    offers, model = collect(hooks, MODEL), config.model
    if model.name in offers and not Path(model.name).exists():
        cls = offers[model.name].cls
        return cls(settings_of(cls, MODEL, model.settings, "model"))
    if model.settings:
        raise ConfigError(f"model.{next(iter(model.settings))}: unknown key of a checkpoint")
    # A path to nothing is no hub id, even where it could be one by its form.
    is_path = model.name.startswith((".", "/", "~")) or model.name.count("/") > 1
    is_path = is_path or ("/" in model.name and Path(model.name).parent.is_dir())
    if Path(model.name).is_dir():
        _check_folder(Path(model.name))
    elif is_path or "/" not in model.name:
        made = ", ".join(offers) or "none"
        raise ConfigError(
            f"model.name: {model.name!r} is no folder, no hub id (owner/name), and no model that "
            "an "
            f"installed plugin makes (those are: {made})"
        )
    return None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"model.name: {folder} has no config.json; expected a Hugging Face folder"
        )
    if is_adapter(folder) and not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"model.name: {folder} holds a LoRA adapter without its base. The model that its run "
            "exported, RUN/weights, has the adapter merged in."
        )


def _check_renderer(config: RunConfig, hooks: Hooks) -> None:
    table, where = config.orchestrator.renderer, RENDERER.key
    cls = _renderer_class(config, hooks)
    cls(settings_of(cls, RENDERER, table.settings, where)).check(config.model.name)


def _renderer_class(config: RunConfig, hooks: Hooks) -> type[RendererOffer]:
    return select(
        RENDERER, config.orchestrator.renderer.name, collect(hooks, RENDERER), RENDERER.key
    )


def _check_envs(config: RunConfig) -> None:
    orchestrator = config.orchestrator
    if not orchestrator.train.env:
        raise ConfigError(
            "orchestrator.train.env: the run has no training environment. Add a table "
            "[[orchestrator.train.env]] with an id."
        )
    for label, envs in (("train", orchestrator.train.env), ("eval", orchestrator.eval.env)):
        _check_labels(label, envs)
    for env in orchestrator.train.env:
        size = env.group_size or orchestrator.group_size
        if orchestrator.batch_size % size:
            raise ConfigError(
                f"env {env.label!r}: group_size {size} does not divide orchestrator.batch_size "
                f"{orchestrator.batch_size}. Make the batch a multiple of every group size."
            )


def _check_sizes(config: RunConfig) -> None:
    row, inflight = config.trainer.micro_batch_tokens, config.orchestrator.max_inflight_rollouts
    if row is not None and row < config.seq_len:
        raise ConfigError(
            f"trainer.micro_batch_tokens: a row of {row} tokens cannot hold a sample of seq_len = "
            f"{config.seq_len}. Raise it to seq_len or more, or leave it out."
        )
    envs = config.orchestrator.train.env
    largest = max(env.group_size or config.orchestrator.group_size for env in envs)
    if inflight is not None and inflight < largest:
        raise ConfigError(
            f"orchestrator.max_inflight_rollouts: {inflight} cannot hold one group of {largest}. "
            "Raise it, or lower group_size."
        )


def _check_disabled(config: RunConfig, *loaded: Hooks) -> None:
    installed = {entry.name for hooks in loaded for entry in installed_entries(hooks.group)}
    for name in config.plugins.disabled:
        if name not in installed:
            raise ConfigError(
                f"plugins.disabled: no installed plugin is called {name!r} "
                f"(installed: {', '.join(sorted(installed))})"
            )


def _check_labels(where: str, envs: Sequence[SourceConfig]) -> None:
    counts = Counter(env.label for env in envs)
    for label, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"orchestrator.{where}.env: {count} envs are called {label!r}. Give each its own "
                "name."
            )
        if label in RESERVED_LABELS:
            raise ConfigError(f"orchestrator.{where}.env: the name {label!r} is taken by metrics")


def _check_algorithms(config: RunConfig, hooks: Hooks) -> None:
    offers = collect(hooks, ALGORITHM)
    shared = config.orchestrator.algo
    if shared != AlgoConfig() and all(env.algo for env in config.orchestrator.train.env):
        cls = select(ALGORITHM, shared.type, offers, "orchestrator.algo")
        settings_of(cls, ALGORITHM, shared.settings, "orchestrator.algo")
    for env in config.orchestrator.train.env:
        algo, where = env.algo or config.orchestrator.algo, f"env {env.label!r}: algo"
        cls = select(ALGORITHM, algo.type, offers, where)
        settings_of(cls, ALGORITHM, algo.settings, where)
        _check_group_size(config, env, cls)
        here = f"env {env.label!r}: algorithm {cls.name!r}"
        _check_source(here, cls, algo.sampling, hooks)
        _check_temperature(here, cls, env, config)
        if isinstance(algo.sampling.source, SourceTable):
            _check_unsampled(here, env)
        if cls.needs_attribution and not _renderer_class(config, hooks).gives_attribution:
            raise ConfigError(
                f"env {env.label!r}: algorithm {cls.name!r} tells tokens apart by their message's "
                f"role and body, and renderer {config.orchestrator.renderer.name!r} does not tell "
                "it. Set orchestrator.renderer.name to the renderer of the model's family."
            )


def _check_source(
    where: str, cls: type[Algorithm], sampling: AlgoSamplingConfig, hooks: Hooks
) -> None:
    """Refuse who samples, if the algorithm's component cannot train on it."""
    source, component = sampling.source, cls.action_loss
    if sampling.client != "tokens" and not isinstance(source, FrozenModel):
        raise ConfigError(
            f"{where}: sampling.client = {sampling.client!r} says how a frozen model is asked, and "
            "sampling.source is none. Leave it out."
        )
    if source == "policy" and cls.needs_frozen_source:
        raise ConfigError(
            f"{where} imitates who samples, and sampling.source is 'policy': training on the "
            "policy's own tokens would teach it nothing. Set sampling.source to a frozen model "
            '(name and base_url) or to a source of demonstrations ({ type = "dataset", ... }).'
        )
    if isinstance(source, FrozenModel) and component != "ce":
        raise ConfigError(
            f"{where} trains the {component} component, whose importance ratio needs the policy's "
            f"own sampling logprobs, and sampling.source is the frozen model {source.name!r}. "
            "Leave sampling.source at 'policy', or use an algorithm that feeds ce, such as sft."
        )
    if isinstance(source, SourceTable):
        offered = select(SOURCE, source.type, collect(hooks, SOURCE), f"{where}: sampling.source")
        settings_of(offered, SOURCE, source.settings, f"{where}: sampling.source")
        if cls.needs_frozen_source and offered.from_policy:
            raise ConfigError(
                f"{where} imitates who samples, and source {source.type!r} gives what the policy "
                "itself wrote. Use a source of demonstrations or a frozen model."
            )
        if component not in offered.feeds:
            raise ConfigError(
                f"{where} trains the {component} component, and source {source.type!r} can feed "
                f"{', '.join(sorted(offered.feeds))} only: nobody sampled its tokens from the "
                "policy. Use an algorithm that feeds ce, such as sft, or another source."
            )


def _check_temperature(where: str, cls: type[Algorithm], env: EnvConfig, config: RunConfig) -> None:
    own, wanted = env.sampling, cls.needs_temperature
    group = config.orchestrator.train.sampling.temperature
    found = own.temperature if own and "temperature" in own.model_fields_set else group
    if wanted is not None and found != wanted:
        raise ConfigError(
            f"{where} can learn at a sampling temperature of {wanted:g} only, got {found:g}. Set "
            "orchestrator.train.sampling.temperature, or the env's own."
        )


def _check_unsampled(where: str, env: EnvConfig) -> None:
    """Nothing samples for an env with a source, so nothing would read these."""
    for key in ("group_size", "sampling", "max_turns", "harness"):
        if getattr(env, key) is not None:
            raise ConfigError(
                f"{where}: {key} is set, and nobody samples for this env: its rollouts come from "
                "sampling.source. Leave it out."
            )


def _check_group_size(config: RunConfig, env: EnvConfig, cls: type[Algorithm]) -> None:
    size = env.group_size or config.orchestrator.group_size
    if cls.group_relative and size == 1:
        raise ConfigError(
            f"env {env.label!r}: algorithm {cls.name!r} credits a rollout relative to its "
            "siblings, so with "
            "group_size = 1 every advantage is zero and nothing is learned. Set group_size to 2 "
            "or more."
        )


def _check_filters(config: RunConfig, hooks: Hooks) -> None:
    offers = collect(hooks, FILTER)
    for name in ("pre_batch_filters", "post_batch_filters"):
        slot: tuple[FilterConfig, ...] = getattr(config.orchestrator, name)
        _check_slot(f"orchestrator.{name}", slot, offers)


def _check_slot(
    where: str, slot: Sequence[FilterConfig], offers: dict[str, Offered[Filter]]
) -> None:
    counts = Counter(filter.type for filter in slot)
    for filter in slot:
        if counts[filter.type] > 1:
            raise ConfigError(
                f"{where}: filter {filter.type!r} is listed {counts[filter.type]} times"
            )
        cls = select(FILTER, filter.type, offers, where)
        settings_of(cls, FILTER, filter.settings, where)


def _check(
    kind: Kind[Any],
    name: str,
    settings: Mapping[str, Any],
    hooks: Hooks,
    where: str | None = None,
) -> None:
    place = where or kind.key
    cls = select(kind, name, collect(hooks, kind), place)
    settings_of(cls, kind, settings, place)
