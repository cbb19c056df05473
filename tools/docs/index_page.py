"""``docs/index-of-plugins.md``: the packages of ``index.toml``."""

from __future__ import annotations

from tools.docs.markdown import GENERATED, table

from prime_rl_devkit.index import IndexedPackage, read_index

SOURCE = "plugins/prime_rl_devkit/src/prime_rl_devkit/index.toml"


def index_page() -> str:
    """The whole page."""
    packages = read_index()
    ours = [each for each in packages if each.is_ours]
    others = [each for each in packages if not each.is_ours]
    parts = [
        "# Index of plugins",
        GENERATED.format(source=f"`{SOURCE}`").replace("Edit the docstrings there", "Edit that"),
        "Packages that extend prime-rl. `prime-rl plugins search WORD` finds them in a terminal; "
        "`pip install NAME` adds one, and nothing else changes.",
        f"To add yours, add a table to `{SOURCE}` and open a pull request. A test checks that the "
        "table is complete. Nothing verifies what an author says of a package, so read its source: "
        "a plugin runs with your rights.",
        "## By others",
        _table(others) if others else "None yet.",
        "## Of this repository",
        _table(ours),
    ]
    return "\n\n".join(parts) + "\n"


def _parted(offer: str) -> tuple[str, str, str]:
    kind, dot, name = offer.partition(".")
    return kind.replace("_", " "), dot, name


def _table(packages: list[IndexedPackage]) -> str:
    rows = [
        [
            f"`{each.distribution}`" if each.is_ours else f"[`{each.distribution}`]({each.source})",
            each.summary.replace("|", "\\|"),
            ", ".join(f"{kind} `{name}`" for kind, _, name in map(_parted, each.offers)),
            f"`{each.contract}`",
        ]
        for each in packages
    ]
    return table(["package", "what it is", "offers", "contract"], rows)
