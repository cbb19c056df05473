"""The host of a replay: it answers from the recorded run, without models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prime_rl import Completion
from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.plugins.algorithm import Tokens
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.rollout import Prefix, Rollout, Sample
from prime_rl.streams import FloatColumn, IntColumn
from prime_rl.testing import CodePoints, FakeHost, FakeReference


class NotRecorded(RunError):
    """The algorithm needs an answer of a model or of the running run."""

    def __init__(self, env: str, what: str) -> None:
        super().__init__(
            f"env {env!r}: the algorithm asks for {what}. Replay has the rollouts and what was "
            "recorded of them; choose an algorithm that needs no model."
        )


def losses_of(config: RunConfig) -> Components:
    """The losses of a run."""
    return Components.load(
        config.trainer, load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    )


class RecordedReference(FakeReference):
    """A reference model that returns the recorded logprobs of the current rollout."""

    def __init__(self, env: str) -> None:
        super().__init__()
        self._env = env
        self.rollout: Rollout | None = None
        """The saved rollout that is being scored."""

    async def logprobs(self, token_ids: Tokens, *, group_id: int = 0) -> FloatColumn:
        """Recorded ``ref_logprobs`` of a sample, [T], with any tokens in front of it, which get
        0.0. Raises ``NotRecorded`` for any other tokens."""
        wanted = np.asarray(token_ids, np.int32)
        for sample in self.rollout.samples if self.rollout else ():
            front = len(wanted) - len(sample)
            if sample.ref_logprobs is not None and np.array_equal(
                wanted[max(front, 0) :], sample.token_ids
            ):
                return np.concatenate([np.zeros(front, np.float32), sample.ref_logprobs])

        raise NotRecorded(
            self._env, f"a model's logprobs of {len(wanted)} tokens, which are not in the file"
        )

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """Raises ``NotRecorded``: alternatives are not saved."""
        raise NotRecorded(self._env, f"a model's {k} most likely tokens")

    async def generate(
        self, token_ids: Tokens, *, max_tokens: int, **settings: Any
    ) -> list[Completion]:
        """Raises ``NotRecorded``: completions are not saved."""
        raise NotRecorded(self._env, "a completion")


class NoText(CodePoints):
    """Refuses: neither the tokenizer nor rendered conversations are saved."""

    def __init__(self, env: str) -> None:
        self._env = env

    def decode(self, token_ids: Tokens) -> str:
        """Raises ``NotRecorded``."""
        raise NotRecorded(self._env, "the text of tokens")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Raises ``NotRecorded``."""
        raise NotRecorded(self._env, "a conversation to be rendered")

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """Raises ``NotRecorded``."""
        raise NotRecorded(self._env, "a conversation to be rendered")


class ReplayHost(FakeHost):
    """``prime_rl.Host`` for one env of a saved run: its facts, and one model in place of all."""

    def __init__(self, env: str, config: RunConfig, rollouts: Sequence[Rollout]) -> None:
        train = config.orchestrator.train
        table = next((each for each in train.env if each.label == env), None)
        sampling = (table and table.sampling) or train.sampling
        ours = [rollout for rollout in rollouts if rollout.env == env]

        self.reference = RecordedReference(env)
        super().__init__(
            env=env,
            envs=tuple(each.label for each in train.env),
            agents=tuple(dict.fromkeys(rollout.agent for rollout in ours)),
            seq_len=config.seq_len,
            max_completion_tokens=sampling.max_completion_tokens,
            seed=config.seed,
            policy=self.reference,
            frozen=self.reference,
            initial=self.reference,
            ema=self.reference,
            past_versions=(0, *range(1, config.max_steps + 1)),
            text=NoText(env),
        )
        self._examples = {rollout.example_id: rollout.task for rollout in ours}

    def show(self, rollout: Rollout) -> None:
        """``rollout`` is scored next: its models answer for it, and ``step`` is the version that
        sampled it."""
        self.reference.rollout = rollout
        self.step = rollout.policy_version

    async def rollout(self, prefix: Prefix, *, number: int = 0) -> Rollout:
        """Raises ``NotRecorded``: no environment runs."""
        raise NotRecorded(self.env, "an episode from the middle of a rollout")

    async def reward(self, sample: Sample, rollout: Rollout) -> float:
        """Raises ``NotRecorded``: no environment runs."""
        raise NotRecorded(self.env, "the env's reward of a sample")

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of an example that was sampled."""
        if example_id not in self._examples:
            raise IndexError(f"env {self.env!r}: no saved rollout is of example {example_id}")
        return self._examples[example_id]

    @property
    def num_examples(self) -> int | None:
        """Not recorded."""
        return None
