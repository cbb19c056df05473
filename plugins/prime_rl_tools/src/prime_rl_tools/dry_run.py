"""What ``prime-rl run --dry-run`` shows: a run as it would start, with everything built that needs
no model and no process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pluggy import HookImpl

from prime_rl.config.orchestrator import EnvConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment, ExampleFailed
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import env_hooks
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.agents import parts_of
from prime_rl.orchestrator.build import build_filters, build_renderer
from prime_rl.orchestrator.context import rendering_of
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.plugins.sampler import SampledEnv
from prime_rl.registry.checks import SPECS
from prime_rl.registry.manager import Hooks, scope, wrappers
from prime_rl.registry.offers import (
    ALGORITHM,
    FILTER,
    LAUNCHER,
    MONITOR,
    SAMPLER,
    choose,
    construct,
    make,
)
from prime_rl_app.config import installed_defaults, merge
from prime_rl_app.output import counted
from prime_rl_app.placement import lay_out
from prime_rl_app.resolve import Resolved

MOST_CHARACTERS = 400
"""Most characters of the prompt that is shown."""


def describe(config: RunConfig, hooks: Hooks, quick: bool) -> Iterator[str]:
    """Build what a run builds, and say in lines what it will do. ``quick``: without the
    environments, whose library takes seconds to import. Raises ``ConfigError``, and any error of a
    plugin's constructor."""
    environments = {} if quick else dict(_environments(config))
    resolved = Resolved(config)
    build_parts(resolved, environments)
    orders = call_orders(scopes(resolved, hooks))
    yield from _processes(resolved)
    orchestrator = config.orchestrator
    if orchestrator.batch_size is None:
        size = f"rollouts of {orchestrator.token_batch_size:,} tokens per step"
    else:
        most = orchestrator.batch_size * config.seq_len
        size = f"{orchestrator.batch_size} rollouts, at most {most:,} tokens per step"
    yield f"batch      {size}, in rows of {config.row_tokens:,}"
    for env, algorithm in resolved.algorithms():
        environment = environments.get(env.label)
        count = "" if environment is None else f", {environment.num_examples or 'endless'} examples"
        yield f"env        {env.label}: {_algorithms(algorithm)}{count}"
        if environment is not None:
            others = ""
            if env.untrained:
                others = f"; without training: {_names(sorted(env.untrained))}"
            if environment.fixed_seats:
                others += f"; a model of their own: {_names(environment.fixed_seats)}"
            yield f"agents     {env.label}: the policy plays {_names(environment.agents)}{others}"

    yield f"renderer   {orchestrator.renderer.name}"
    yield from (f"wrapper    {line}" for line in wrappers(hooks))
    yield from orders
    yield from (f"set        {key} = {value!r}" for key, value in changed_keys(config))
    if environments:
        yield from _prompt(resolved, next(iter(environments.values())))


def _algorithms(algorithm: Algorithm) -> str:
    """An env's algorithm, or each agent's own."""
    parts = parts_of(algorithm)
    named = [f"{part.agent} by {part.algorithm.name}" for part in parts if part.agent]
    rest = [part.algorithm.name for part in parts if part.agent is None]
    if named:
        rest = [f"the other agents by {name}" for name in rest]
    return _names([*named, *rest])


def build_parts(resolved: Resolved, environments: Mapping[str, Environment]) -> None:
    """Call the constructors of losses, the sampler and monitors. Raises their errors."""
    config = resolved.config
    hooks = resolved.hooks
    losses = resolved.losses
    for name in losses.tables:
        construct(losses[name].cls, losses[name].settings)
    orchestrator = config.orchestrator
    known = []
    for env in orchestrator.train.env:
        environment = environments.get(env.label)
        if environment is not None:
            facts = (env.label, environment.num_examples, env.first_ratio)
            known.append(SampledEnv(*facts, task=partial(_task, environment)))

    table = orchestrator.sampler
    cls, settings = choose(
        SAMPLER, table.type, table=table.settings, hooks=hooks, where=SAMPLER.key
    )
    if environments:  # a sampler may look at their examples
        construct(cls, settings, known, config.seed)

    with TemporaryDirectory() as folder:
        for name, of_monitor in config.monitors.items():
            monitor = make(
                MONITOR,
                name,
                table=of_monitor,
                hooks=hooks,
                where=f"monitors.{name}",
                arguments=(Path(folder),),
            )
            with closing(monitor):
                pass


def _task(environment: Environment, index: int) -> Mapping[str, Any]:
    try:
        return environment.examples[index].fields
    except ExampleFailed as error:
        raise ConfigError(f"env {environment.settings.label!r}: {error}") from error


def scopes(resolved: Resolved, hooks: Hooks) -> Iterator[tuple[Hooks, Collection[str]]]:
    """The plugins of each scope, in the order of a run, and the hooks that are called in it. Calls
    the constructors of algorithms and filters, and raises their errors."""
    orchestrator = resolved.config.orchestrator
    for env, algorithm in resolved.algorithms():
        plugins = [*env_hooks(env.id, env.args), algorithm]
        yield scope(f"env {env.label}", hooks, plugins), ALGORITHM.hooks

    for slot in ("pre_batch_filters", "post_batch_filters"):
        filters = build_filters(hooks, getattr(orchestrator, slot), slot)
        yield scope(slot, hooks, [filter for filter, _ in filters]), FILTER.hooks

    yield hooks, SPECS.keys() - ALGORITHM.hooks - FILTER.hooks


