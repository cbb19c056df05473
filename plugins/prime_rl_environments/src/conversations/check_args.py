"""The args of an env ``conversations``, checked before a run starts. Imports no verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from conversations.rows import Conversation, conversations_of
from function.rows import chosen_rows


class ConversationsArgs(BaseModel):
    """``args`` of an env ``conversations``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    """A file (``.jsonl``, ``.csv``, ``.parquet``), or the name of a data set of the hub. A row has
    ``messages``, or ``prompt`` and ``completion``; ``tools`` where messages call some."""
    split: str | None = None
    """Split of a data set of the hub. None: ``train``."""
    subset: str | None = None
    """Subset of a data set of the hub."""
    first: int = Field(0, ge=0)
    """The number of rows to skip."""
    num_examples: PositiveInt | None = None
    """None: all rows."""


def conversations_for(args: Any) -> list[Conversation]:
    """The conversations of an env. ``args``: an object with the fields of ``ConversationsArgs``.
    Raises ``ConfigError``."""
    return conversations_of(chosen_rows(args), first=args.first + 1)


def read_conversations(
    data: str, *, split: str | None = None, subset: str | None = None
) -> list[Conversation]:
    """The conversations of a file or of a data set of the hub: ``messages`` each, and ``tools`` if
    there are some. Raises ``ConfigError``."""
    return conversations_for(ConversationsArgs(data=data, split=split, subset=subset))


def check_args(args: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for rows that are no conversations. Wrong keys and types are left to
    verifiers' own check, which knows further keys."""
    known = {name: value for name, value in args.items() if name in ConversationsArgs.model_fields}
    try:
        table = ConversationsArgs(**known)
    except ValidationError:
        return
    conversations_for(table)
