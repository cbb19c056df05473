"""``docs/packages.md``: the distributions of this repository, and what each brings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from tools.docs.markdown import GENERATED, table

from prime_rl_app.cli.app import app
from prime_rl_devkit.facts import Row, inventory

ROOT = Path(__file__).parents[2]

INTRODUCTION = """\
Each row is a distribution of this repository. Core finds the others through entry points, as it
finds yours. `make setup` installs all of them. The distribution `prime-rl` installs those in bold.
`prime-rl plugins list` prints what the packages of your environment offer. Packages that no
index knows, such as your own, show their names with `--verbose`.

A config names what a plugin offers: `algo.type = "grpo"`, `[monitors.wandb]`.

## Install them

They are not on a package index yet. In a checkout `make setup` installs all of them into
`.venv`. For an environment of your own, build the wheels once and let pip find them:

```console
make wheels
pip install --find-links dist prime-rl prime-rl-wandb
```

Where a page or a message says `pip install prime-rl-NAME`, add `--find-links dist`.

The default build of torch for Linux brings CUDA, several gigabytes. Without a GPU, set
`PIP_EXTRA_INDEX_URL` to PyTorch's index of CPU builds first (pytorch.org names it).

## Every package"""

PLURALS_OF_TWO_WORDS = {
    "trainer_observers": "observers of the trainer",
    "weight_transports": "weight transports",
}


def packages_page() -> str:
    """The whole page."""
    source = "the `pyproject.toml` files and the plugins"
    plugins = inventory()
    commands = [*_commands()]
    rows = [
        _row(folder, settings, _offers(settings["name"], plugins, commands))
        for folder, settings in _projects()
    ]
    parts = [
        "# Packages",
        GENERATED.format(source=source).replace("Edit the docstrings there", "Edit those"),
        INTRODUCTION,
        table(["distribution", "import", "what it is", "what it offers"], rows),
    ]
    return "\n\n".join(parts) + "\n"


def _projects() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and ``[project]`` table of each distribution: the application, core, then by name."""
    paths = [ROOT / "pyproject.toml", ROOT / "app/pyproject.toml", ROOT / "core/pyproject.toml"]
    paths.append(ROOT / "contract/pyproject.toml")
    paths += sorted(ROOT.glob("prime_rl_*/pyproject.toml"))
    paths += sorted(ROOT.glob("plugins/*/pyproject.toml"))
    for path in paths:
        yield path.parent, tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def _row(folder: Path, settings: dict[str, Any], offers: Iterable[str]) -> list[str]:
    name = settings["name"]
    is_default = name == "prime-rl" or name in _defaults()
    packages = sorted(
        path.parent.name
        for path in folder.glob("src/*/__init__.py")
        if path.parent.name != "prime_rl_defaults"
    )
    return [
        f"**`{name}`**" if is_default else f"`{name}`",
        ", ".join(f"`{package}`" for package in packages),
        settings["description"].replace("|", "\\|"),
        "; ".join(offers),
    ]


def _defaults() -> set[str]:
    """The distributions that ``pip install prime-rl`` installs too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {requirement.split(">")[0].split("[")[0] for requirement in
            settings["project"]["dependencies"]}  # fmt: skip


def _offers(
    distribution: str, plugins: Iterable[Row], commands: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """``algorithms `grpo`, `max_rl` ``: one text a kind, then the commands."""
    by_kind: dict[str, set[str]] = {}
    for plugin in plugins:
        if plugin["distribution"] == distribution:
            for kind, names in plugin["offers"].items():
                by_kind.setdefault(kind, set()).update(names)

    by_kind["commands"] = {command for command, package in commands if package == distribution}
    for kind, names in by_kind.items():
        if names:
            title = PLURALS_OF_TWO_WORDS.get(kind, kind)
            yield f"{title} " + ", ".join(f"`{each}`" for each in sorted(names))


def _commands() -> Iterator[tuple[str, str]]:
    """Each command of ``prime-rl`` with the distribution that brings it."""
    group = typer.main.get_group(app)
    for name, command in group.commands.items():
        below = getattr(command, "commands", None)
        leaves = below if below is not None else {"": command}
        for leaf, each in leaves.items():
            package = each.callback.__module__.split(".")[0]
            distribution = package.replace("_", "-")
            yield f"{name} {leaf}".strip(), distribution
