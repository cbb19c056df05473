"""The index of packages that extend prime-rl: ``index.toml``, to which third parties add."""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_rl.errors import ConfigError
from prime_rl.registry.offers import KINDS
from prime_rl_devkit.facts import installed


class IndexedPackage(BaseModel):
    """One package of the index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distribution: Annotated[str, Field(pattern=r"^[a-z0-9]+([-._][a-z0-9]+)*$")]
    """What pip installs."""
    summary: Annotated[str, Field(min_length=10, max_length=200)]
    """What it is, in a sentence."""
    source: Annotated[str, Field(min_length=1)]
    """The address of its source; of our own, the folder."""
    contract: Annotated[str, Field(pattern=r"^>=\d+,<\d+$")]
    """The contracts that it requires."""
    offers: Annotated[tuple[str, ...], Field(min_length=1)]
    """What it offers, each as ``kind.name``."""

    @property
    def is_ours(self) -> bool:
        """Whether this repository has it."""
        return not self.source.startswith("https://")

    @property
    def installed(self) -> str:
        """The installed version; empty if it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    @property
    def text(self) -> str:
        """What a search looks at."""
        return f"{self.distribution} {self.summary} {' '.join(self.offers)}".lower()


def read_index(text: str | None = None) -> list[IndexedPackage]:
    """The packages that ``text`` lists, by name. None: those of the index that ships. Raises
    ``ConfigError`` with the table that is wrong."""
    content = text
    if content is None:
        content = (files("prime_rl_devkit") / "index.toml").read_text("utf-8")
    try:
        tables = tomllib.loads(content).get("plugin", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"index.toml: {error}") from error

    packages: dict[str, IndexedPackage] = {}
    kinds = {kind.name for kind in KINDS} | {"command", "environment", "harness", "wrapper"}
    for number, table in enumerate(tables):
        name = table.get("distribution", f"plugin.{number}")
        try:
            package = IndexedPackage.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"index.toml: {name}: {key}: {first['msg']}") from error
        if name in packages:
            raise ConfigError(f"index.toml: {name} has two tables. Leave one.")
        for offer in package.offers:
            kind, dot, offered = offer.partition(".")
            if kind not in kinds or not dot or not offered:
                expected = ", ".join(sorted(kinds))
                raise ConfigError(
                    f"index.toml: {name}: offers has {offer!r}, expected KIND.NAME with one of the "
                    f"kinds {expected}"
                )
        packages[name] = package
    return [packages[name] for name in sorted(packages)]


def search(words: Sequence[str]) -> list[IndexedPackage]:
    """The packages with every word in their name, summary or offers, or, if they are installed, in
    what their offers say of themselves; all without words. Raises ``ConfigError`` if there is none,
    with words that are near."""
    packages = read_index()
    if not words:
        return packages

    said = descriptions()
    texts = {each.distribution: each.text + said[each.distribution] for each in packages}
    wanted = [word.lower() for word in words]
    matching = [p for p in packages if all(word in texts[p.distribution] for word in wanted)]
    if not matching:
        known = sorted({part for text in texts.values() for part in re.findall(r"[\w-]+", text)})
        close = [n for word in wanted for n in difflib.get_close_matches(word, known, n=1)]
        hint = f"Did you mean {' '.join(close)!r}?" if close else "Try fewer words."
        raise ConfigError(f"plugins search: no package matches {' '.join(words)!r}. {hint}")
    return matching


def descriptions() -> dict[str, str]:
    """What the installed offers say of themselves, by distribution."""
    texts: dict[str, str] = defaultdict(str)
    for plugin in installed():
        for _, offered in plugin.offers:
            texts[plugin.source.distribution] += f" {inspect.getdoc(offered.cls) or ''}".lower()
    return texts
