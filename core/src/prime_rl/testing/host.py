"""Stand-ins for what core lends to an algorithm: a host, and models that score tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.config.contract import FrozenModel
from prime_rl.errors import VersionGone
from prime_rl.plugins.algorithm import Completion, LiveSampling, Tokens
from prime_rl.rollout import ROLES, Prefix, Rollout, Sample
from prime_rl.rundir.scratch import Scratch
from prime_rl.streams import FloatColumn, IntColumn


@dataclass
class FakeReference:
    """A reference model that answers by a function of the tokens and records its requests."""

    answer: Callable[[list[int]], Sequence[float]] = lambda ids: [-0.5] * len(ids)
    """[T] log-probabilities of [T] tokens; the first is replaced by 0.0."""
    asked: list[list[int]] = field(default_factory=list)
    reply: Callable[[list[int], int], Sequence[int]] = lambda ids, seed: [121, 101, 115]
    """The tokens that follow a prompt (``yes``, as code points), by prompt and seed: the request's,
    or the number of earlier completions of this prompt and group, plus the choice's number."""
    prompts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Group and prompt of every completion."""

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
        """``n`` results of ``reply``, cut after a stop token or ``max_tokens``, with the
        log-probabilities of ``answer``."""
        ids = [int(token) for token in token_ids]
        stops = stop_token_ids or ()
        first = self.prompts.count((group_id, ids)) if seed is None else seed
        self.prompts += [(group_id, ids)] * n
        await asyncio.sleep(0)

        answers = []
        for number in range(first, first + n):
            tokens = list(self.reply(ids, number))
            ends = [place for place, token in enumerate(tokens, 1) if token in stops]
            cut = tokens[: min([max_tokens, *ends])]
            is_too_long = len(cut) == max_tokens and len(cut) < len(tokens)
            completion = Completion(
                prompt_ids=np.array(ids, np.int32),
                token_ids=np.array(cut, np.int32),
                logprobs=np.asarray(self.answer([*ids, *cut]), np.float32)[len(ids) :],
                finish_reason="length" if is_too_long else "stop",
                temperature=temperature,
                policy_versions=np.zeros(len(cut), np.int32),
            )

            answers.append(completion)

        return answers

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The result of ``answer``. Yields to other tasks, as a request to a server does."""
        ids = [int(token) for token in token_ids]
        self.asked.append(ids)
        await asyncio.sleep(0)
        column = np.asarray(self.answer(ids), np.float32)
        column[:1] = 0.0
        return column

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """Each token with its log-probability of ``answer``; the ids after it share what is left of
        the probability."""
        logprobs = await self.logprobs(token_ids)
        # log((1 - p) / (k - 1)): p is the token's probability, and k - 1 others share the rest.
        rest = np.log(-np.expm1(np.minimum(logprobs, -1e-6)) / max(k - 1, 1))
        table = np.column_stack([logprobs, np.repeat(rest[:, None], k - 1, 1)]).astype(np.float32)
        tokens = np.add.outer(token_ids, np.arange(k)).astype(np.int32)

        order = np.argsort(-table, axis=1, kind="stable")
        # Nothing predicts the first token.
        order[:1] = 0
        table[:1] = 0
        tokens[:1] = 0
        return np.take_along_axis(tokens, order, 1), np.take_along_axis(table, order, 1)


