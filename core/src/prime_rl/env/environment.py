"""The one module that knows verifiers: an environment as examples in, finished rollouts out.

    settings -> Environment -> examples            what may be sampled
                            -> run(example, ...)   one episode -> a RolloutResult a trace

verifiers is imported when an ``Environment`` is made, not before (it costs seconds). What fails
inside an episode is data: ``run`` returns results that say ``ok = False`` and why, and raises
nothing but ``CancelledError``.

Facts about verifiers that this module keeps to itself: a taskset and a harness are found by
importing a module of their id; the default runtime is a remote sandbox and the default harness runs
the model's code here, so both are always set; an agent that ran out of time is ``ok`` to verifiers
and is not to us; per-token floats are exact only in memory.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import itertools
import json
import logging
import pkgutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from prime_rl.env.episode import BranchTokens as BranchTokens
from prime_rl.env.episode import EnvSettings as EnvSettings
from prime_rl.env.episode import Example as Example
from prime_rl.env.episode import ModelEndpoint as ModelEndpoint
from prime_rl.env.episode import RolloutResult as RolloutResult
from prime_rl.env.episode import SamplingSettings as SamplingSettings
from prime_rl.env.traces import results_of
from prime_rl.errors import ConfigError
from prime_rl.plugins.offers import bringer
from prime_rl.rundir.processes import lasting_imports

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext, Task

ROLLOUTS_PER_RENDERER = 4096
"""One tokenizer serves all of them: a render takes a fraction of a millisecond."""

INTERCEPTION = {"type": "elastic", "multiplex": 4096}
"""One interception server a process: verifiers' 32 rollouts a server are for tunnels, and each
server is a port."""

GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes without code of their own: all there is to them is in ``tokenizer.json``."""

QUIET_LOGGERS = {
    "httpx": logging.WARNING,
    "aiohttp.access": logging.WARNING,
    "openai": logging.WARNING,
    "renderers": logging.WARNING,
    "verifiers": logging.CRITICAL,  # its failures come back as results, and are logged from there
}


class Examples:
    """The environment's rows by index; finite, or generated without end."""

    KEPT = 8192
    """Rows of an endless env kept for a second look; older ones are generated again."""

    def __init__(self, taskset: Any) -> None:
        self._taskset = taskset
        self._tasks: OrderedDict[int, Task] = OrderedDict()
        self._stream: Iterator[tuple[int, Task]] = iter(())
        self._next = 0
        if taskset.bounded:
            self._tasks.update(enumerate(taskset))
        self.count: int | None = len(self._tasks) if taskset.bounded else None
        """None: without end."""

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("the environment generates examples without end: it has no length")
        return self.count

    def __getitem__(self, index: int) -> Example:
        """Raises ``IndexError`` beyond a finite env's end."""
        if index not in self._tasks:
            if self.count is not None or index < 0:
                raise IndexError(f"example {index} of {self.count}")
            self._generate(index)
        return Example(index, self._tasks[index])

    def _generate(self, index: int) -> None:
        """Advance the stream up to ``index``, from the start if that row went by and was let go."""
        if index < self._next or self._next == 0:
            self._stream, self._next = enumerate(self._taskset), 0
        for position, task in itertools.islice(self._stream, index + 1 - self._next):
            self._tasks[position] = task
            if len(self._tasks) > self.KEPT:
                self._tasks.popitem(last=False)
        self._next = index + 1


