"""Differences between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError
from prime_rl.plugins.offers import TUNING, settings_of
from prime_rl.plugins.tuning import Tuning
from prime_rl.rundir.checkpoints import Checkpoint

NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a model's ``config.json`` that do not affect its weights."""


def version_drift(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line per distribution whose version has changed."""
    return [f"plugin {line}" for line in _changes(before, now, "not installed", str)]


def config_drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per key whose value has changed."""
    flat = dict(_leaves(before)), dict(_leaves(now))
    return _changes(*flat, "absent", partial(json.dumps, default=str))


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Any], absent: str, show: Callable[[Any], str]
) -> list[str]:
    def shown(side: Mapping[str, Any], key: str) -> str:
        return show(side[key]) if key in side else absent

    return [
        f"{key}: {shown(before, key)} then, {shown(now, key)} now"
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or before[key] != now[key]
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, also of the tables in a list."""
    if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield path, list(value) if isinstance(value, tuple) else value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def check_model(before: Mapping[str, Any], now: Mapping[str, Any], weights: Path) -> None:
    """Refuse a model that differs from the checkpoint's ``weights``.

    ``before`` and ``now`` are the ``[model]`` tables. Raises ``ConfigError`` if the new model has
    another architecture, or cannot be compared because it is not a folder.
    """
    changed = config_drift(before, now)
    ours = _model_config(Path(str(now.get("name")))) if changed else {}
    if ours is None:
        raise ConfigError(
            f"--resume: [model] has changed ({'; '.join(changed)}) and the policy is the "
            "checkpoint's. Set it back, or start a new run."
        )
    if changed and (different := config_drift(_model_config(weights) or {}, ours)):
        raise ConfigError(
            f"--resume: the checkpoint's weights cannot be those of model {now.get('name')!r}: "
            f"{'; '.join(different[:5])}. Name the model that the checkpoint is of."
        )


def check_tuning(before: Mapping[str, Any], tuning: Tuning | None, checkpoint: Checkpoint) -> None:
    """Refuse an adapter that differs from the checkpoint's: its weights fit no other one.

    ``before`` is the checkpoint's whole config. Raises ``ConfigError`` if the table that selects
    the ``tuning`` has changed.
    """
    table = None if tuning is None else before.get("trainer", {}).get(tuning.name)
    changed: list[str] = []
    if tuning is None:
        changed = ["an adapter then, all weights now"] if checkpoint.is_adapter else []
    elif table is None:
        changed = [f"all weights then, an adapter now: [trainer.{tuning.name}]"]
    else:
        key = f"trainer.{tuning.name}"
        theirs = settings_of(type(tuning), TUNING, table, f"--resume: {key} then")
        sides = ({key: each.model_dump(mode="json")} for each in (theirs, tuning.config))
        changed = config_drift(*sides)
    if changed:
        raise ConfigError(
            f"--resume: what trains has changed ({'; '.join(changed)}). Set it back, or start a "
            "new run from the model that this one exported."
        )


def check_optimizer(
    before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Refuse an optimizer whose state the checkpoint does not contain.

    ``before`` and ``now`` are whole configs. Raises ``ConfigError`` if the optimizer differs or has
    gained a momentum. ``sign_sgd`` needs no state, and a momentum may be dropped.
    """
    theirs, ours = (_kind(config.get("trainer", {}).get("optim", {})) for config in (before, now))
    given_up = (theirs, ours) == ("sgd with momentum", "sgd")
    if theirs != ours != "sign_sgd" and not given_up:
        whole = not checkpoint.is_adapter
        way = f' from its weights: model.name = "{checkpoint.weights}"' if whole else ""
        raise ConfigError(
            f"--resume: the checkpoint has the state of {theirs}, and [trainer.optim] says {ours}. "
            f"Set it back, or start a new run{way}."
        )


def _kind(optim: Mapping[str, Any]) -> str:
    kind = str(optim.get("type", "adamw"))
    return "sgd with momentum" if kind == "sgd" and optim.get("momentum") else kind


def _model_config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return {name: value for name, value in config.items() if name not in NOT_THE_MODEL}
