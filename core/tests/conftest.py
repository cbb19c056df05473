"""Core is tested alone: its tests see no plugin but ``parts``, small ones of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from prime_rl.entries import DISABLE
from prime_rl.registry.components import installed_losses

PARTS = str(Path(__file__).parent / "parts")
CORE = {"prime-rl-core", "core-parts"}


@pytest.fixture(scope="session")
def other_distributions() -> str:
    """What ``--without`` has to name that nothing of ours is left but core and its parts."""
    groups = {each.name: {entry.group for entry in each.entry_points} for each in distributions()}
    ours = [
        name
        for name, found in groups.items()
        if name not in CORE and any(group.startswith("prime_rl") for group in found)
    ]
    return ",".join(sorted(ours))


@pytest.fixture(autouse=True)
def core_is_alone(other_distributions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in those that a test starts."""
    # Before another fixture changes sys.path: what monkeypatch finds first, it restores.
    monkeypatch.syspath_prepend(PARTS)
    monkeypatch.setenv(DISABLE, other_distributions)
    monkeypatch.setenv("PYTHONPATH", PARTS, prepend=os.pathsep)


@pytest.fixture(autouse=True, scope="module")
def losses_are_collected_anew() -> Iterator[None]:
    """A process that tests core and plugins keeps the losses of neither."""
    installed_losses.cache_clear()
    yield
    installed_losses.cache_clear()
