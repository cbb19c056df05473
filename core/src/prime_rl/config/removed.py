"""Keys that are gone, of core's tables and of plugins': ``Removed`` says what happens to them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from prime_rl.config.base import Removed
from prime_rl.errors import ConfigWarning

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
    "trainer.lm_head_block": Removed(
        default=None,
        instead="The kernel knows the best number for the device. Nothing replaces it.",
    ),
    "orchestrator.weights_timeout": Removed(
        default=1200.0,
        instead="Write that.",
        moved_to="observers.watchdog.timeout",
    ),
    "orchestrator.buffer": Removed(
        default=None,
        instead="Write that.",
        moved_to="orchestrator.sampler",
        selected_by="buffer_sampler",
    ),
}
"""By dotted key."""


def without_removed(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config's table without the keys that are gone."""
    whole = dict(table)
    for key, removed in REMOVED.items():
        place, _, name = key.rpartition(".")
        part = whole.get(place)
        gone = {name, removed.selected_by}
        if not isinstance(part, Mapping) or gone.isdisjoint(part):
            continue

        whole[place] = {other: kept for other, kept in part.items() if other not in gone}

        value = part.get(name, removed.default)
        if isinstance(value, Mapping) and removed.selected_by in part:
            value = {"type": part[removed.selected_by], **value}

        if value == removed.default:
            continue
        if removed.moved_to is None:
            _say(key, value, f"is ignored: the key is gone. {removed.instead}")
        elif _is_set(whole, removed.moved_to):
            _say(key, value, f"is ignored: the key is gone, and {removed.moved_to} is set.")
        else:
            whole = _with(whole, removed.moved_to.split("."), value)
            _say(key, value, f"is read as {removed.moved_to}. {removed.instead}")

    return whole


def without_removed_settings(
    settings: Mapping[str, Any], removed: Mapping[str, Removed], where: str
) -> dict[str, Any]:
    """The settings of a plugin, of the table ``where``, without the keys that are gone."""
    for key in settings.keys() & removed.keys():
        value = settings[key]
        if value != removed[key].default:
            reason = f"is ignored: the key is gone. {removed[key].instead}"
            _say(f"{where}.{key}", value, reason)

    return {key: value for key, value in settings.items() if key not in removed}


def _is_set(table: Mapping[str, Any], key: str) -> bool:
    value: Any = table
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value not in (None, {}, {"type": ""})  # the last is a table that selects nothing


def _with(table: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The table with a value at ``path``. Tables that are in the way of it are made."""
    name, *rest = path
    below = table.get(name)
    if rest:
        value = _with(below if isinstance(below, Mapping) else {}, rest, value)
    return {**table, name: value}


def _say(key: str, value: Any, what: str) -> None:
    warnings.warn(f"{key} = {value!r} {what}", ConfigWarning, stacklevel=4)
