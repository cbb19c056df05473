"""The verifiers taskset ``conversations``: the rows of a data set of messages, to learn from.

    rows    ``rows``      JSONL, CSV, Parquet or a data set of the hub -> conversations
    check   ``check_args``  before a run starts, without verifiers
    tasks   ``taskset``   verifiers' classes

Nothing scores it: the source ``dataset`` shows each row as it is. ``import conversations`` imports
no verifiers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ConversationsTaskset", "InProcessHarness"]

_MODULES = {"ConversationsTaskset": "conversations.taskset", "InProcessHarness": "in_process"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'conversations' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
