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

from prime_rl.config.contract import FrozenModel, SamplingConfig
from prime_rl.config.orchestrator import EnvConfig
from prime_rl.config.run import RunConfig
from prime_rl.entries import entries, load_entry
from prime_rl.env.environment import Environment
from prime_rl.env.limits import AwakeTime
from prime_rl.errors import BranchFailed, ConfigError
from prime_rl.inference.fleet import Fleet
from prime_rl.inference.pool import EnginePool, FrozenPool
from prime_rl.orchestrator.branches import Branches, seed_of
from prime_rl.orchestrator.past import PastModel, PastPolicies
from prime_rl.orchestrator.policy import LivePolicy
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.orchestrator.sources import RolloutSource
from prime_rl.plugins.algorithm import (
    Algorithm,
    Completion,
    LiveSampling,
    ReferenceModel,
    Tokens,
)
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Prefix, Rollout, Sample
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
        taken = self._seconds
        self._seconds = dict.fromkeys(taken, 0.0)
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
        """For one pool: call it with the reason why the pool waits, and with None when it no longer
        waits."""
        # Each pool gets an object as its key: two pools may report the same text.
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


@dataclass(eq=False)
class EarlierEngine:
    """An engine that serves earlier weights of the policy, and perhaps other ones as the run goes
    on."""

    fleet: Fleet
    folder: Path
    """Where the trainer publishes them, by version."""
    version: int = 0
    """What it serves."""
    interval: int | None = 1
    """It loads the versions that this divides; None: none."""
    since: int = 0
    """The version that the run goes on from: the trainer publishes what is due later."""

    async def follow(self, version: int) -> None:
        """Load what belongs to the policy's ``version``."""
        due = version - version % self.interval if self.interval else 0
        if due > max(self.version, self.since):
            await self.fleet.update_weights(self.folder / f"step_{due}", due)
            self.version = due


