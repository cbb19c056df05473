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
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl_devkit.scaffold.names import BOTH_SIDES, ENVIRONMENT, KINDS, Names, names_for


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
WITHOUT_A_RUN = {"engine", "head", "renderer", "command"}
"""Kinds that train only with more (a server, an algorithm, a model of that family), or never."""
COMMANDS = "prime_rl.commands"
"""Entry-point group of the plugins whose commands the help shows."""
PROOF = """
  # What the estimator is on average, exactly: a change of the verdict is a change of the algorithm.
  prove:
    runs-on: ubuntu-latest
    env:
      OMP_NUM_THREADS: "1"
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install -e ".[test]" "prime-rl-devkit[lab]"
      - run: prime-rl plugins prove {name} --group-size 2 --staleness 0 | tee proof.txt
      - run: grep -q "an unbiased estimate" proof.txt
"""
"""The job of ``plugins prove``, for a package with an algorithm whose credit needs no head."""
FLOORS = {"launcher": "prime-rl-app", "transport": "prime-rl-broadcast"}
"""What the modules of a kind import beside prime-rl-core, which it requires."""
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
    if trains_by_itself(kind):
        has_tables = kind not in ("wrapper", "command")
        blocks = [] if not has_tables else _TOML.findall(texts["README.md"])
        texts.setdefault("train.toml", _train_toml(names, blocks))
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        written.append(target)
    return Package(folder, names.name, kind=kind, files=tuple(written))


def trains_by_itself(kind: str) -> bool:
    """Whether a package of these kinds has a run of its own: ``train.toml``."""
    kinds = {*kind.split("+")}
    alone = WITHOUT_A_RUN - ({"head"} if "algorithm" in kinds else set())
    return not alone & kinds


def _train_toml(names: Names, blocks: list[str]) -> str:
    """A run of minutes with the tables of the README, which replace the template's own."""
    template = (files("prime_rl_devkit.scaffold") / "templates/common/train.toml.txt").read_text(
        "utf-8"
    )
    headings = {line for block in blocks for line in block.splitlines() if line.startswith("[")}
    base = _Template(template).substitute(asdict(names)).rstrip().split("\n\n")
    kept = [table for table in base if table.partition("\n")[0] not in headings]
    return "\n\n".join([*kept, *(block.rstrip() for block in blocks)]) + "\n"


def _files(names: Names, kind: str) -> Iterator[tuple[str, str]]:
    """Path and text of every file."""
    fields = asdict(names) | {"kind": kind, "verifiers_range": VERIFIERS, "losses": ""}
    fields |= {"checked": _checked(names.name, kind), "points": _entry_points(names, kind)}
    kinds = kind.split("+")
    credited_by_head = {"algorithm", "head"} <= {*kinds}
    policy_loss = names.name if "loss" in kinds else "rl"
    fields["head_losses"] = f'("{policy_loss}", "{names.name}_loss")'
    proves = "algorithm" in kinds and not credited_by_head
    fields["proof"] = PROOF.format(name=names.name) if proves else ""
    floors = [FLOORS[each] for each in kinds if each in FLOORS] or ["prime-rl-core"]
    fields["floor"] = '",\n    "'.join(floors)
    if "+" not in kind:
        yield from _rendered(kind, fields)
        return
    readmes = []
    for each in kind.split("+"):
        module_fields = fields | {"module": f"{names.module}.{each}"}
        if (each, "loss" in kind.split("+")) == ("algorithm", True):
            module_fields["losses"] = f'\n    losses = ("{names.name}",)'
        folder_of = "algorithm_head" if each == "algorithm" and credited_by_head else each
        rendered = dict(_rendered(folder_of, module_fields))
        folder = f"src/{module_fields['module']}"
        test = f"tests/test_{names.name}.py"
        yield f"src/{names.module}/{each}.py", rendered[f"{folder}/__init__.py"]
        yield f"tests/test_{names.name}_{each}.py", rendered[test]
        readme = rendered["README.md"].replace(
            f"{folder}/__init__.py", f"src/{names.module}/{each}.py"
        )
        readmes.append(readme.replace(f"# {names.distribution}\n", f"# The {each}\n"))
    first = dict(_rendered(kinds[0], fields))
    first |= {"README.md": f"# {names.distribution}\n\n" + "\n".join(f"#{r}" for r in readmes)}
    first[f"src/{names.module}/__init__.py"] = f'"""The plugins of {names.distribution}."""\n'
    del first[f"tests/test_{names.name}.py"]
    yield from first.items()


def _entry_points(names: Names, kind: str) -> str:
    """The tables of ``pyproject.toml``. In each group, the first plugin has the package's name."""
    groups: dict[str, list[str]] = {}
    for each in () if kind == ENVIRONMENT else kind.split("+"):
        module = f"{names.module}.{each}" if "+" in kind else names.module
        of_kind = [KINDS[each]] + ([TRAINER_GROUP] if each in BOTH_SIDES else [])
        for group in of_kind:
            lines = groups.setdefault(group, [])
            lines.append(f'{f"{names.name}_{each}" if lines else names.name} = "{module}"')
    if "command" in kind.split("+"):  # the help loads these plugins only
        module = f"{names.module}.command" if "+" in kind else names.module
        groups[COMMANDS] = [f'{names.name} = "{module}"']
    tables = [[f'[project.entry-points."{group}"]', *lines] for group, lines in groups.items()]
    return "\n\n".join("\n".join(table) for table in tables)


def _rendered(kind: str, fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    templates = files("prime_rl_devkit.scaffold") / "templates"
    for path, template in (ENVIRONMENT_LAYOUT if kind == ENVIRONMENT else LAYOUT).items():
        text = (templates / template.format(kind=kind)).read_text("utf-8") if template else ""
        yield _Template(path).substitute(fields), _Template(text).substitute(fields)
