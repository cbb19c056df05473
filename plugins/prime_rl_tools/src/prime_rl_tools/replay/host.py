"""What replay lends to an algorithm: what the run has recorded, and nothing that samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prime_rl.config.models import FrozenModel
from prime_rl.errors import RunError
from prime_rl.rollout import FloatColumn, Rollout, Sample


class NotRecorded(RunError):
    """The algorithm asks for something that only a model, or the live run, could answer."""


class RecordedReference:
    """A reference model that knows what it said in the run about the rollout at hand."""

    def __init__(self, env: str) -> None:
        self._env = env
        self.rollout: Rollout | None = None
        """The rollout that is scored now, as it was saved."""

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """Recorded ``ref_logprobs`` of a sample, [T], whatever stands in front of it; 0.0 there.
        Raises ``NotRecorded`` for any other tokens."""
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


class ReplayHost:
    """``prime_rl.Host`` for one env of a run that is over."""

    def __init__(self, env: str, envs: tuple[str, ...], rollouts: Sequence[Rollout]) -> None:
        own = [rollout for rollout in rollouts if rollout.env == env]
        self.env = env
        self.envs = envs
        self.agents = tuple(dict.fromkeys(rollout.agent for rollout in own))
        self.num_examples: int | None = None
        self.reference = RecordedReference(env)
        self._tasks = {rollout.example_id: rollout.task for rollout in own}

    @property
    def policy(self) -> RecordedReference:
        """The policy, as far as it is recorded."""
        return self.reference

    def connect(self, model: FrozenModel) -> RecordedReference:
        """A frozen model, as far as it is recorded. Nothing is connected."""
        return self.reference

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
        """Raises ``NotRecorded``: what was rendered to ask a model went to the model."""
        raise _not_recorded(self.env, "a conversation to be rendered")

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """Raises ``NotRecorded``."""
        raise _not_recorded(self.env, "a conversation to be rendered")


def _not_recorded(env: str, what: str) -> NotRecorded:
    return NotRecorded(
        f"env {env!r}: the algorithm asks for {what}. Replay has the rollouts and what was "
        "recorded of them; choose an algorithm that needs no model."
    )
