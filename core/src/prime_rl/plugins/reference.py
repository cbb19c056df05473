"""Models that a scoring hook asks: the live policy, or a frozen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from prime_rl.errors import StreamError
from prime_rl.rollout import Sample
from prime_rl.streams import FloatColumn, IntColumn

GREEDY = 1e-5
"""Temperatures below are greedy to an engine."""

Tokens: TypeAlias = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """What a model sampled after a prompt."""

    prompt_ids: IntColumn
    token_ids: IntColumn
    """Its C tokens, a stop token included: [C]."""
    logprobs: FloatColumn
    """log μ of each token at ``temperature``: [C]."""
    finish_reason: str
    """``stop``: it ends with a stop token. ``length``: it is cut."""
    temperature: float = 1.0
    policy_versions: IntColumn | None = None
    """The policy version that sampled each token: [C]. None: a frozen model."""

    def sample(self) -> Sample:
        """Prompt and completion as a sample in which the completion trains. Append it to
        ``rollout.samples`` and assign credit to it as to the others.

        Raises ``StreamError`` at temperature 0, where nothing is sampled.
        """
        if self.temperature < GREEDY:
            raise StreamError(
                "a completion at temperature 0 is not sampled, so its logprobs cannot train. "
                "Generate it at the temperature of the rollouts."
            )
        before, versions = len(self.prompt_ids), self.policy_versions
        return Sample(
            token_ids=np.concatenate([self.prompt_ids, self.token_ids]),
            loss_mask=np.arange(before + len(self.token_ids)) >= before,
            inference_logprobs=np.concatenate([np.zeros(before), self.logprobs]),
            temperature=self.temperature,
            policy_versions=None
            if versions is None
            else np.concatenate([np.full(before, -1), versions]),
        )


class ReferenceModel(Protocol):
    """A model that scores and samples tokens: the live policy, or a frozen one.

    Requests are bounded and retried; while the endpoint does not answer, they wait and the run
    reports it. Requests with one ``group_id`` go to one replica. They raise ``EngineError`` if the
    endpoint refuses them, ``OverlongError`` if the tokens do not fit its context.
    """

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it: [T]; 0.0 for the first."""
        ...

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """The ``k`` most likely tokens in the place of each token, given those before it: ids and
        log-probabilities, [T, k] each, likeliest first. The first row is 0. With the size of the
        vocabulary as ``k`` it is the whole distribution. Raises ``EngineError`` if the endpoint
        offers fewer alternatives."""
        ...

    async def generate(
        self,
        token_ids: Tokens,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        n: int = 1,
        seed: int | None = None,
        group_id: int = 0,
    ) -> list[Completion]:
        """Sample ``n`` completions (at most 128) of a prompt, from the whole distribution.

        ``max_tokens``: of each; fewer where the context ends. ``stop_token_ids``: besides the
        model's own end; None: those of the run's renderer.

        ``seed`` tells requests of one group and prompt apart; env, group, prompt and the run's seed
        salt it. None: the number of such requests before this one. Where siblings send the same
        prompt, that number depends on timing: pass ``rollout.episode_id`` to make it repeatable.
        """
        ...
