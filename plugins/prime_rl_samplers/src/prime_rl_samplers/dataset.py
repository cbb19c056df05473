"""``dataset``: supervised tokens from demonstrations, so that a warm-up is an ordinary run.

    loss = mean over demonstrated tokens of -log pi(token)        (the ce component)

Each reply follows the prompt that a rollout would have had, and replies that do not share one are
samples of their own.

A group is one rollout of one demonstration, from a file or from a field of the env's own tasks. The
sampler chooses them in order.

A demonstration was neither sampled (``has_logprobs`` is False) nor scored. A reward must be a
finite number, so it is a meaningless 0.0. ``source`` is ``dataset`` and ``rewards`` is empty;
averages of rewards should exclude rollouts that are not from a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import model_validator

from prime_rl import ROLES, ConfigError, Host, PluginConfig, Rollout, Sample, Source, SourceRequest
from prime_rl_samplers.messages import Demonstration, demonstration, read_demonstrations

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class DatasetConfig(PluginConfig):
    """Settings of ``dataset``. Exactly one of the two keys is required."""

    path: Path | None = None
    """A JSON-lines file, relative to the working directory. A line is ``{"messages": [...]}``, or
    ``{"prompt": ..., "completion": ...}`` of text or messages. ``tools``, which calls need, are
    those that the prompt tells of. The rollout's ``task`` has all other keys."""
    demo_key: str | None = None
    """A field of the env's tasks that answers their prompt: text or messages; or a table with the
    whole conversation (``messages``, ``tools``), as the taskset ``conversations`` has it."""
    roles: tuple[Role, ...] | Literal["all"] = ("assistant",)
    """Whose tokens train. For the assistant: the tokens that it would sample. For other roles:
    their whole messages. ``"all"``: every token, those of the template included."""

    @model_validator(mode="after")
    def _one_origin(self) -> DatasetConfig:
        if (self.path is None) == (self.demo_key is None):
            got = "neither" if self.path is None else "both"
            raise ValueError(f"expected one of path and demo_key, got {got}")
        return self


class Dataset(Source):
    """Returns demonstrations as rollouts."""

    name = "dataset"
    config_class = DatasetConfig
    config: DatasetConfig
    feeds = frozenset({"ce"})

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._lines: list[Demonstration] = []

    async def setup(self, host: Host) -> None:
        """Read all demonstrations, and render the first of each form as a check: what a renderer
        cannot write is found before the first step. Raises ``ConfigError`` with the env, and the
        line or example."""
        self._host = host
        if self.config.path is not None:
            self._lines = read_demonstrations(self.config.path, self._where("path"))
        number = self.num_examples
        checked: set[Any] = set()
        for example_id in range(1 if number is None else number):
            shown = self._demonstration(example_id)
            form = _form(shown)
            if form not in checked:
                checked.add(form)
                self._samples(shown)

    @property
    def num_examples(self) -> int | None:
        """Number of demonstrations. None: the env's tasks are unlimited."""
        return len(self._lines) if self.config.path is not None else self._host.num_examples

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of one demonstration, including ``prompt``."""
        return self._demonstration(example_id).fields

    async def group(self, request: SourceRequest) -> Sequence[Rollout]:
        """One rollout of one demonstration."""
        shown = self._demonstration(request.example_id)
        rollout = Rollout(
            env=self._host.env,
            example_id=request.example_id,
            group_id=request.group_id,
            reward=0.0,
            samples=self._samples(shown),
            info={"demonstration": shown.where},
            num_turns=shown.num_turns,
            policy_version=request.policy_version,
            task=dict(shown.fields),
            source=self.name,
            has_logprobs=False,
        )
        return [rollout]

    def _demonstration(self, example_id: int) -> Demonstration:
        if self.config.demo_key is None:
            return self._lines[example_id]
        where = f"{self._where('demo_key')}: example {example_id}"
        return demonstration(self._host.task(example_id), self.config.demo_key, where)

    def _samples(self, shown: Demonstration) -> list[Sample]:
        try:
            samples = self._host.supervised_samples(shown.messages, shown.tools)
        except ConfigError as error:
            raise ConfigError(f"{shown.where}: {error}") from error
        except Exception as error:  # of the renderer
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{shown.where}: the renderer cannot render it: {reason}") from error

        samples = [
            self._with_roles(sample, shown, earlier=samples[:number])
            for number, sample in enumerate(samples)
        ]
        if not sum(sample.num_trainable_tokens for sample in samples):
            raise ConfigError(
                f"{shown.where}: expected tokens of the assistant to learn from, got none among "
                f"{sum(map(len, samples))}: its messages are empty, or the renderer does not "
                "attribute tokens to messages"
            )

        return samples

    def _with_roles(
        self, sample: Sample, shown: Demonstration, earlier: Sequence[Sample]
    ) -> Sample:
        """The sample with the tokens of ``roles`` on its mask. A prompt that ``earlier`` samples of
        the conversation begin with too has trained there. Raises ``ConfigError`` if the renderer
        does not tell the roles."""
        wanted = self.config.roles
        if wanted == ("assistant",):
            return sample
        known = max((_shared(sample, each) for each in earlier), default=0)
        is_new = np.arange(len(sample)) >= known
        if wanted == "all":
            return replace(sample, loss_mask=is_new)

        mask = sample.loss_mask if "assistant" in wanted else np.zeros_like(sample.loss_mask)
        others = [ROLES.index(role) for role in wanted if role != "assistant"]
        if not others:
            return replace(sample, loss_mask=mask)
        if sample.roles is None or not (sample.roles >= 0).any():
            raise ConfigError(
                f"{shown.where}: roles are {', '.join(wanted)}, and the renderer does not tell "
                "whose message a token is. Set orchestrator.renderer.name to the renderer of the "
                "model's family."
            )
        return replace(sample, loss_mask=mask | (is_new & np.isin(sample.roles, others)))

    def _where(self, key: str) -> str:
        return f"env {self._host.env!r}: algo.sampling.source.{key}"


def _form(shown: Demonstration) -> tuple[bool, frozenset[tuple[Any, ...]]]:
    """What a renderer may be unable to write: tools, and roles with a text, calls or a thought."""
    parts = ("content", "tool_calls", "reasoning_content")
    kinds = {
        (message["role"], *(bool(message.get(part)) for part in parts))
        for message in shown.messages
    }
    return shown.tools is not None, frozenset(kinds)


def _shared(one: Sample, other: Sample) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differs = one.token_ids[:length] != other.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length
