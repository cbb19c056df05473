"""The host of a replay: it answers from the recorded run, without models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl import Completion
from prime_rl.config.contract import FrozenModel
from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.rollout import Rollout, Sample
from prime_rl.rundir.scratch import Scratch
from prime_rl.streams import FloatColumn, IntColumn


class NotRecorded(RunError):
    """The algorithm needs an answer of a model or of the running run."""


def losses_of(config: RunConfig) -> Components:
    """The losses of a run."""
    return Components.load(
        config.trainer, load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    )


class RecordedReference:
    """A reference model that returns the recorded logprobs of the current rollout."""

    def __init__(self, env: str) -> None:
        self._env = env
        self.rollout: Rollout | None = None
        """The saved rollout that is being scored."""

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """Recorded ``ref_logprobs`` of a sample, [T], with any tokens in front of it, which get
        0.0. Raises ``NotRecorded`` for any other tokens."""
        asked = np.asarray(token_ids, np.int32)
        for sample in self.rollout.samples if self.rollout else ():
            front = len(asked) - len(sample)
            if sample.ref_logprobs is not None and np.array_equal(
                asked[max(front, 0) :], sample.token_ids
            ):
                return np.concatenate([np.zeros(front, np.float32), sample.ref_logprobs])

        raise _not_recorded(
            self._env, f"a model's logprobs of {len(asked)} tokens, which are not in the file"
        )

    async def top_logprobs(
        self, token_ids: Sequence[int] | np.ndarray, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """Raises ``NotRecorded``: alternatives are not saved."""
        raise _not_recorded(self._env, f"a model's {k} most likely tokens")

    async def generate(
        self, token_ids: Sequence[int] | np.ndarray, *, max_tokens: int, **settings: Any
    ) -> list[Completion]:
        """Raises ``NotRecorded``: completions are not saved."""
        raise _not_recorded(self._env, "a completion")


class ReplayHost:
    """``prime_rl.Host`` for one env of a saved run."""

    def __init__(self, env: str, config: RunConfig, rollouts: Sequence[Rollout]) -> None:
        own = [rollout for rollout in rollouts if rollout.env == env]
        train = config.orchestrator.train
        self.env = env
        self.envs = tuple(each.label for each in train.env)
        self.seq_len = config.seq_len
        self.seed = config.seed
        sampling = next((each.sampling for each in train.env if each.label == env), None)
        self.max_completion_tokens = (sampling or train.sampling).max_completion_tokens
        self.logger = logging.getLogger(f"prime_rl.algorithms.{env}")
        self.agents = tuple(dict.fromkeys(rollout.agent for rollout in own))
        self.num_examples: int | None = None
        self.reference = RecordedReference(env)
        self._tasks = {rollout.example_id: rollout.task for rollout in own}

    @property
    def step(self) -> int:
        """The version that sampled the rollout that is being scored."""
        return self.reference.rollout.policy_version if self.reference.rollout else 0

    @cached_property
    def folder(self) -> Path:
        """A temporary one: a replay writes nothing into the run."""
        self._scratch = Scratch("prime-rl-replay-")
        return self._scratch.path

    @property
    def policy(self) -> RecordedReference:
        """The recorded answers of the policy."""
        return self.reference

    @property
    def initial(self) -> RecordedReference:
        """The recorded answers of the first weights."""
        return self.reference

    @property
    def ema(self) -> RecordedReference:
        """The recorded answers of the moving average."""
        return self.reference

    def connect(self, model: FrozenModel) -> RecordedReference:
        """The recorded answers of a frozen model."""
        return self.reference

    async def generate(
        self, token_ids: Sequence[int] | np.ndarray, *, max_tokens: int, **settings: Any
    ) -> list[Completion]:
        """Raises ``NotRecorded``."""
        return await self.reference.generate(token_ids, max_tokens=max_tokens, **settings)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Raises ``NotRecorded``: the tokenizer is not saved."""
        raise _not_recorded(self.env, "the text of tokens")

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of an example that was sampled."""
        if example_id not in self._tasks:
            raise IndexError(f"env {self.env!r}: no saved rollout is of example {example_id}")
        return self._tasks[example_id]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Raises ``NotRecorded``: rendered conversations are not saved."""
        raise _not_recorded(self.env, "a conversation to be rendered")

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """Raises ``NotRecorded``."""
        raise _not_recorded(self.env, "a conversation to be rendered")

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """Raises ``NotRecorded``."""
        raise _not_recorded(self.env, "a conversation to be rendered")


def _not_recorded(env: str, what: str) -> NotRecorded:
    return NotRecorded(
        f"env {env!r}: the algorithm asks for {what}. Replay has the rollouts and what was "
        "recorded of them; choose an algorithm that needs no model."
    )
