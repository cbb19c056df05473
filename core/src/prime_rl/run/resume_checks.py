"""Differences between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError

NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a model's ``config.json`` that do not affect its weights."""


def version_drift(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line per distribution whose version has changed."""
    return [
        f"plugin {name}: {before.get(name, 'not installed')} then, "
        f"{now.get(name, 'not installed')} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def config_drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per key whose value has changed."""
    flat_before, flat_now = dict(_leaves(before)), dict(_leaves(now))
    missing = object()
    return [
        f"{key}: {_shown(flat_before, key)} then, {_shown(flat_now, key)} now"
        for key in sorted(flat_before.keys() | flat_now.keys())
        if flat_before.get(key, missing) != flat_now.get(key, missing)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        items = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        items = [(str(number), part) for number, part in enumerate(value)]
    else:
        yield path, list(value) if isinstance(value, tuple) else value
        return
    for name, part in items:
        yield from _leaves(part, f"{path}.{name}" if path else name)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "absent"


def check_model(before: Mapping[str, Any], now: Mapping[str, Any], weights: Path) -> None:
    """Refuse a model that differs from the checkpoint's ``weights``.

    ``before`` and ``now`` are the ``[model]`` tables. Raises ``ConfigError`` if the new model has
    another architecture, or cannot be compared because it is not a folder.
    """
    changed = config_drift(before, now)
    if not changed:
        return
    theirs = _model_config(weights)
    ours = _model_config(Path(str(now.get("name"))))
    if ours is None:
        raise ConfigError(
            f"--resume: [model] has changed ({'; '.join(changed)}) and the policy is the "
            "checkpoint's. Set it back, or start a new run."
        )
    different = config_drift(theirs or {}, ours)
    if different:
        raise ConfigError(
            f"--resume: the checkpoint's weights cannot be those of model {now.get('name')!r}: "
            f"{'; '.join(different[:5])}. Name the model that the checkpoint is of."
        )


def check_lora(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse an adapter that differs from the checkpoint's: its matrices fit no other one.

    ``before`` and ``now`` are whole configs. Raises ``ConfigError`` if ``[trainer.lora]`` has
    changed.
    """
    theirs, ours = (config.get("trainer", {}).get("lora") for config in (before, now))
    if (theirs is None) != (ours is None):
        kinds = ["all weights" if table is None else "an adapter" for table in (theirs, ours)]
        changed = [f"{kinds[0]} then, {kinds[1]} now: [trainer.lora]"]
    else:
        changed = config_drift({"trainer.lora": theirs}, {"trainer.lora": ours})
    if changed:
        raise ConfigError(
            f"--resume: what trains has changed ({'; '.join(changed)}). Set it back, or start a "
            "new run from the model that this one exported."
        )


def check_optimizer(before: Mapping[str, Any], now: Mapping[str, Any], weights: Path) -> None:
    """Refuse an optimizer whose state the checkpoint does not contain.

    ``before`` and ``now`` are whole configs. Raises ``ConfigError`` if the optimizer differs or has
    gained a momentum. ``sign_sgd`` needs no state, and a momentum may be dropped.
    """
    theirs, ours = (_kind(config.get("trainer", {}).get("optim", {})) for config in (before, now))
    given_up = (theirs, ours) == ("sgd with momentum", "sgd")
    if theirs != ours != "sign_sgd" and not given_up:
        is_whole = before.get("trainer", {}).get("lora") is None  # else weights is an adapter
        way = f' from its weights: model.name = "{weights}"' if is_whole else ""
        raise ConfigError(
            f"--resume: the checkpoint has the state of {theirs}, and [trainer.optim] says {ours}. "
            f"Set it back, or start a new run{way}."
        )


def _kind(optim: Mapping[str, Any]) -> str:
    """The kind of optimizer state."""
    kind = str(optim.get("type", "adamw"))
    return "sgd with momentum" if kind == "sgd" and optim.get("momentum") else kind


def _model_config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return {name: value for name, value in config.items() if name not in NOT_THE_MODEL}