class Environment:
    """One verifiers environment, run in this process.

    Use ``async with``, or ``start`` and ``close``.
    """

    def __init__(self, settings: EnvSettings) -> None:
        """Import verifiers, find the taskset, load its rows.

        Raises ``ConfigError`` if that cannot work.
        """
        self.settings = settings
        with lasting_imports():
            self._vf = import_verifiers(settings)
            self._env = load_environment(self._vf, settings)
        self._fixed = fixed_seats(self._env.config)
        self.agents = agents_of(self._env.config)
        """The seats of the env that the policy plays, by name."""
        self.examples = Examples(self._env.taskset)
        if self.examples.count == 0:
            raise ConfigError(
                f"env {settings.label!r}: the taskset has no examples; check its args"
            )
        self._stack = AsyncExitStack()
        self._clients: dict[ModelEndpoint, Any] = {}

    @property
    def num_examples(self) -> int | None:
        """None: the env generates examples without end."""
        return self.examples.count

    async def start(self) -> None:
        """Bring up what episodes share: interception, shared tool servers, the renderer."""
        path = self.settings.tokenizer_path
        if path is not None:
            await asyncio.to_thread(warm_renderer, path, self.settings.renderer)
        await self._stack.enter_async_context(self._env.serving())

    async def close(self) -> None:
        await self._stack.aclose()

    async def __aenter__(self) -> Environment:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def run(
        self,
        example: Example,
        *,
        model: ModelEndpoint,
        sampling: SamplingSettings,
        group_id: int = 0,
        cache_salt: str | None = None,
        seed: int | None = None,
    ) -> list[RolloutResult]:
        """Run one episode; at least one result, one for each trace.

        ``cache_salt`` keeps the engine's prefix cache apart by policy version; ``seed`` makes
        sampling repeatable. Raises ``CancelledError`` only: whatever else happens is in the
        results.
        """
        try:
            context = self._context(model, sampling, cache_salt, seed)
            (slot,) = self._env.slots(example.task, 1)
            episode = await self._env.run_slot(slot, context)
            results = results_of(episode, model.client == "tokens", self._fixed)
        except Exception as error:  # not the run's business how an environment fails
            results = [RolloutResult(ok=False, error_type=type(error).__name__, error=str(error))]
        return [replace(result, group_id=group_id) for result in results]

    def _context(
        self, model: ModelEndpoint, sampling: SamplingSettings, salt: str | None, seed: int | None
    ) -> ModelContext:
        """Model, client and sampling of one episode, in verifiers' terms."""
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_completion_tokens,
            "seed": seed,
            "cache_salt": salt,  # verifiers moves it to the top level of the engine's request
        }
        known = {key: value for key, value in values.items() if value is not None}
        known = {**sampling.extra_body, **known}
        return self._vf.ModelContext(
            model=model.name,
            client=self._client(model),
            sampling=self._vf.SamplingConfig(**known),
        )

    def _client(self, model: ModelEndpoint) -> Any:
        if model not in self._clients:
            if model.client == "chat":
                config = self._vf.EvalClientConfig(
                    base_url=model.base_url,
                    api_key_var=model.api_key_var,
                    timeout={"read": model.timeout},
                )
                return self._clients.setdefault(model, config)
            path = self.settings.tokenizer_path
            self._clients[model] = self._vf.TrainClientConfig(
                base_url=model.base_url,
                api_key_var=model.api_key_var,
                renderer=self.settings.renderer,
                renderer_model_name=None if path is None else str(path),
                multiplex=ROLLOUTS_PER_RENDERER,
                timeout={"read": model.timeout},
            )
        return self._clients[model]


def warm_renderer(tokenizer_path: Path, config: Any) -> None:
    """Load the tokenizer before the first rollout's clock runs, and without torch where possible.

    verifiers keeps one pool of renderers a process; this puts the first one in. ``AutoTokenizer``
    imports torch to find out what a folder's own ``tokenizer_config.json`` already says.
    """
    with lasting_imports():
        from renderers import create_renderer
        from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot

        pool = ElasticRendererPool(str(tokenizer_path), config, multiplex=ROLLOUTS_PER_RENDERER)
        if not pool.renderers:
            renderer = create_renderer(load_tokenizer(tokenizer_path), config)
            pool.renderers.append(RendererSlot(renderer))


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder. Raises ``ConfigError`` if there is none."""
    where = f"tokenizer {str(path)!r}"
    try:
        table = json.loads((path / "tokenizer_config.json").read_text())
        if table.get("tokenizer_class") in GENERIC_TOKENIZERS:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from renderers.base import load_tokenizer as load_by_auto

        return load_by_auto(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error


def check_taskset(env_id: str, where: str) -> None:
    """Raises ``ConfigError`` if no installed module can be the taskset; imports none of them.

    verifiers finds a taskset by its id: its own ones first, else a top-level module of that name.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    package = importlib.util.find_spec("verifiers")
    places = package.submodule_search_locations if package else None
    shipped = [Path(place) / "v1" / "tasksets" for place in places or ()]
    own = {each.stem for folder in shipped if folder.is_dir() for each in folder.iterdir()}
    if name in own or importlib.util.find_spec(name) is not None:
        return
    installed = {module.name for module in pkgutil.iter_modules()} | own
    close = difflib.get_close_matches(name, installed, n=1, cutoff=0.8)
    hint = f"Did you mean {close[0].replace('_', '-')!r}?" if close else "Install its package."
    raise ConfigError(f"{where}: no taskset {env_id!r}: there is no module {name!r}. {hint}")


def import_verifiers(settings: EnvSettings) -> ModuleType:
    """verifiers' v1 API, its chatter turned down. Raises ``ConfigError`` if it is not installed."""
    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(
            f"env {settings.label!r}: verifiers cannot be imported ({error}). "
            "pip install 'prime-rl-core[run]'"
        ) from error
    return vf  # type: ignore[no-any-return]


def load_environment(vf: ModuleType, settings: EnvSettings) -> Any:
    """Resolve and construct the environment. Raises ``ConfigError`` naming the env and what is
    wrong with it."""
    from pydantic import ValidationError

    where = f"env {settings.label!r}"
    try:
        env = vf.load_environment(vf.resolve_env_config(environment_table(settings)))
    except ImportError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{_own_path(fault['loc'])}: {fault['msg']} (got {fault['input']!r})"
            for fault in error.errors()
        )
        raise ConfigError(f"{where}: args or harness do not fit: {faults}") from error
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    check_tools(env, where)
    check_seats(env.config, where)
    return env


