"""Fill in the templates and write the package.

A template is a file of ``templates/common`` or ``templates/<kind>``; ``@@name`` in it stands for a
field of ``Names``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from prime_rl.errors import ConfigError
from prime_rl_devkit.scaffold.names import KINDS, names_for


class _Template(Template):
    delimiter = "@@"


LAYOUT = {
    "pyproject.toml": "common/pyproject.toml.txt",
    "README.md": "{kind}/readme.md.txt",
    ".gitignore": "common/gitignore.txt",
    ".github/workflows/test.yml": "common/workflow.yml.txt",
    "src/@@module/__init__.py": "{kind}/module.py.txt",
    "src/@@module/py.typed": "",
    "tests/test_@@name.py": "{kind}/test.py.txt",
}
"""Every file of a package and its template; None: an empty file."""


@dataclass(frozen=True)
class Package:
    """The written package."""

    folder: Path
    name: str
    kind: str
    files: tuple[Path, ...]

    def next_commands(self) -> tuple[str, str, str]:
        """Commands that install, test and check it."""
        return (
            f"pip install -e {shlex.quote(f'{self.folder}[test]')}",
            f"pytest {shlex.quote(str(self.folder))}",
            f"prime-rl plugins check {self.name}",
        )


def write_package(name: str, kind: str, directory: Path | None = None) -> Package:
    """Write a package of one plugin into ``directory``; ``./prime-rl-NAME`` if left out.

    Raises ``ConfigError`` if the name is invalid or taken, or the folder is not empty.
    """
    names = names_for(name, kind)
    folder = directory or Path(names.distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty. Give a new folder with --directory.")
    fields = asdict(names) | {"kind": kind, "group": KINDS[kind]}
    written = []
    for path, text in _rendered(kind, fields):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return Package(folder, names.name, kind, tuple(written))


def _rendered(kind: str, fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    templates = files("prime_rl_devkit.scaffold") / "templates"
    for path, template in LAYOUT.items():
        text = (templates / template.format(kind=kind)).read_text() if template else ""
        yield _Template(path).substitute(fields), _Template(text).substitute(fields)
