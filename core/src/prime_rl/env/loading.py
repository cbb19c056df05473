"""From an env's settings to verifiers' environment object, and errors for what cannot work.

verifiers finds tasksets and harnesses by importing a module of their id. Its default runtime is a
remote sandbox and its default harness runs the model's code here, so both are always set.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Container, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.entries import entries
from prime_rl.env.authors import errors_of_env, line_of
from prime_rl.env.episode import EnvSettings, ModelEndpoint
from prime_rl.env.rendering import ROLLOUTS_PER_RENDERER
from prime_rl.errors import ConfigError
from prime_rl.registry.offers import bringer
from prime_rl.rundir.processes import lasting_imports
from prime_rl.variables import for_programs

log = logging.getLogger(__name__)

INTERCEPTION = {"type": "elastic", "multiplex": 4096}
"""One interception server per process: verifiers' 32 rollouts per server are for tunnels, and each
server takes a port."""

QUIET_LOGGERS = {
    "httpx": logging.WARNING,
    "aiohttp.access": logging.WARNING,
    "openai": logging.WARNING,
    "renderers": logging.WARNING,
    "verifiers": logging.CRITICAL,  # its failures come back as results, and are logged from there
}


CHECK = "check_args"
"""Module and function of a taskset's package that check its args before a run starts."""

HOOKS = "env_hooks"
"""Module and function of a taskset's package that give hooks for the scope of its envs."""


RENAMED = "prime_rl.renamed_tasksets"
"""Group of entry points: the earlier id of a taskset, and the module that has it now."""


def current_id(env_id: str) -> str:
    """The id by which a taskset is found now, if its distribution has renamed it; else ``env_id``.

    A module that has the earlier name comes first: it is another package's taskset.
    """
    name = module_of(env_id)
    if name in shipped_by_verifiers("tasksets") or _spec_of(name) is not None:
        return env_id
    for entry in entries(RENAMED):
        if module_of(entry.name) == name:
            return entry.value.replace("_", "-")
    return env_id


def env_hooks(env_id: str, args: Mapping[str, Any] | None) -> list[object]:
    """Plugins that an env brings for its own scope, such as a reward of whole groups.

    If the taskset is a package with a module ``env_hooks``, its function of that name gives them.
    ``args``: those of the env; None: saved rollouts are scored again, and the args may name what is
    gone. Imports no verifiers. Raises ``ConfigError``.
    """
    package = _package_with(env_id, HOOKS)
    if package is None:
        return []
    with errors_of_env(f"env {env_id!r}"):
        return [*getattr(importlib.import_module(f"{package}.{HOOKS}"), HOOKS)(args)]


def _package_with(env_id: str, module: str) -> str | None:
    """The taskset's package, if it is not one of verifiers and has such a module."""
    name = module_of(current_id(env_id))
    if name in shipped_by_verifiers("tasksets"):
        return None

    spec = _spec_of(name)
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return name if any((folder / f"{module}.py").is_file() for folder in folders) else None


def check_taskset(env_id: str, where: str, args: Mapping[str, Any] | None = None) -> None:
    """Raises ``ConfigError`` if no installed module can be the taskset; imports none of them.

    verifiers looks among its own tasksets first, then for a top-level module of that name. If that
    is a package with a module ``check_args``, its function of that name checks ``args``: it raises
    ``ConfigError`` for what else would end the run when the processes have started.
    """
    name = module_of(current_id(env_id))
    shipped = shipped_by_verifiers("tasksets")
    spec = None if name in shipped else _spec_of(name)

    if args is not None and _package_with(env_id, CHECK) is not None:
        of_args = f"{where.removesuffix('.id')}.args"
        with errors_of_env(of_args):
            checks = importlib.import_module(f"{name}.{CHECK}")
            try:
                getattr(checks, CHECK)(args)
            except ConfigError as error:
                raise ConfigError(f"{of_args}: {error}") from error

    if name in shipped or spec is not None:
        return

    installed = {module.name for module in pkgutil.iter_modules()} | shipped
    installed |= {module_of(entry.name) for entry in entries(RENAMED)}
    close = difflib.get_close_matches(name, installed, n=1, cutoff=0.8)
    hint = f"Did you mean {close[0].replace('_', '-')!r}?" if close else "Install its package."
    if "." in name:
        hint = (
            "Give the name of an installed package, not a file. Prompts and a reward function need "
            "no package (docs/python.md)."
        )

    raise ConfigError(f"{where}: no taskset {env_id!r}: there is no module {name!r}. {hint}")


