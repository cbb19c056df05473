# mypy: allow-subclassing-any, allow-untyped-decorators
"""verifiers' classes of the taskset ``conversations``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import NonNegativeInt, PositiveInt, model_validator

from conversations.check_args import conversations_for


class ConversationsConfig(vf.TasksetConfig):
    """``args`` of an env ``conversations``; see ``ConversationsArgs``."""

    data: str = ""
    split: str | None = None
    subset: str | None = None
    first: NonNegativeInt = 0
    num_examples: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_data(self) -> ConversationsConfig:
        if self.id and not self.data:
            raise ValueError("data: set a file (.jsonl, .csv, .parquet) or a data set of the hub")
        return self


class ConversationsData(vf.TaskData):
    """One row: ``prompt`` is its first text, for reports."""

    conversation: dict[str, Any]
    """``messages``, and ``tools`` if there are some."""


class ConversationsTaskset(vf.Taskset[vf.Task[ConversationsData], ConversationsConfig]):
    """The rows of the data, in their order."""

    RUNS_IN_PROCESS = True

    def load(self) -> Iterator[vf.Task[ConversationsData]]:
        for conversation in conversations_for(self.config):
            texts = [message.get("content") for message in conversation["messages"]]
            prompt = next((text for text in texts if isinstance(text, str) and text.strip()), "-")
            data = ConversationsData(prompt=prompt, conversation=conversation)
            yield vf.Task[ConversationsData](data, self.config.task)


__all__ = ["ConversationsTaskset"]
