"""What the pieces of one run's orchestrator share, and what core lends to an env's algorithm."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from prime_rl.config.contract import FrozenModel
from prime_rl.config.run import RunConfig
from prime_rl.entries import entries
from prime_rl.env.environment import Environment
from prime_rl.errors import ConfigError
from prime_rl.inference.fleet import Fleet
from prime_rl.inference.pool import EnginePool, FrozenPool
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.orchestrator.sources import RolloutSource
from prime_rl.plugins.algorithm import Algorithm, Completion, ReferenceModel, Tokens
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Sample
from prime_rl.rundir.launch import ENGINE_KEY, Launch
from prime_rl.rundir.status import Status


class Stopwatch:
    """Seconds by name since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, started: float) -> None:
        """Add the time since ``started`` (``time.perf_counter``)."""
        elapsed = time.perf_counter() - started
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Return the seconds of every name and reset them to 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken


@dataclass(frozen=True, eq=False)
class RunContext:
    """One attempt at one run."""

    config: RunConfig
    launch: Launch
    run_dir: Path
    hooks: Hooks
    status: Status
    losses: Components = field(default_factory=installed_losses)
    waited: Stopwatch = field(default_factory=Stopwatch)
    """Seconds per step by ``wait/...`` and ``time/...``."""


class Outages:
    """Endpoints that do not answer at present; the run waits for them and reports it."""

    def __init__(self) -> None:
        self.texts: dict[object, str] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called when an endpoint goes or comes back."""

    def reporter(self) -> Callable[[str | None], None]:
        """For one pool: call it with what the pool waits for, and with None when that is over."""
        return partial(self._report, object())

    def _report(self, pool: object, text: str | None) -> None:
        self.texts.pop(pool, None)
        if text is not None:
            self.texts[pool] = text
        self.changed()

    @property
    def waiting_for(self) -> str | None:
        """Every outage in one line; None without outages."""
        return "; ".join(dict.fromkeys(self.texts.values())) or None


@dataclass(frozen=True, eq=False)
class Engines:
    """The engines that sample from the policy, and which version they serve."""

    fleet: Fleet
    policy: Policy
    outages: Outages
    """Endpoints that a request waits for."""
    average: Sequence[Fleet] = ()
    """One for ``host.ema``, if an algorithm asks for it."""


@dataclass(frozen=True, eq=False)
class Shared:
    """What every env of a run is built from."""

    run: RunContext
    engines: Engines
    renderer: Any
    """The config object of the ``renderers`` package."""
    renderer_named: Callable[[str], Any]
    """That of another renderer. Raises ``ConfigError`` for an unknown name."""
    rendering: Callable[[], Any]
    """Conversations as tokens (``rendering_of``)."""
    scores: Callable[[], Any]
    """The live policy to score with (``scorer_over``)."""
    router: EngineRouter
    """The live policy to sample from."""


def scorer_over(pool: EnginePool, model: str, **settings: Any) -> Any:
    """A ``ReferenceModel`` over a pool."""
    from prime_rl.inference.scorer import PromptScorer

    return PromptScorer(pool, model, **settings)


def rendering_of(tokenizer_path: Path, renderer: Any) -> Any:
    """The run's renderer over its tokenizer."""
    from prime_rl.env.conversations import Rendering

    return Rendering(tokenizer_path, renderer)


def installed(group: str, package: str) -> Any:
    for entry in entries(group):
        return entry.load()
    raise ConfigError(
        f"the run needs what {group} offers, and no installed distribution has an entry point of "
        f"that group. pip install {package}"
    )


