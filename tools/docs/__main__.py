"""``python -m tools.docs [--check] [--estimators] [DIRECTORY]``: write the pages, or check them.

``--estimators``: also the proofs of all algorithms, which take half a minute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.docs.api_page import api_page
from tools.docs.config_page import config_page
from tools.docs.estimators_page import estimators_page
from tools.docs.figures import PAGES, ROOT, filled
from tools.docs.hooks_page import hooks_page
from tools.docs.index_page import index_page
from tools.docs.packages_page import packages_page


def pages(estimators: bool = False) -> dict[str, str]:
    """Every generated page by file name."""
    if estimators:
        return pages() | {"estimators.md": estimators_page()}
    return {
        "hooks.md": hooks_page(),
        "config.md": config_page(),
        "api.md": api_page(),
        "packages.md": packages_page(),
        "index-of-plugins.md": index_page(),
    }


def outdated(directory: Path, estimators: bool = False) -> list[str]:
    """Names of the pages in ``directory`` that are missing or differ from the code. With the docs
    of this repository, also of the pages whose figures differ from the records."""

    def differs(name: str, text: str) -> bool:
        path = directory / name
        return not path.exists() or path.read_text("utf-8") != text

    differing = [name for name, text in pages(estimators).items() if differs(name, text)]
    if directory.resolve() == ROOT / "docs":
        texts = {page.name: page.read_text("utf-8") for page in PAGES}
        differing += [name for name, text in texts.items() if filled(text) != text]
    return differing


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them and print the command that updates them."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("--estimators", action="store_true", help="also estimators.md")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    if options.check:
        names = outdated(directory, options.estimators)
        for name in names:
            fix = f"Run: python -m tools.docs --estimators {directory}"
            print(f"{directory / name} differs from the code. {fix}", file=sys.stderr)
        return 1 if names else 0
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages(options.estimators).items():
        (directory / name).write_text(text, "utf-8")
    if directory.resolve() == ROOT / "docs":
        for page in PAGES:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
