"""The imports of this repository's files, read from the source."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/prime_rl"
APPLICATION = ROOT / "app/src/prime_rl_app"
PLUGINS = sorted([*(ROOT / "plugins").glob("prime_rl_*"), *ROOT.glob("prime_rl_*")])
PLUGINS = [folder for folder in PLUGINS if (folder / "pyproject.toml").exists()]

MODULES_OF = {"prime-rl-core": "prime_rl", "pyzmq": "zmq", "ipython": "IPython", "pyyaml": "yaml"}
"""Import name of a distribution where it is not its own name with underscores."""


@dataclass(frozen=True)
class Import:
    """One imported module. ``from a.b import c`` is ``a.b.c`` where that is one, else ``a.b``."""

    module: str
    file: Path
    line: int
    typing_only: bool
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"

    def inside(self, *packages: str) -> bool:
        return any(self.module == each or self.module.startswith(f"{each}.") for each in packages)


@cache
def imports(file: Path) -> tuple[Import, ...]:
    """Every import of a file, at any depth."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        for module, names in _imported(node, file):
            found.append(Import(module, file, node.lineno, id(node) in typing_only, names))  # type: ignore[attr-defined]
    return tuple(found)


def _imported(node: ast.AST, file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file}:{node.lineno}: relative import"
        module = node.module or ""
        names = tuple(alias.name for alias in node.names)
        submodules = [n for n in names if _is_our_module(f"{module}.{n}")]
        for name in submodules:
            yield f"{module}.{name}", ()
        if rest := tuple(name for name in names if name not in submodules):
            yield module, rest
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "importorskip")
    ):
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant):
                yield str(argument.value), ()


def _is_our_module(name: str) -> bool:
    paths = [floor.parent / name.replace(".", "/") for floor in (CORE, APPLICATION)]
    return any(p.with_suffix(".py").exists() or (p / "__init__.py").exists() for p in paths)


def files(*folders: str) -> list[Path]:
    """Core's Python files, of some packages or modules."""
    paths = [CORE / folder for folder in folders] if folders else [CORE]
    return [f for path in paths for f in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def forbidden(among: list[Path], *packages: str, typing_too: bool = False) -> list[str]:
    """Imports of ``packages`` in some files."""
    return [
        str(each)
        for file in among
        for each in imports(file)
        if each.inside(*packages) and (typing_too or not each.typing_only)
    ]


def import_names(folder: Path) -> list[str]:
    """The top-level packages of a plugin's folder."""
    return sorted(path.parent.name for path in (folder / "src").glob("*/__init__.py"))


def pyproject(folder: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def declared(folder: Path, extras: bool = True) -> set[str]:
    """Import names of the requirements of a distribution and of its extras."""
    project = pyproject(folder)
    required = list(project.get("dependencies", []))  # type: ignore[call-overload]
    if extras:
        optional: dict[str, list[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
        required += [each for group in optional.values() for each in group]
    names = [re.split(r"[\s\[<>=!~;]", each, maxsplit=1)[0] for each in required]
    modules = {MODULES_OF.get(name, name.replace("-", "_")) for name in names}
    # A distribution of ours may have several packages: its own, and its tasksets and harnesses.
    ours = [import_names(folder) for folder in PLUGINS if folder.name in modules]
    return modules.union(*ours)
