"""One version for all distributions.

    python -m tools.version 0.2.0

writes it, and the bounds of the requirements between them, into every ``pyproject.toml`` and into
the pages that show them. Without a version it names the files that differ from the root's, and the
exit code is 1 if there are any.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACT = "contract"
"""The folder of prime-rl-contract, whose version is that of the contract."""


def pyprojects(root: Path = ROOT) -> list[Path]:
    """The root's, which has the version, and then the others that share it."""
    found = [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")),
             *sorted(root.glob("plugins/*/pyproject.toml"))]  # fmt: skip
    return [path for path in found if path.parent.name != CONTRACT]


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may name the version or a requirement on one of our distributions."""
    return [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("docs/examples/*/*.toml"),
            *root.glob("*/README.md"), *root.glob("plugins/*/README.md")]  # fmt: skip


def with_version(text: str, version: str) -> str:
    """A ``pyproject.toml`` with another version, and our own requirements bound to its minor."""
    text = re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    return with_bounds(text, version)


def with_bounds(text: str, version: str) -> str:
    """A text with our own requirements bound to the minor of a version, and with the version that
    the README says it has."""
    major, minor = version.split(".")[:2]
    bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
    text = re.sub(r"^(\*\*State\.\*\* Version )\d[\w.]*\w", rf"\g<1>{version}", text, flags=re.M)
    return re.sub(
        r"(prime-rl(?!-contract)[\w-]*(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+", rf"\1{bounds}", text
    )


def changed(version: str) -> dict[Path, str]:
    """The new text of each file that does not have the version."""
    texts = {path: with_version(path.read_text("utf-8"), version) for path in pyprojects()}
    for path in pages():
        if path.name != "CHANGELOG.md":
            texts[path] = with_bounds(path.read_text("utf-8"), version)
    return {path: text for path, text in texts.items() if text != path.read_text("utf-8")}


def main(arguments: list[str]) -> int:
    """Write or compare. Returns the exit code."""
    version = arguments[0] if arguments else tomllib.loads(
        (ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]  # fmt: skip
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", version):
        print(f"{version!r} is no version like 0.2.0 or 0.2.0rc1", file=sys.stderr)
        return 2
    wrong = changed(version)
    for path, text in wrong.items():
        if arguments:
            path.write_text(text, "utf-8")
        print(f"{'wrote' if arguments else 'differs:'} {path.relative_to(ROOT)}")
    return 0 if arguments else bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
