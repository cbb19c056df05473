"""A verifiers environment: examples in, finished rollouts out.

    settings -> Environment -> examples            what may be sampled
                            -> run(example, ...)   one episode -> a RolloutResult per trace

verifiers is imported when an ``Environment`` is made, not before (it costs seconds). What fails
inside an episode is data: ``run`` returns results with ``ok = False`` and the reason, and raises
nothing but ``CancelledError``, if its own task is cancelled. ``contained`` keeps an env's
``SystemExit`` and ``KeyboardInterrupt`` away from the event loop.

Facts about verifiers that this module hides: an agent that ran out of time is ``ok`` to verifiers
and is not to us; per-token floats are exact only in memory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prime_rl.config.orchestrator import EvalSamplingConfig
from prime_rl.env.authors import errors_of_env
from prime_rl.env.episode import EnvSettings, Example, ModelEndpoint, RolloutResult, readable
from prime_rl.env.limits import AwakeTime
from prime_rl.env.loading import (
    agents_of,
    fixed_seats,
    import_verifiers,
    load_environment,
    most_episodes,
    on_overlong,
)
from prime_rl.env.rendering import ROLLOUTS_PER_RENDERER, vocab_size_of, warm_renderer
from prime_rl.env.traces import BAD_RESULT, failed, results_of
from prime_rl.errors import ConfigError
from prime_rl.rundir.processes import lasting_imports

if TYPE_CHECKING:
    from verifiers.v1 import Episode, ModelContext, Task

SamplingSettings = EvalSamplingConfig
"""Sampling parameters of an episode. None: the engine's default."""


class ExampleFailed(Exception):
    """The code of an environment that makes examples has failed."""


class Examples:
    """The environment's rows by index; finite, or generated without end."""

    KEPT = 8192
    """Rows of an endless env to cache; older ones are generated again."""

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
        """Raises ``IndexError`` beyond a finite env's end, and ``ExampleFailed``."""
        if index not in self._tasks:
            if self.count is not None or index < 0:
                raise IndexError(f"example {index} of {self.count}")
            self._generate(index)
        return Example(index, self._tasks[index])

    def _generate(self, index: int) -> None:
        """Advance the stream to ``index``, from the start if that row left the cache."""
        try:
            # A generator has no way back: an earlier row is made again, from the start on.
            if index < self._next or self._next == 0:
                self._stream = enumerate(self._taskset)
                self._next = 0

            rows = itertools.islice(self._stream, index + 1 - self._next)
            for position, task in rows:
                self._tasks[position] = task
                if len(self._tasks) > self.KEPT:
                    self._tasks.popitem(last=False)
        except ConfigError:  # of the run's settings, not of this example
            self._next = 0
            raise
        except BaseException as error:  # the generator may raise anything
            self._next = 0  # and gives nothing more then
            reason = f"{type(error).__name__}: {readable(error)}"
            raise ExampleFailed(f"the environment cannot make example {index}: {reason}") from error

        if index not in self._tasks:
            self._next = 0
            raise ExampleFailed(
                f"the environment ended before example {index}, and it declares examples without "
                "end (INFINITE)"
            )

        self._next = index + 1


_in_environment: ContextVar[bool] = ContextVar("in_environment", default=False)


@contextmanager
def contained() -> Iterator[None]:
    """In the tasks that are created inside, and in their tasks, what ``EXITS`` names becomes an
    ``Exception``. asyncio ends the loop, and the run with it, at ``SystemExit`` and
    ``KeyboardInterrupt``; ``GeneratorExit`` closes every coroutine that waits for the task. A real
    Ctrl-C is no ``KeyboardInterrupt`` here: asyncio cancels the main task."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    # The factory is set once per loop: nested calls must not wrap it again.
    if not isinstance(before, ContainingFactory):
        loop.set_task_factory(ContainingFactory(before))

    token = _in_environment.set(True)
    try:
        yield
    finally:
        _in_environment.reset(token)


class ContainingFactory:
    """Creates the tasks of a loop."""

    def __init__(self, before: Any) -> None:
        """``before``: the factory that the loop had. None: asyncio's own."""
        self._before = before

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Future[Any]:
        if _in_environment.get():
            coroutine = ContainedCoroutine(coroutine)
        if self._before is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task: asyncio.Future[Any] = self._before(loop, coroutine, **options)
        return task


EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""What ends more than the task that raises it."""


class ContainedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine of an environment, which raises none of ``EXITS``."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except EXITS as error:
            raise _contained(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except EXITS as raised:
            raise _contained(raised) from raised

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """``cr_code`` and others, for stack traces."""
        return getattr(self._coroutine, name)


class EnvironmentExit(Exception):
    """Code of an environment raised one of ``EXITS``."""


def _contained(error: BaseException) -> EnvironmentExit:
    return EnvironmentExit(f"{type(error).__name__}: {readable(error)}")


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, and not only a task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Environment:
    """One verifiers environment, run in this process, inside ``async with``."""

    def __init__(self, settings: EnvSettings) -> None:
        """Import verifiers, find the taskset, load its rows. Raises ``ConfigError``."""
        self.settings = settings
        with lasting_imports():
            self._vf = import_verifiers(settings)
            self._env = load_environment(self._vf, settings)

        self.agents = agents_of(self._env.config, settings.untrained)
        """The seats of the env that the policy plays and that train, by name."""
        self.max_episodes = most_episodes(self._env.config)
        """Episodes at once in one process; others wait. None: any number."""
        self.fixed_seats = fixed_seats(self._env.config)
        """Seats that a model of their own plays."""
        where = f"env {settings.label!r}"
        taskset = self._env.taskset
        expected = f"{type(taskset).__name__}.load did not return or yield tasks of verifiers"
        with errors_of_env(where, expected):
            self.examples = Examples(taskset)
        if self.examples.count == 0:
            raise ConfigError(f"{where}: the taskset has no examples; check its args")

        self.awake = AwakeTime()
        """Time in which the engines are awake, with ``settings.engines_sleep``."""
        self._slots: asyncio.Semaphore | None = None
        self._stack = AsyncExitStack()
        self._clients: dict[ModelEndpoint, Any] = {}

    @property
    def num_examples(self) -> int | None:
        """None: the env generates examples without end."""
        return self.examples.count

    async def __aenter__(self) -> Environment:
        """Start what episodes share: interception, shared tool servers, the renderer."""
        path = self.settings.tokenizer_path
        if path is not None:
            await asyncio.to_thread(warm_renderer, path, self.settings.renderer)

        if self.max_episodes is not None:
            self._slots = asyncio.Semaphore(self.max_episodes)
        with contained():
            await self._stack.enter_async_context(self._env.serving())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

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
        """Run one episode; one result per trace, and at least one.

        ``cache_salt`` separates the engine's prefix cache by policy version; ``seed`` makes
        sampling repeatable. Raises ``CancelledError`` only: other failures are in the results.
        """
        with contained():  # in a task of its own: an env may also cancel the task that it runs in
            playing = asyncio.create_task(
                self._play(example, model, sampling=sampling, cache_salt=cache_salt, seed=seed)
            )

        try:
            results = self._read(await playing, model)
        except BaseException as error:  # an environment may fail in any way
            # An interrupt and a cancellation of this task are ours. Any other error is the env's.
            if isinstance(error, KeyboardInterrupt) or not playing.done() or _is_cancelled():
                raise

            reason = readable(error) or "raised by the environment"
            results = [failed(type(error).__name__, reason)]

        if _is_cancelled():  # and the environment has gone on
            raise asyncio.CancelledError

        return [replace(result, group_id=group_id) for result in results]

    async def _play(
        self,
        example: Example,
        model: ModelEndpoint,
        sampling: SamplingSettings,
        cache_salt: str | None,
        seed: int | None,
    ) -> Episode:
        # This context variable is set in the episode's own task, so no other episode sees it.
        on_overlong.set(self.settings.on_overlong)
        context = self._context(model, sampling, salt=cache_salt, seed=seed)
        return await self._episode(example, context)

    def _read(self, episode: Episode, model: ModelEndpoint) -> list[RolloutResult]:
        """The results of an episode. One that cannot be read has failed."""
        with_tokens = model.client == "tokens"
        never = self.fixed_seats | self.settings.untrained
        try:
            return results_of(episode, with_tokens, fixed=never, vocab_size=self._vocab_size)
        except Exception as error:
            return [failed(BAD_RESULT, f"{type(error).__name__}: {error}")]

    @cached_property
    def _vocab_size(self) -> int | None:
        """Size of the policy's vocabulary; its folder has the tokenizer too. None: unknown."""
        path = self.settings.tokenizer_path
        return None if path is None else vocab_size_of(path)

    async def _episode(self, example: Example, context: ModelContext) -> Episode:
        (slot,) = self._env.slots(example.task, 1)
        # verifiers waits for a slot before the episode begins: its timeout has not begun either.
        if not self.settings.engines_sleep:
            return await self._env.run_slot(slot, context, self._slots)
        async with self._slots or nullcontext(), self.awake.limit(self.settings.timeout):
            return await self._env.run_slot(slot, context)

    def take_metrics(self) -> Mapping[str, float]:
        return {}

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
        settings = {key: value for key, value in values.items() if value is not None}
        # Core's own keys override `extra_body`.
        config = self._vf.SamplingConfig(**{**sampling.extra_body, **settings})
        client = self._client(model)
        return self._vf.ModelContext(model=model.name, client=client, sampling=config)

    def _client(self, model: ModelEndpoint) -> Any:
        if model not in self._clients:
            address: dict[str, Any] = {
                "base_url": model.base_url,
                "api_key_var": model.api_key_var,
                "timeout": {"read": model.timeout},
                "headers": dict(model.headers),
                "headers_from_env": dict(model.headers_from_env),
            }
            path = self.settings.tokenizer_path
            self._clients[model] = (
                self._vf.EvalClientConfig(**address)
                if model.client == "chat"
                else self._vf.TrainClientConfig(
                    **address,
                    renderer=self.settings.renderer,
                    renderer_model_name=None if path is None else str(path),
                    multiplex=ROLLOUTS_PER_RENDERER,
                )
            )

        return self._clients[model]