class CodePoints:
    """Text in place of a tokenizer and a renderer: a token is the code point of a letter."""

    def decode(self, token_ids: Tokens) -> str:
        """Code points as text."""
        return "".join(chr(token) for token in token_ids if token >= 0)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Code points of the contents; -1 stands for the generation prompt."""
        ids = [ord(letter) for message in messages for letter in str(message["content"])]
        return [*ids, -1] if add_generation_prompt else ids

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """One sample, which begins with the names of the tools. The mask is on the assistant's
        code points."""
        names = "".join(str(tool["function"]["name"]) for tool in tools or ())
        block = [{"role": "system", "content": names}] if names else []
        conversation = [*block, *messages]
        roles = [str(each["role"]) for each in conversation for _ in str(each["content"])]
        sample = Sample(
            token_ids=np.array(self.render(conversation), np.int32),
            loss_mask=np.array([role == "assistant" for role in roles], np.bool_),
            inference_logprobs=np.zeros(len(roles), np.float32),
            roles=np.array([ROLES.index(role) for role in roles], np.int8),
            is_content=np.ones(len(roles), np.bool_),
        )
        return [sample]


def default_branch(prefix: Prefix, number: int) -> Rollout:
    """A rollout of one token more, whose reward is 0 and 1 in turn."""
    parent = prefix.rollout
    tokens = parent.samples[prefix.sample].token_ids[: prefix.end]
    mask = np.arange(len(tokens) + 1) == len(tokens)
    sample = Sample(
        token_ids=np.append(tokens, np.int32(7)),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
    )

    return Rollout(
        env=parent.env,
        example_id=parent.example_id,
        group_id=parent.group_id,
        reward=float(number % 2),
        samples=[sample],
        episode_id=parent.episode_id,
    )


@dataclass
class FakeHost:
    """A ``Host`` without engine or environment: every part is given, and can be replaced. Used by
    tests, by the lab and by a replay."""

    env: str = "test"
    policy: FakeReference = field(default_factory=FakeReference)
    frozen: FakeReference = field(default_factory=FakeReference)
    """Stands for every connected model."""
    connected: list[FrozenModel] = field(default_factory=list)
    tasks: Sequence[Mapping[str, Any]] = ()
    agents: tuple[str, ...] = ("agent", "solver", "proposer")
    envs: tuple[str, ...] = ("test",)
    has_checkpoints: bool = True
    initial: FakeReference = field(default_factory=FakeReference)
    ema: FakeReference = field(default_factory=FakeReference)
    past_versions: tuple[int, ...] = (0,)
    seq_len: int = 2048
    max_completion_tokens: int | None = None
    seed: int = 0
    step: int = 0
    renderer: Any = None
    """That of ``live``."""
    temperature: float = 1.0
    group_size: int = 1
    max_off_policy_steps: int = 2
    branch: Callable[[Prefix, int], Rollout] = default_branch
    """The result of ``rollout``, by its prefix and number."""
    score: Callable[[Sample, Rollout], float] = lambda sample, rollout: rollout.reward
    """The result of ``reward``."""
    text: CodePoints = field(default_factory=CodePoints)
    """Renders and decodes."""
    _scratch: Scratch | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def logger(self) -> logging.Logger:
        """One for each env."""
        return logging.getLogger(f"prime_rl.algorithms.{self.env}")

    @property
    def folder(self) -> Path:
        """A temporary one, made when it is first read. Once the process has ended, the next one to
        be made removes it."""
        if self._scratch is None:
            self._scratch = Scratch("prime-rl-host-")
        return self._scratch.path

    async def generate(
        self, token_ids: Tokens, *, max_tokens: int, **settings: Any
    ) -> list[Completion]:
        """That of ``policy``."""
        return await self.policy.generate(token_ids, max_tokens=max_tokens, **settings)

    async def rollout(self, prefix: Prefix, *, number: int = 0) -> Rollout:
        """The result of ``branch``. Yields to other tasks."""
        await asyncio.sleep(0)
        return self.branch(prefix, number)

    async def reward(self, sample: Sample, rollout: Rollout) -> float:
        """The result of ``score``. Yields to other tasks."""
        await asyncio.sleep(0)
        return self.score(sample, rollout)

    def live(self, *, max_concurrency: int) -> LiveSampling:
        """``policy``, with a ``renderer`` of the test's own."""
        from prime_rl.env.traces import rollout_of

        return LiveSampling(
            policy=self.policy,
            renderer=self.renderer,
            temperature=self.temperature,
            group_size=self.group_size,
            max_off_policy_steps=self.max_off_policy_steps,
            rollout=partial(rollout_of, env=self.env, temperature=self.temperature),
        )

    def past(self, version: int) -> FakeReference:
        """``frozen``. Raises ``VersionGone`` unless the version is in ``past_versions``."""
        if version not in self.past_versions:
            raise VersionGone(f"version {version} of the policy is not there")
        return self.frozen

    def connect(self, model: FrozenModel) -> FakeReference:
        """Record the model; scores come from ``frozen``."""
        self.connected.append(model)
        return self.frozen

    def decode(self, token_ids: Tokens) -> str:
        """That of ``text``."""
        return self.text.decode(token_ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """That of ``text``."""
        return self.text.render(
            messages, renderer=renderer, add_generation_prompt=add_generation_prompt
        )

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """The only one of ``supervised_samples``."""
        (sample,) = self.text.supervised_samples(messages)
        return sample

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """That of ``text``."""
        return self.text.supervised_samples(messages, tools)

    def task(self, example_id: int) -> Mapping[str, Any]:
        """One of ``tasks``."""
        return self.tasks[example_id]

    @property
    def num_examples(self) -> int | None:
        """How many ``tasks`` there are."""
        return len(self.tasks)


def _likelier(ids: list[int]) -> list[float]:
    """Depends on the token, and rises with its position: a hint helps."""
    return [(-0.4 - 0.2 * (token % 7)) * 20 / (20 + place) for place, token in enumerate(ids)]


def conformance_host() -> FakeHost:
    """The host of ``check_algorithm``. Its models find some tokens likelier than the policy did and
    some less likely, and all of them likelier after a hint."""
    policy, frozen, initial, ema = (FakeReference(_likelier) for _ in range(4))
    return FakeHost(policy=policy, frozen=frozen, initial=initial, ema=ema)