def call_orders(scopes: Iterable[tuple[Hooks, Collection[str]]]) -> list[str]:
    """The order in which the plugins of a hook are called, if several implement or wrap it, and
    those that ask for a place that only one of them can have."""
    lines: dict[str, list[str]] = {}
    for hooks, called in scopes:
        for hook in (name for name in SPECS if name in called and "register_" not in name):
            impls = [*reversed(getattr(hooks.hook, hook).get_hookimpls())]  # as they are called
            around = [each for each in impls if each.wrapper]
            inside = [each for each in impls if not each.wrapper]
            if not around and (len(inside) < 2 or called is FILTER.hooks):  # all are asked
                continue
            inner = ", then ".join(_plugin(hooks, each) for each in inside) or "nothing"
            order = " around ".join([*(_plugin(hooks, each) for each in around), inner])
            lines.setdefault(f"order      {hook}: {order}", []).append(hooks.label)
            for asks, place in (("tryfirst", 0), ("trylast", -1)):
                for group in (around, inside):
                    rivals = [each for each in group if getattr(each, asks)]
                    if len(rivals) > 1:
                        named = _names(_plugin(hooks, each) for each in rivals)
                        which = f"{asks}: {named}; {_plugin(hooks, rivals[place])} gets it"
                        line = f"conflict   {hook}: more than one plugin asks for {which}"
                        lines.setdefault(line, []).append(hooks.label)

    return [f"{line} ({_names(labels)})" if any(labels) else line for line, labels in lines.items()]


def _plugin(hooks: Hooks, impl: HookImpl) -> str:
    """As an error names it; an algorithm or filter by its own name."""
    name = impl.plugin_name.rpartition(":")[2]
    return str(hooks.sources.get(impl.plugin_name, repr(name)))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _environments(config: RunConfig) -> Iterator[tuple[str, Environment]]:
    """The environments of the run, whose own config classes check their args; those of training by
    label."""
    orchestrator = config.orchestrator
    problems = list[str]()
    for env in (*orchestrator.train.env, *orchestrator.eval.env):
        try:
            environment = Environment(
                EnvSettings.of(env, default_harness=orchestrator.train.harness)
            )
        except ConfigError as error:
            problems.append(str(error))
            continue

        if isinstance(env, EnvConfig):  # one to train on
            if not environment.agents:
                raise ConfigError(
                    f"env {env.label!r}: every agent ({_names(sorted(environment.fixed_seats))}) "
                    "has a model of its own, so the policy plays none and nothing can train. Leave "
                    "out args of one."
                )
            yield env.label, environment

    if problems:
        raise ConfigError("\n".join(problems))


def _processes(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    if is_remote(config, resolved.hooks):
        yield f"processes  placed by {config.launcher.type} when the run starts"
        return
    layout = lay_out(resolved)
    for task in layout.tasks:
        gpus = f"GPU {', '.join(map(str, task.gpus))}" if task.gpus else "no GPU of its own"
        yield f"process    {task.name}: {gpus}"
    if config.trainer.device == "cuda" and resolved.launcher.num_gpus() == 0:
        yield (
            "note       trainer.device is 'cuda', and this machine shows no GPU: the run needs a "
            "machine with one"
        )


def is_remote(config: RunConfig, hooks: Hooks) -> bool:
    """Whether another launcher than the local one places the processes. A dry run does not connect
    to its cluster."""
    cls, _ = choose(LAUNCHER, config.launcher.type, config.launcher.settings, hooks, "launcher")
    return bool(cls.is_remote)


def changed_keys(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Dotted keys whose values are neither core's defaults nor the installed ones."""
    smallest = {"model": {"name": ""}, "max_steps": 1}
    default = RunConfig.model_validate(merge(installed_defaults(), smallest))
    defaults = dict(_flat(default.model_dump(mode="json", exclude_defaults=True)))
    for key, value in _flat(config.model_dump(mode="json", exclude_defaults=True)):
        if defaults.get(key, ...) != value:
            yield key, value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _prompt(resolved: Resolved, environment: Environment) -> Iterator[str]:
    """The first example's prompt as the policy sees it, if its tokenizer is on this machine."""
    prompt = _task(environment, 0).get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages:
        yield "prompt     the first example has none of its own"
        return

    config = resolved.config
    hooks = resolved.hooks
    if is_remote(config, hooks):
        yield "prompt     rendered on the cluster only"
        return

    layout = lay_out(resolved)
    if layout.to_make:
        yield f"prompt     {str(messages)[:MOST_CHARACTERS]} (not rendered: the model is made or "
        yield "           fetched when the run starts)"
        return

    folder = Path(layout.model_path)
    rendering = rendering_of(folder, build_renderer(config, hooks, folder))
    tokens = rendering.ids(messages, add_generation_prompt=True)
    text = rendering.decode(tokens, skip_special_tokens=False)
    yield from prompt_lines(len(tokens), text, config.seq_len)


def prompt_lines(num_tokens: int, text: str, seq_len: int) -> Iterator[str]:
    """A rendered prompt, and a warning if it leaves no room for a reply."""
    cut = "" if len(text) <= MOST_CHARACTERS else " ..."
    yield f"prompt     {counted(num_tokens, 'token')}: {text[:MOST_CHARACTERS]!r}{cut}"
    if num_tokens >= seq_len:
        yield f"warning    within seq_len = {seq_len} this prompt leaves no token for a reply."
        yield "           Its rollouts fail. Raise seq_len."
