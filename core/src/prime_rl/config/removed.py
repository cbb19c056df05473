"""Keys that are gone, and what to write instead.

A config of an earlier version still loads: its resolved ``run.json`` has every key. A removed key
that has its old default is left out without a word, as nothing changes. Any other value is left out
with a ``FutureWarning``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Removed:
    """One key."""

    default: Any
    """Its old default, which the code has as a constant now."""
    instead: str
    """A sentence for the user."""


REMOVED: Mapping[str, Removed] = {
    "rollout_transport.hwm": Removed(
        default=4,
        instead="The orchestrator is at most 4 batches ahead of the trainer. To sample less far "
        "ahead, lower orchestrator.max_off_policy_steps.",
    ),
    "trainer.attention_flops": Removed(
        default=1e-4,
        instead="Ranks are balanced for the attention of a model of about 1B parameters. Nothing "
        "replaces it.",
    ),
}
"""By dotted key."""


def without_removed(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config's table without the keys that are gone."""
    whole = dict(table)
    for key, removed in REMOVED.items():
        place, _, name = key.rpartition(".")
        part = whole.get(place)
        if not isinstance(part, Mapping) or name not in part:
            continue
        whole[place] = {other: value for other, value in part.items() if other != name}
        if part[name] != removed.default:
            warnings.warn(
                f"{key} = {part[name]!r} is ignored: the key is gone. {removed.instead}",
                FutureWarning,
                stacklevel=2,
            )

    return whole