def _own_path(location: tuple[Any, ...]) -> str:
    """The key as it stands in our TOML: verifiers' ``taskset`` table is our ``args``."""
    parts = [str(part) for part in location]
    return ".".join(["args", *parts[1:]] if parts[:1] == ["taskset"] else parts)


def environment_table(settings: EnvSettings) -> dict[str, Any]:
    """The env's table in verifiers' own layout: taskset, seats, timeouts."""
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    config_class = env_config_type(settings.id)
    own = set(config_class.model_fields) - set(EnvConfig.model_fields)
    seats = {name for name in own if is_seat(config_class.model_fields[name].default)}
    harness = settings.harness
    if harness is None and default_harness_id(settings.id) != settings.id:
        harness = default_harness(settings)
    table: dict[str, Any] = {key: settings.args[key] for key in (own - seats) & set(settings.args)}
    table["taskset"] = {"id": settings.id} | {
        key: value for key, value in settings.args.items() if key not in own
    }
    table["interception"] = dict(INTERCEPTION)
    table["timeout"] = {"episode": settings.timeout, "finalize": settings.timeout}
    for name in seats:
        default = config_class.model_fields[name].default
        table[name] = seat_table(settings, default, harness) | dict(settings.args.get(name, {}))
    return table


def seats_of(config: Any) -> dict[str, Any]:
    """The agents of a resolved env config, by name."""
    fields = type(config).model_fields.items()
    return {name: getattr(config, name) for name, info in fields if is_seat(info.default)}


def fixed_seats(config: Any) -> frozenset[str]:
    """Agents that a model of their own plays: an opponent, a judge. They never train."""
    return frozenset(n for n, seat in seats_of(config).items() if seat.model or seat.client)


def agents_of(config: Any) -> tuple[str, ...]:
    """The agents of a resolved env config that the policy plays, by name."""
    return tuple(name for name in seats_of(config) if name not in fixed_seats(config))


def find_agents(settings: EnvSettings) -> tuple[str, ...]:
    """The agents of an env that the policy plays, without its rows. Imports verifiers and the
    taskset. Raises ``ConfigError`` if the env cannot be made."""
    with lasting_imports():
        env = load_environment(import_verifiers(settings), settings)
    return agents_of(env.config)


def check_seats(config: Any, where: str) -> None:
    """Refuse a seat that the policy plays at a sampling of its own: the trainer would reproduce
    another distribution."""
    for name, seat in seats_of(config).items():
        if seat.sampling is not None and name not in fixed_seats(config):
            raise ConfigError(
                f"{where}: args.{name}.sampling: the policy plays this agent, and the trainer has "
                "to reproduce how it is sampled. Set the env's sampling table instead, or give "
                "the agent a model and client of its own."
            )


def is_seat(default: Any) -> bool:
    """Whether an env's field is an agent: verifiers tells by its default."""
    from verifiers.v1.configs.agent import AgentConfig

    return isinstance(default, AgentConfig)


def seat_table(
    settings: EnvSettings, default: Any, harness: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One agent's settings: ours, where the env's author has not pinned his own."""
    table: dict[str, Any] = {"max_turns": settings.max_turns}
    if "runtime" not in default.model_fields_set:
        table["runtime"] = {"type": "subprocess"}
    if harness is not None and default.harness is None:
        table["harness"] = dict(harness)
    return {key: value for key, value in table.items() if value is not None}


def default_harness(settings: EnvSettings) -> Mapping[str, Any]:
    """The harness of a taskset that brings none. Raises ``ConfigError`` if there is none, or it is
    not installed: verifiers' default would run the model's code here."""
    harness = settings.default_harness or {}
    name = str(harness.get("id", ""))
    if name and importlib.util.find_spec(name.replace("-", "_")) is not None:
        return harness
    package = bringer("harness", name)
    found = f"the default, {name!r}, is not installed" if name else "there is no default"
    install = f"pip install {package}, or set" if package else "Set"
    raise ConfigError(
        f"env {settings.label!r}: the taskset brings no harness, and {found}. {install} the env's "
        "harness = {id = ...}."
    )


def check_tools(env: Any, where: str) -> None:
    """Refuse at start-up what verifiers refuses at every rollout: tool servers and a harness
    without MCP."""
    task = type(env.taskset).task_type()
    tools = [
        *env.taskset.toolsets(env.taskset.config),
        *task.toolsets(env.taskset.config.task),
    ]
    for harness in env._harnesses.values():
        if tools and not harness.SUPPORTS_MCP:
            raise ConfigError(
                f"{where}: the taskset serves tools over MCP, which harness "
                f"{harness.config.id!r} cannot call; set harness = {{id = ...}} to one that can."
            )
