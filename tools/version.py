"""One version for all distributions.

    python -m tools.version 0.2.0

writes it, and the bounds of the requirements between them, into every ``pyproject.toml``. Without a
version it names the files that differ from the root's, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pyprojects(root: Path = ROOT) -> list[Path]:
    """The root's, which has the version, and then the others."""
    return [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")),
            *sorted(root.glob("plugins/*/pyproject.toml"))]  # fmt: skip


def with_version(text: str, version: str) -> str:
    """A ``pyproject.toml`` with another version, and our own requirements bound to its minor."""
    major, minor = version.split(".")[:2]
    text = re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
    return re.sub(r"(prime-rl[\w-]*(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+", rf"\1{bounds}", text)


def main(arguments: list[str]) -> int:
    """Write or compare. Returns the exit code."""
    version = arguments[0] if arguments else tomllib.loads(
        (ROOT / "pyproject.toml").read_text())["project"]["version"]  # fmt: skip
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", version):
        print(f"{version!r} is no version like 0.2.0 or 0.2.0rc1", file=sys.stderr)
        return 2
    wrong = [p for p in pyprojects() if with_version(p.read_text(), version) != p.read_text()]
    for path in wrong:
        if arguments:
            path.write_text(with_version(path.read_text(), version))
        print(f"{'wrote' if arguments else 'differs:'} {path.relative_to(ROOT)}")
    return 0 if arguments else bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
