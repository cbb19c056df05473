"""One rollout as a row of the table: conversation, reward, and the credit of its tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from prime_rl import Rollout

COLUMNS = (
    *("step", "env", "group", "example", "agent", "reward", "dropped_by", "turns", "tokens"),
    *("trained_tokens", "policy_version", "advantage_mean", "advantage_min", "advantage_max"),
    *("credit", "prompt", "conversation"),
)
MAX_TEXT = 4000
"""Characters of a prompt or conversation. The run's own files have the rest."""
MAX_CREDIT = 400
"""Characters of the credit column."""


def table_row(step: int, rollout: Rollout, dropped_by: str | None) -> list[Any]:
    """Values in the order of ``COLUMNS``."""
    advantages = rollout.advantages
    known = [] if advantages is None else [float(value) for value in advantages]
    mean = sum(known) / len(known) if known else None
    return [
        *(step, rollout.env, rollout.group_id, rollout.example_id, rollout.agent),
        *(rollout.reward, dropped_by, rollout.num_turns, rollout.num_tokens),
        *(rollout.num_trainable_tokens, rollout.policy_version),
        *(mean, min(known, default=None), max(known, default=None)),
        credit_text(known),
        _cut(str(rollout.task.get("prompt", ""))),
        _cut(conversation(rollout)),
    ]


def credit_text(advantages: list[float]) -> str:
    """Advantages of the trainable tokens, run-length encoded: ``+0.250 x12, -0.100 x3``."""
    runs = [(value, len(list(group))) for value, group in groupby(advantages)]
    return _cut(", ".join(f"{value:+.3f} x{count}" for value, count in runs), MAX_CREDIT)


def conversation(rollout: Rollout) -> str:
    """The messages of the environment's trace. Empty for a rollout that was not sampled."""
    messages = getattr(rollout.trace, "messages", None) or ()
    lines = [f"[{message.role}] {message.content or ''}" for message in messages]
    return "\n".join(lines)


def _cut(text: str, length: int = MAX_TEXT) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