class EnvHost:
    """``prime_rl.Host`` for one env."""

    def __init__(self, env: str, environment: Environment, shared: Shared) -> None:
        self.env = env
        self._environment = environment
        self._shared = shared
        self._connected: list[FrozenPool] = []
        self._asked = Counter[str]()
        self.seq_len = shared.run.config.seq_len
        self.seed = shared.run.config.seed
        self.logger = logging.getLogger(f"prime_rl.algorithms.{env}")

    @property
    def max_completion_tokens(self) -> int | None:
        train = self._shared.run.config.orchestrator.train
        own = next((env.sampling for env in train.env if env.label == self.env), None)
        return (own or train.sampling).max_completion_tokens

    @property
    def step(self) -> int:
        return self._shared.engines.policy.version

    @property
    def folder(self) -> Path:
        path = self._shared.run.run_dir / "algorithms" / self.env
        path.mkdir(parents=True, exist_ok=True)
        return path

    @cached_property
    def policy(self) -> ReferenceModel:
        return self._lend(self._shared.scores())

    @property
    def generate(self) -> Callable[..., Awaitable[list[Completion]]]:
        return self.policy.generate

    def _lend(self, model: Any) -> ReferenceModel:
        salt = f"{self._shared.run.config.seed} {self.env}"
        lent: ReferenceModel = model.lend(
            salt, lambda: self._shared.rendering().stop_token_ids(), self._asked
        )
        return lent

    def take_metrics(self) -> dict[str, float]:
        """The algorithm's requests and their tokens since the last call. Empty without any."""
        taken = {f"scoring/{self.env}/{name}": float(n) for name, n in self._asked.items()}
        self._asked.subtract(dict(self._asked))
        return taken

    @cached_property
    def initial(self) -> ReferenceModel:
        run = self._shared.run
        model = run.config.orchestrator.initial
        url = run.launch.reference_urls.get("initial")
        if model is None and url:
            name = run.launch.served_model_name
            model = FrozenModel(name=name, base_url=(f"{url}/v1",), api_key_var=ENGINE_KEY)

        if model is None:
            raise ConfigError(f"env {self.env!r}: its algorithm does not declare needs_initial")
        return self.connect(model)

    @cached_property
    def ema(self) -> ReferenceModel:
        name = self._shared.run.launch.served_model_name
        key = os.environ[ENGINE_KEY]
        fleets = self._shared.engines.average
        if not fleets:
            raise ConfigError(f"env {self.env!r}: its algorithm does not declare needs_ema")
        return self._lend(
            scorer_over(fleets[0], name, api_key=key, cache_salt=lambda: str(self.step))
        )

    def connect(self, model: FrozenModel) -> ReferenceModel:
        """A frozen model to score with. Raises ``ConfigError`` if its key is missing."""
        where = f"env {self.env!r}: reference"
        report = self._shared.engines.outages.reporter()
        pool = FrozenPool.of(model, where=where, on_waiting=report)
        self._connected.append(pool)
        limit = model.max_concurrency
        timeout = model.timeout
        return self._lend(scorer_over(pool, model.name, max_concurrency=limit, timeout=timeout))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Tokens of a conversation. Raises ``ConfigError`` for a renderer that is not installed."""
        config = None if renderer is None else self._shared.renderer_named(renderer)
        ids: list[int] = self._shared.rendering().ids(
            messages, config=config, add_generation_prompt=add_generation_prompt
        )
        return ids

    def decode(self, token_ids: Tokens) -> str:
        return str(self._shared.rendering().decode(token_ids))

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        sample: Sample = self._shared.rendering().supervised_sample(messages)
        return sample

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        samples: list[Sample] = self._shared.rendering().supervised_samples(messages, tools)
        return samples

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of one example of the env."""
        return self._environment.examples[example_id].fields

    @property
    def agents(self) -> tuple[str, ...]:
        return self._environment.agents

    @property
    def envs(self) -> tuple[str, ...]:
        return tuple(env.label for env in self._shared.run.config.orchestrator.train.env)

    @property
    def num_examples(self) -> int | None:
        return self._environment.num_examples

    async def wait_ready(self, timeout: float) -> None:
        """Until every connected model answers.

        Raises ``ConfigError`` if one takes fewer tokens than a rollout may have.
        """
        config = self._shared.run.config
        needed = config.inference.max_model_len or config.seq_len
        for pool in self._connected:
            await pool.wait_ready(timeout)
            if pool.max_model_len is not None and pool.max_model_len < needed:
                raise ConfigError(
                    f"{pool.label} takes {pool.max_model_len} tokens (its max_model_len), and a "
                    f"rollout may have {needed}. Serve it with more, or lower "
                    "inference.max_model_len (default: seq_len)."
                )

    async def close(self) -> None:
        """Drop the connections."""
        for pool in self._connected:
            await pool.close()


@dataclass(frozen=True, eq=False)
class TrainEnv:
    """One training environment: the source of its rollouts, and the algorithm that credits them."""

    name: str
    environment: Environment
    source: RolloutSource
    algorithm: Algorithm
    hooks: Hooks
    """This env's scope: every installed plugin and its own algorithm."""
    host: EnvHost
    group_size: int
    """Requests per group: 1 where one request brings the whole group."""
