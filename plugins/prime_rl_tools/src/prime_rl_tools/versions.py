"""What a run loads, with versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prime_rl import Observer
from prime_rl.entries import entries, leaving_out
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import Hooks, source_of

PACKAGES = (
    "prime-rl-core",
    "prime-rl-app",
    "torch",
    "transformers",
    "verifiers",
    "renderers",
    "numpy",
)
"""Distributions whose version may decide what a run does."""


class Versions(Observer):
    """Writes ``plugins.json`` at the start."""

    name = "loaded_versions"

    async def setup(self) -> None:
        """Write it."""
        run = self.host.shared.run
        write_versions(run.run_dir, run.hooks, run.config.plugins.disabled)


def write_versions(run_dir: Path, hooks: Hooks, disabled: Iterable[str] = ()) -> None:
    """Write ``plugins.json``: versions of Python, of packages, and of both sides' plugins. The
    trainer's are those that it will load, without importing them here."""
    plugins = [(source, hooks.group) for source in hooks.sources.values()]
    with leaving_out(disabled):
        plugins += [(source_of(entry), TRAINER_GROUP) for entry in entries(TRAINER_GROUP)]
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)

    versions = {
        "python": platform.python_version(),
        "packages": packages,
        "plugins": [{**asdict(source), "group": group} for source, group in plugins],
    }
    (run_dir / "plugins.json").write_text(json.dumps(versions, indent=2) + "\n", "utf-8")