def _spec_of(module: str) -> ModuleSpec | None:
    """The top-level module, if there is one; of a name with a dot, which is none, None. A folder
    without code, such as one that a removed package has left, is none either."""
    if not module.isidentifier():
        return None
    loaded = sys.modules.get(module)
    if loaded is not None and loaded.__spec__ is None:  # a module that code has made, not a file
        return ModuleSpec(module, loader=None, origin="memory")
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.loader is None else spec


def module_of(component: str) -> str:
    """The module in which verifiers looks for a taskset or harness of this id."""
    return component.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def shipped_by_verifiers(kind: str) -> set[str]:
    """Names of verifiers' own ``tasksets`` or ``harnesses``, which it prefers. Imports nothing."""
    package = importlib.util.find_spec("verifiers")
    places = package.submodule_search_locations if package else None
    folders = [Path(place) / "v1" / kind for place in places or ()]
    return {each.stem for folder in folders if folder.is_dir() for each in folder.iterdir()}


def import_tasksets(envs: Iterable[tuple[str, str]]) -> None:
    """Import the tasksets of envs, given by label and id. The orchestrator does so while the model
    is being made: what fails, fails early. Raises ``ConfigError``."""
    for label, env_id in envs:
        _import_taskset(current_id(env_id), f"env {label!r}")


def _import_taskset(env_id: str, where: str) -> None:
    from verifiers.v1.utils.loaders import import_taskset

    with errors_of_env(where):
        try:
            import_taskset(env_id)
        except ImportError as error:
            raise _not_importable(where, error) from error


def _not_importable(where: str, error: ImportError) -> ConfigError:
    # verifiers reports a taskset as not found also if it is there but lacks something else.
    raised = error if error.__cause__ is None else error.__cause__
    cause = "" if raised is error else f" ({raised})"
    return ConfigError(
        f"{where}: {error}{cause}{line_of(raised)}. The processes of a run import what is "
        "installed or in a folder of PYTHONPATH, and nothing from a script's folder or the working "
        "directory."
    )


def find_agents(settings: EnvSettings, named: Iterable[str] = ()) -> tuple[str, ...]:
    """The agents of an env that the policy plays and that train, without its rows. Imports
    verifiers and the taskset. ``named``: agents that the config names. Raises ``ConfigError`` if
    the env cannot be made, and as ``check_named``."""
    with lasting_imports():
        env = load_environment(import_verifiers(settings), settings)
    check_named(env.config, settings, named)
    return agents_of(env.config, settings.untrained)


def check_named(config: Any, settings: EnvSettings, named: Iterable[str]) -> None:
    """Raises ``ConfigError`` for an agent that the env does not have, one that a model of its own
    plays, and if none is left to train."""
    where = f"env {settings.label!r}: agents"
    seats = seats_of(config)
    fixed = fixed_seats(config)

    for name in named:
        if name not in seats:
            close = difflib.get_close_matches(name, seats, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{where}.{name}: taskset {settings.id!r} has no agent of this name. Its agents: "
                f"{', '.join(seats)}.{hint}"
            )
        if name in fixed:
            raise ConfigError(
                f"{where}.{name}: args.{name} gives this agent a model of its own, so it never "
                "trains and has no algorithm. Leave out the table, or the model and client in args."
            )

    if not agents_of(config, settings.untrained):
        raise ConfigError(
            f"{where}: no agent is left to train ({', '.join(seats)}). Give one of them an "
            "algorithm."
        )


