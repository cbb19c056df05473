"""What core lends to one env's algorithm and source: models to score with, and a renderer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.config.models import FrozenModel
from prime_rl.env.environment import Environment
from prime_rl.env.rendering import Rendering
from prime_rl.errors import ConfigError
from prime_rl.inference.frozen import FrozenPool
from prime_rl.inference.scorer import PromptScorer
from prime_rl.plugins.base import ReferenceModel
from prime_rl.rollout import Sample


class Outages:
    """Endpoints that do not answer at present: the run waits for them, and says so."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called when an endpoint goes or comes back."""

    def reporter(self) -> Callable[[str | None], None]:
        """For one pool: called with what it waits for, and with None when that is over."""
        key = object()

        def report(text: str | None) -> None:
            if text is None:
                self.texts.pop(id(key), None)
            else:
                self.texts[id(key)] = text
            self.changed()

        return report

    @property
    def waiting_for(self) -> str | None:
        """Every outage in one line; None if all is well."""
        return "; ".join(dict.fromkeys(self.texts.values())) or None


@dataclass(frozen=True)
class RunFacts:
    """What a host knows of the whole run."""

    renderer_named: Callable[[str], Any]
    """The config object of another renderer. Raises ``ConfigError`` for an unknown name."""
    envs: tuple[str, ...]
    """The labels of every training env."""
    context: int
    """Tokens that a rollout may have."""


class EnvHost:
    """``prime_rl.Host`` for one env."""

    def __init__(
        self,
        env: str,
        environment: Environment,
        rendering: Rendering,
        policy: ReferenceModel,
        outages: Outages,
        run: RunFacts,
    ) -> None:
        self._env = env
        self._environment = environment
        self._rendering = rendering
        self._policy = policy
        self._outages = outages
        self._run = run
        self.connected: list[FrozenPool] = []

    @property
    def env(self) -> str:
        """The env's label."""
        return self._env

    @property
    def policy(self) -> ReferenceModel:
        """The live policy, as it samples now."""
        return self._policy

    def connect(self, model: FrozenModel) -> ReferenceModel:
        """A frozen model to score with. Raises ``ConfigError`` if its key is missing."""
        where = f"env {self._env!r}: reference"
        pool = FrozenPool.of(model, where=where, on_waiting=self._outages.reporter())
        self.connected.append(pool)
        return PromptScorer(
            pool, model.name, max_concurrency=model.max_concurrency, timeout=model.timeout
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Tokens of a conversation. Raises ``ConfigError`` for a renderer nobody offers."""
        config = None if renderer is None else self._run.renderer_named(renderer)
        return self._rendering.ids(
            messages, config=config, add_generation_prompt=add_generation_prompt
        )

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """A conversation whose assistant tokens train."""
        return self._rendering.supervised_sample(messages)

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of one example of the env."""
        return self._environment.examples[example_id].fields

    @property
    def agents(self) -> tuple[str, ...]:
        """The seats of the env, by name."""
        return self._environment.agents

    @property
    def envs(self) -> tuple[str, ...]:
        """The labels of every training env of the run."""
        return self._run.envs

    @property
    def num_examples(self) -> int | None:
        """None: the env generates examples without end."""
        return self._environment.num_examples

    async def wait_ready(self, timeout: float) -> None:
        """Until every connected model answers and serves what it should.

        Raises ``ConfigError`` if one takes fewer tokens than a rollout may have.
        """
        for pool in self.connected:
            await pool.wait_ready(timeout)
            if pool.max_model_len is not None and pool.max_model_len < self._run.context:
                raise ConfigError(
                    f"{pool.label} takes {pool.max_model_len} tokens (its "
                    f"max_model_len), and a rollout may have {self._run.context}. Serve it with "
                    "more, or lower inference.max_model_len (default: seq_len)."
                )

    async def close(self) -> None:
        """Drop the connections."""
        for pool in self.connected:
            await pool.close()
