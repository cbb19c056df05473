"""Fill in the templates and write the package.

A template is a file of ``templates/common`` or ``templates/<kind>``; ``@@name`` in it stands for a
field of ``Names``. A package of several kinds has a module and a test file for each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from prime_rl.errors import ConfigError
from prime_rl_devkit.scaffold.names import ENVIRONMENT, KINDS, Names, names_for


class _Template(Template):
    delimiter = "@@"


_TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)

LAYOUT = {
    "pyproject.toml": "common/pyproject.toml.txt",
    "README.md": "{kind}/readme.md.txt",
    ".gitignore": "common/gitignore.txt",
    ".github/workflows/test.yml": "common/workflow.yml.txt",
    "src/@@module/__init__.py": "{kind}/module.py.txt",
    "src/@@module/py.typed": "",
    "tests/test_@@name.py": "{kind}/test.py.txt",
}
"""Every file of a package and its template; empty: an empty file."""

ENVIRONMENT_LAYOUT = LAYOUT | {
    "pyproject.toml": "{kind}/pyproject.toml.txt",
    ".github/workflows/test.yml": "{kind}/workflow.yml.txt",
    "train.toml": "{kind}/train.toml.txt",
}
WITHOUT_A_RUN = {"engine", "head", "renderer"}
"""Kinds that train only with more: a server, an algorithm, a model of that family."""
VERIFIERS = ">=0.4"
"""The versions of verifiers that have the API of the template."""


@dataclass(frozen=True)
class Package:
    """The written package."""

    folder: Path
    name: str
    kind: str
    files: tuple[Path, ...]

    def next_commands(self) -> Iterator[str]:
        """Commands that install, test and check it, and train with it."""
        yield f"pip install -e {shlex.quote(f'{self.folder}[test]')}"
        yield f"pytest {shlex.quote(str(self.folder))}"
        if self.kind != ENVIRONMENT:
            yield f"prime-rl plugins check {_checked(self.name, self.kind)}"
        if (config := self.folder / "train.toml") in self.files:
            yield f"prime-rl run {shlex.quote(str(config))}"


def _checked(name: str, kind: str) -> str:
    """What to give ``plugins check``: the plugin, or the distribution of several."""
    return f"prime-rl-{name.replace('_', '-')}" if "+" in kind else name


def write_package(name: str, kind: str, directory: Path | None = None) -> Package:
    """Write a package into ``directory``; ``./prime-rl-NAME`` if left out. ``kind`` may be several:
    ``algorithm+loss``.

    Raises ``ConfigError`` if the name is invalid or taken, or the folder is not empty.
    """
    names = names_for(name, kind)
    folder = directory or Path(names.distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty. Give a new folder with --directory.")
    written = []
    texts = dict(_files(names, kind))
    if not WITHOUT_A_RUN & {*kind.split("+")}:
        blocks = [] if kind == "wrapper" else _TOML.findall(texts["README.md"])
        texts.setdefault("train.toml", _train_toml(names, blocks))
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return Package(folder, names.name, kind, tuple(written))


def _train_toml(names: Names, blocks: list[str]) -> str:
    """A run of minutes with the tables of the README, which replace the template's own."""
    template = (files("prime_rl_devkit.scaffold") / "templates/common/train.toml.txt").read_text(
        "utf-8"
    )
    own = {line for block in blocks for line in block.splitlines() if line.startswith("[")}
    base = _Template(template).substitute(asdict(names)).rstrip().split("\n\n")
    kept = [table for table in base if table.partition("\n")[0] not in own]
    return "\n\n".join([*kept, *(block.rstrip() for block in blocks)]) + "\n"


def _files(names: Names, kind: str) -> Iterator[tuple[str, str]]:
    """Path and text of every file."""
    fields = asdict(names) | {"kind": kind, "verifiers_range": VERIFIERS, "losses": ""}
    fields |= {"checked": _checked(names.name, kind), "points": _entry_points(names, kind)}
    floor = "prime-rl-app" if "launcher" in kind.split("+") else "prime-rl-core"
    fields["floor"] = floor  # what its modules import; a launcher builds on that of the application
    if "+" not in kind:
        yield from _rendered(kind, fields)
        return
    readmes = []
    for each in kind.split("+"):
        own = fields | {"module": f"{names.module}.{each}"}
        if (each, "loss" in kind.split("+")) == ("algorithm", True):
            own["losses"] = f'\n    losses = ("{names.name}",)'
        found = dict(_rendered(each, own))
        folder, test = f"src/{own['module']}", f"tests/test_{names.name}.py"
        yield f"src/{names.module}/{each}.py", found[f"{folder}/__init__.py"]
        yield f"tests/test_{names.name}_{each}.py", found[test]
        readme = found["README.md"].replace(
            f"{folder}/__init__.py", f"src/{names.module}/{each}.py"
        )
        readmes.append(readme.replace(f"# {names.distribution}\n", f"# The {each}\n"))
    first = dict(_rendered(kind.split("+")[0], fields))
    first |= {"README.md": f"# {names.distribution}\n\n" + "\n".join(f"#{r}" for r in readmes)}
    first[f"src/{names.module}/__init__.py"] = f'"""The plugins of {names.distribution}."""\n'
    del first[f"tests/test_{names.name}.py"]
    yield from first.items()


def _entry_points(names: Names, kind: str) -> str:
    """The tables of ``pyproject.toml``. In each group, the first plugin has the package's name."""
    groups: dict[str, list[str]] = {}
    for each in () if kind == ENVIRONMENT else kind.split("+"):
        lines = groups.setdefault(KINDS[each], [])
        module = f"{names.module}.{each}" if "+" in kind else names.module
        lines.append(f'{f"{names.name}_{each}" if lines else names.name} = "{module}"')
    tables = [[f'[project.entry-points."{group}"]', *lines] for group, lines in groups.items()]
    return "\n\n".join("\n".join(table) for table in tables)


def _rendered(kind: str, fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    templates = files("prime_rl_devkit.scaffold") / "templates"
    for path, template in (ENVIRONMENT_LAYOUT if kind == ENVIRONMENT else LAYOUT).items():
        text = (templates / template.format(kind=kind)).read_text("utf-8") if template else ""
        yield _Template(path).substitute(fields), _Template(text).substitute(fields)