class _PublicOs:
    """``os`` for verifiers' subprocess runtime, which hands on nearly all of ``os.environ``."""

    @property
    def environ(self) -> dict[str, str]:
        return for_programs()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


on_overlong: ContextVar[str] = ContextVar("on_overlong", default="fail")
"""What the rollouts that begin in this context do where the model's context is full."""

OVERLONG = re.compile(
    r"maximum context length|max_model_len|context (window|length)", re.IGNORECASE
)
"""How clients and engines (ours, vLLM's) refuse a prompt that is too long."""

CONTEXT_FULL = "max_total_tokens"
"""verifiers' stop condition of a rollout whose tokens have reached their limit: it is truncated."""


class _ModelError:
    """``RolloutSession.error`` of verifiers, the failure of the last model call.

    A program sees a refused prompt as an HTTP error and may do anything. So the rollout is stopped
    here, as at a limit of its turns: it is complete, and scored. Without a reply there is nothing
    to train, and it fails.
    """

    def __get__(self, session: Any, owner: type | None = None) -> Any:
        return None if session is None else session.__dict__.get("error")

    def __set__(self, session: Any, error: Any) -> None:
        values = session.__dict__
        values["error"] = error
        # The constructor assigns first, in the rollout's context; the server later, in another one.
        truncates = values.setdefault("truncates", on_overlong.get() == "truncate")
        refused = error is not None and getattr(error, "status_code", None) in (400, 413, 422)
        if truncates and refused and session.trace.num_turns and OVERLONG.search(str(error)):
            session.trace.stop(CONTEXT_FULL)


def import_verifiers(settings: EnvSettings) -> ModuleType:
    """verifiers' v1 API, with quiet loggers, without our keys in the processes that it starts, and
    with rollouts that end where the context is full. Raises ``ConfigError`` if it is not
    installed."""
    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)

    try:
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import subprocess
        from verifiers.v1.session import RolloutSession
    except ImportError as error:
        raise ConfigError(
            f"env {settings.label!r}: verifiers cannot be imported ({error}). "
            "pip install 'prime-rl-core[run]'"
        ) from error

    subprocess.os = _PublicOs()
    RolloutSession.error = _ModelError()
    return vf  # type: ignore[no-any-return]


def load_environment(vf: ModuleType, settings: EnvSettings) -> Any:
    """Resolve and construct the environment. Raises ``ConfigError`` that names the env and the
    fault."""
    from pydantic import ValidationError

    where = f"env {settings.label!r}"
    env_id = current_id(settings.id)
    if env_id != settings.id:
        log.warning(
            f"{where}: the taskset {settings.id!r} is now called {env_id!r}. The earlier id goes "
            f'on to work; write id = "{env_id}", and name = "{settings.label}" to keep the '
            "names of its metrics."
        )
        settings = replace(settings, id=env_id, name=settings.label)

    _import_taskset(settings.id, where)
    with errors_of_env(where):
        try:
            config = vf.resolve_env_config(_environment_table(settings))
        except ImportError as error:
            raise _not_importable(where, error) from error
        except ValidationError as error:
            faults = "; ".join(_fault(settings.id, **fault) for fault in error.errors())
            raise ConfigError(f"{where}: args or harness do not fit: {faults}") from error

        env = vf.load_environment(config)
        _check_load(type(env.taskset), where)
        _check_tools(env, where)
        _check_sampling(env.config, where)
        _check_shadows(vf, env, where)

    return env


def most_episodes(config: Any) -> int | None:
    """Episodes of an env that may be played at once in one process: the fewest that the config of
    one of its harnesses names as ``max_episodes``. None: any number."""
    harnesses = config.agent_harnesses().values()
    limits = [getattr(each, "max_episodes", None) for each in harnesses]
    return min((limit for limit in limits if limit is not None), default=None)