@dataclass(frozen=True, eq=False)
class Engines:
    """The engines that sample from the policy, and which version they serve."""

    fleet: Fleet
    policy: LivePolicy
    outages: Outages
    """Endpoints that a request waits for."""
    earlier: Mapping[str, EarlierEngine] = field(default_factory=dict)
    """Those for ``host.ema`` (``ema``) and ``host.initial`` (``initial``), if an algorithm asks for
    them."""
    past: PastPolicies | None = None
    """Earlier versions, if an agent or an algorithm meets them."""
    awake: AwakeTime = field(default_factory=AwakeTime)
    """Limits of episodes, which colocated engines interrupt."""

    @property
    def fleets(self) -> list[Fleet]:
        """All of them."""
        past = [] if self.past is None else [self.past.fleet]
        return [self.fleet, *(each.fleet for each in self.earlier.values()), *past]


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
    branches: Branches
    """Episodes from the middle of a rollout."""


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
        return load_entry(entry)
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
    def _table(self) -> EnvConfig:
        """``[[orchestrator.train.env]]`` of this env."""
        envs = self._shared.run.config.orchestrator.train.env
        return next(env for env in envs if env.label == self.env)

    @property
    def _sampling(self) -> SamplingConfig:
        return self._table.sampling or self._shared.run.config.orchestrator.train.sampling

    @property
    def max_completion_tokens(self) -> int | None:
        return self._sampling.max_completion_tokens

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

    async def rollout(self, prefix: Prefix, *, number: int = 0) -> Rollout:
        """Go on from the middle of a rollout. Raises ``BranchFailed`` and ``ConfigError``."""
        run = self._shared.run
        sampling = self._sampling_of_branches()
        self._asked["branches"] += 1

        try:
            branch = await self._shared.branches.rollout(
                prefix,
                self._environment,
                sampling=sampling,
                seed=seed_of(run.config.seed, prefix, number),
                seq_len=run.config.seq_len,
            )
        except BranchFailed:
            self._asked["failed_branches"] += 1
            raise

        self._asked["sampled_tokens"] += branch.num_trainable_tokens
        return branch

    async def reward(self, sample: Sample, rollout: Rollout) -> float:
        """The env's reward of a sample. Raises ``BranchFailed`` and ``ConfigError``."""
        sampling = self._sampling_of_branches()
        self._asked["rewards"] += 1
        return await self._shared.branches.reward(
            sample, rollout, self._environment, sampling=sampling
        )

    def _sampling_of_branches(self) -> SamplingConfig:
        """Raises ``ConfigError`` for an env without branches."""
        fault = None
        if len(self.agents) != 1:
            fault = f"it has the agents {', '.join(self.agents)}, and a record has one of them"
        elif self._table.address:
            fault = "its workers are elsewhere (address), and branches listen on this machine only"

        if fault is not None:
            raise ConfigError(
                f"env {self.env!r} cannot go on from the middle of a rollout: {fault}."
            )

        return self._sampling

    def live(self, *, max_concurrency: int) -> LiveSampling:
        """The live policy for a source that talks to it itself."""
        from prime_rl.env.rendering import new_renderer, vocab_size_of
        from prime_rl.env.traces import rollout_of

        run = self._shared.run
        orchestrator = run.config.orchestrator
        model_path = Path(run.launch.model_path)
        temperature = self._sampling.temperature
        lent: Any = self.policy

        return LiveSampling(
            policy=lent.beside(max_concurrency),
            renderer=new_renderer(model_path, self._shared.renderer),
            temperature=temperature,
            group_size=self._table.group_size or orchestrator.group_size,
            max_off_policy_steps=orchestrator.max_off_policy_steps,
            rollout=partial(
                rollout_of,
                env=self.env,
                temperature=temperature,
                vocab_size=vocab_size_of(model_path),
            ),
        )

    def _lend(self, model: Any) -> ReferenceModel:
        salt = f"{self._shared.run.config.seed} {self.env}"
        lent: ReferenceModel = model.lend(
            salt, lambda: self._shared.rendering().stop_token_ids(), self._asked
        )
        return lent

    def take_metrics(self) -> dict[str, float]:
        """The algorithm's requests and their tokens since the last call. Empty without any."""
        taken = {f"scoring/{self.env}/{name}": float(n) for name, n in self._asked.items()}
        # The names stay, with 0: a metric does not vanish from a step without requests.
        self._asked.subtract(dict(self._asked))
        return taken

    @cached_property
    def initial(self) -> ReferenceModel:
        engine = self._shared.engines.earlier.get("initial")
        if engine is not None:
            return self._lend_earlier(engine)

        model = self._shared.run.config.orchestrator.initial
        if model is None:
            raise ConfigError(f"env {self.env!r}: its algorithm does not declare needs_initial")

        return self.connect(model)

    @cached_property
    def ema(self) -> ReferenceModel:
        engine = self._shared.engines.earlier.get("ema")
        if engine is None:
            raise ConfigError(f"env {self.env!r}: its algorithm does not declare needs_ema")
        return self._lend_earlier(engine)

    def _lend_earlier(self, engine: EarlierEngine) -> ReferenceModel:
        return self._lend(
            scorer_over(
                engine.fleet,
                self._shared.run.launch.served_model_name,
                api_key=os.environ[ENGINE_KEY],
                cache_salt=lambda: str(engine.version),
            )
        )

    def past(self, version: int) -> ReferenceModel:
        """The policy at an earlier version. Raises ``ConfigError`` where the run keeps none."""
        pool = self._past
        name = self._shared.run.launch.served_model_name
        key = os.environ[ENGINE_KEY]
        # A salt per version, so that no request reuses the cached keys and values of another.
        scorer = scorer_over(pool.fleet, name, api_key=key, cache_salt=lambda: f"past {version}")
        return PastModel(pool, version, self._lend(scorer))

    @property
    def past_versions(self) -> tuple[int, ...]:
        return self._past.versions

    @property
    def _past(self) -> PastPolicies:
        past = self._shared.engines.past
        if past is None:
            raise ConfigError(f"env {self.env!r}: its algorithm does not declare needs_past")
        return past

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
    def has_checkpoints(self) -> bool:
        return self._shared.run.config.ckpt.enabled

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


@dataclass(frozen=True)
class GroupLimits:
    """Limits of the groups of an env in which a plugin decides how many members a group has."""

    size: int
    """Members that a group may have."""
    trained: int
    """Those of them that may train."""


@dataclass(frozen=True, eq=False, kw_only=True)
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
    limits: GroupLimits | None = None
    """None: its groups have ``group_size`` members."""
