"""Who made a run: ``plugins.json``, the versions of core, of every plugin that was loaded, and of
what they stand on."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.manager import Hooks, installed_entries

PACKAGES = ("prime-rl-core", "torch", "transformers", "verifiers", "renderers", "numpy")
"""Distributions whose version may decide what a run does."""


def write_versions(run_dir: Path, hooks: Hooks, disabled: Collection[str] = ()) -> None:
    """Write ``plugins.json`` into the run directory."""
    text = json.dumps(versions(hooks, disabled), indent=2)
    (run_dir / "plugins.json").write_text(text + "\n")


def versions(hooks: Hooks, disabled: Collection[str] = ()) -> dict[str, Any]:
    """Versions of Python, of packages, and of both sides' plugins; the trainer's are those it will
    load, without importing them here."""
    rows = [_row(s.plugin, s.distribution, s.version, hooks.group) for s in hooks.sources.values()]
    return {
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "plugins": [*rows, *_of_the_trainer(disabled)],
    }


def _of_the_trainer(disabled: Collection[str]) -> Iterator[dict[str, str]]:
    for entry in sorted(installed_entries(TRAINER_GROUP), key=lambda entry: entry.name):
        if entry.name not in disabled:
            name, found = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
            yield _row(entry.name, name, found, TRAINER_GROUP)


def _row(plugin: str, distribution: str, version: str, group: str) -> dict[str, str]:
    return {
        "plugin": plugin,
        "distribution": distribution,
        "version": version,
        "group": group,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