def _fault(env_id: str, loc: tuple[Any, ...], msg: str, input: Any, **rest: Any) -> str:
    """One fault, under the key that our TOML has: verifiers' ``taskset`` table is our ``args``."""
    from verifiers.v1.utils.loaders import env_config_type, taskset_config_type

    inside = loc[:1] == ("taskset",)
    if loc[1:2] == ("harness",):
        inner = loc[1:]
    elif inside:
        inner = ("args", *loc[1:])
    else:
        inner = ("args", *loc)

    path = ".".join(map(str, inner))
    # A key that the taskset does not have: name those that it has.
    if rest["type"] == "extra_forbidden" and len(loc) == 2 and inside:
        seats = _seat_defaults(env_config_type(env_id))
        keys = [*seats, *(set(taskset_config_type(env_id).model_fields) - {"id", "task"})]
        close = difflib.get_close_matches(loc[1], keys, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        names = ", ".join(sorted(keys)) or "none"
        return f"{path}: unknown key{hint} known here: {names} (agents: {', '.join(seats)})"

    if rest["type"] == "extra_forbidden":
        return f"{path}: unknown key (got {input!r})"

    return f"{path}: {msg} (got {input!r})"


def _environment_table(settings: EnvSettings) -> dict[str, Any]:
    """The env's table in verifiers' own layout: taskset, seats, timeouts."""
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    config_class = env_config_type(settings.id)
    env_fields = set(config_class.model_fields) - set(EnvConfig.model_fields)
    seats = _seat_defaults(config_class)

    harness = settings.harness
    # verifiers gives the taskset's own id if the taskset brings a harness.
    if harness is None and default_harness_id(settings.id) != settings.id:
        harness = _default_harness(settings)

    # The env's own fields stand beside the table of its taskset.
    table: dict[str, Any] = {
        key: settings.args[key] for key in (env_fields - {*seats}) & set(settings.args)
    }
    table["taskset"] = {"id": settings.id} | {
        key: value for key, value in settings.args.items() if key not in env_fields
    }

    table["interception"] = dict(INTERCEPTION)
    # Where engines sleep, one limit of ours is over both, and stands still meanwhile.
    limit = None if settings.engines_sleep else settings.timeout
    table["timeout"] = {"episode": limit, "finalize": limit}

    for name, default in seats.items():
        args = settings.args.get(name, {})
        if not isinstance(args, Mapping):
            raise ConfigError(
                f"env {settings.label!r}: args.{name} is one of the env's agents: expected a table "
                f"such as {{max_turns = 2}}, got {args!r}"
            )

        # The user's settings override ours.
        table[name] = _seat_table(settings, default, harness) | dict(args)
        if settings.past is not None and name in settings.past_agents:
            table[name] |= _past_seat(settings, settings.past)

    return table


def _past_seat(settings: EnvSettings, engine: ModelEndpoint) -> dict[str, Any]:
    """Model and client of an agent that an earlier version of the policy plays. It is asked as the
    policy is, by token ids."""
    renderer = settings.renderer
    path = settings.tokenizer_path
    client = {
        "type": "train",
        "base_url": engine.base_url,
        "api_key_var": engine.api_key_var,
        "renderer": None if renderer is None else renderer.model_dump(),
        "renderer_model_name": None if path is None else str(path),
        "multiplex": ROLLOUTS_PER_RENDERER,
    }
    return {"model": engine.name, "client": client}


def _seat_defaults(config_class: Any) -> dict[str, Any]:
    """The agents of an env's config class by name: the fields whose default is one."""
    from verifiers.v1.configs.agent import AgentConfig

    defaults = {name: info.default for name, info in config_class.model_fields.items()}
    return {name: each for name, each in defaults.items() if isinstance(each, AgentConfig)}


def _seat_table(
    settings: EnvSettings, default: Any, harness: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Our settings of one agent, where the env's author has not set them."""
    table: dict[str, Any] = {"max_turns": settings.max_turns}
    if "runtime" not in default.model_fields_set:
        table["runtime"] = {"type": "subprocess"}
    if harness is not None and default.harness is None:
        table["harness"] = dict(harness)
    return {key: value for key, value in table.items() if value is not None}


def _default_harness(settings: EnvSettings) -> Mapping[str, Any]:
    """The harness of a taskset that brings none. Raises ``ConfigError`` if there is none, or it is
    not installed: verifiers' default would run the model's code here."""
    harness = settings.default_harness or {}
    name = str(harness.get("id", ""))
    if name and importlib.util.find_spec(name.replace("-", "_")) is not None:
        return harness

    package = bringer("harness", name)
    situation = f"the default, {name!r}, is not installed" if name else "there is no default"
    install = f"pip install {package}, or set" if package else "Set"
    raise ConfigError(
        f"env {settings.label!r}: the taskset brings no harness, and {situation}. {install} the "
        "env's harness = {id = ...}."
    )


def seats_of(config: Any) -> dict[str, Any]:
    """The agents of a resolved env config, by name."""
    return {name: getattr(config, name) for name in _seat_defaults(type(config))}


def fixed_seats(config: Any) -> frozenset[str]:
    """Agents that a model of their own plays: an opponent, a judge. They never train."""
    return frozenset(n for n, seat in seats_of(config).items() if seat.model or seat.client)


def agents_of(config: Any, untrained: Container[str] = ()) -> tuple[str, ...]:
    """The agents of a resolved env config that the policy plays, by name, without ``untrained``."""
    fixed = fixed_seats(config)
    return tuple(n for n in seats_of(config) if n not in fixed and n not in untrained)


def _check_sampling(config: Any, where: str) -> None:
    """Refuse sampling settings of an agent that the policy plays: the trainer would reproduce
    another distribution."""
    for name in agents_of(config):
        if getattr(config, name).sampling is not None:
            raise ConfigError(
                f"{where}: args.{name}.sampling: the policy plays this agent, and the trainer has "
                "to reproduce how it is sampled. Set the env's sampling table instead, or give "
                "the agent a model and client of its own."
            )


MARKS = ("reward", "metric", "stop", "intercept")
"""What verifiers' decorators set on a method."""


def _check_shadows(vf: ModuleType, env: Any, where: str) -> None:
    """Refuse a decorated method whose name verifiers itself calls: ``@vf.reward async def score``
    would replace the method that runs the rewards, and a rollout would have none."""
    harnesses = [type(each) for each in env._harnesses.values()]
    bases = {type(env.taskset).task_type(): vf.Task} | dict.fromkeys(harnesses, vf.Harness)
    for cls, base in bases.items():
        for owner in cls.__mro__[: cls.__mro__.index(base)]:  # only classes below verifiers' own
            for name, method in vars(owner).items():
                mark = next((each for each in MARKS if getattr(method, each, None) is True), None)
                if mark is not None and hasattr(base, name):
                    raise ConfigError(
                        f"{where}: {owner.__name__}.{name} is a @vf.{mark}, and replaces "
                        f"verifiers' own {base.__name__}.{name}. Give it another name."
                    )


def _check_load(taskset: type, where: str) -> None:
    """Refuse a ``load`` that nothing would await."""
    load = taskset.load  # type: ignore[attr-defined]
    if inspect.iscoroutinefunction(load) or inspect.isasyncgenfunction(load):
        raise ConfigError(
            f"{where}: {taskset.__name__}.load is an async def, which nothing awaits. Write a def "
            "that returns tasks or yields them."
        )


def _check_tools(env: Any, where: str) -> None:
    """Refuse tool servers with a harness without MCP: verifiers fails at every rollout."""
    task = type(env.taskset).task_type()
    tools = [*env.taskset.toolsets(env.taskset.config), *task.toolsets(env.taskset.config.task)]

    for harness in env._harnesses.values():
        if tools and not harness.SUPPORTS_MCP:
            raise ConfigError(
                f"{where}: the taskset serves tools over MCP, which harness "
                f"{harness.config.id!r} cannot call; set harness = {{id = ...}} to one that can."
            )
