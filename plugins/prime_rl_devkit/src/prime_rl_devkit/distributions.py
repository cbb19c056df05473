"""What is installed, by the metadata of the distributions: no plugin is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from prime_rl.entries import entries, fault_of_form, installed_entries, misspelt_groups
from prime_rl.registry.manager import GROUPS, core_misfit

KNOWN = "prime_rl.known"
"""Entry-point group of what an index says: ``"algorithm.grpo" = "prime_rl_grpo"``."""
KEY = "key"
"""The kind of a key of the TOML that a plugin reads; it is no offer."""


@dataclass
class Distribution:
    """An installed distribution that brings plugins."""

    name: str
    version: str
    summary: str
    plugins: list[str] = field(default_factory=list)
    """Names of its entry points."""
    offers: dict[str, list[str]] = field(default_factory=dict)
    """Names by kind, as an index declares them; empty without a declaration."""
    error: str | None = None
    """Why it cannot work: it requires another version of core, its plugin's name is taken, or a
    group of its entry points is misspelt."""


def distributions() -> list[Distribution]:
    """Every distribution with plugins, in name order, except those that are disabled."""
    by_place: dict[Any, Distribution] = {}
    for group in GROUPS:
        first: dict[str, Distribution] = {}
        for entry in entries(group):
            # Reading the metadata takes longer than all else here, so once per distribution.
            place = getattr(entry.dist, "_path", entry.dist)
            if place not in by_place:
                by_place[place] = _read(entry)
            distribution = by_place[place]
            if entry.name not in distribution.plugins:
                distribution.plugins.append(entry.name)

            distribution.error = distribution.error or fault_of_form(entry)
            other = first.setdefault(entry.name, distribution)
            if other is not distribution:
                distribution.error = (
                    f"{other.name} brings a plugin {entry.name!r} too. Uninstall one, or list "
                    f"{distribution.name!r} under plugins.disabled."
                )

    for misspelt in misspelt_groups():
        entry = misspelt.entries[0]
        place = getattr(entry.dist, "_path", entry.dist)
        if place not in by_place:
            by_place[place] = _read(entry)
        by_place[place].error = str(misspelt)

    rows = sorted(by_place.values(), key=lambda each: each.name)
    by_package = {each.name.replace("-", "_"): each for each in rows}
    for entry in installed_entries(KNOWN):
        kind, _, name = entry.name.partition(".")
        bringer = by_package.get(entry.value)
        if bringer is not None and kind != KEY:
            plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
            names = bringer.offers.setdefault(plural, [])
            name = name.replace("plugins.", "plugins ")
            # Several distributions may declare one offer: `prime-rl` and `prime-rl-app` do.
            if name not in names:
                names.append(name)

    return rows


def _read(entry: EntryPoint) -> Distribution:
    if entry.dist is None:
        return Distribution(name="unknown distribution", version="", summary="")
    metadata = entry.dist.metadata
    return Distribution(
        name=metadata["Name"],
        version=metadata["Version"],
        summary=metadata["Summary"] or "",
        error=core_misfit(metadata.get_all("Requires-Dist") or []) or None,
    )
