"""``prime-rl plugins``: who is installed, from which distribution, offering and wrapping what."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(help="Installed plugins.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Installed plugins."""


@app.command("list")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every installed plugin: distribution, version, what it offers, which hooks it implements and
    wraps."""
    rows = inventory()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


def inventory() -> list[dict[str, Any]]:
    """One entry a plugin, of both entry-point groups."""
    from prime_rl.plugins.manager import GROUPS, load_plugins

    return [row for group in GROUPS for row in _of_group(load_plugins(group))]


def _of_group(hooks: Any) -> list[dict[str, Any]]:
    offers = _offers_by_plugin(hooks)
    rows = []
    for name, source in hooks.sources.items():
        implements, wraps = _hooks_of(hooks, name)
        rows.append(
            {
                "plugin": name,
                "distribution": source.distribution,
                "version": source.version,
                "group": hooks.group,
                "offers": offers.get(name, {}),
                "implements": implements,
                "wraps": wraps,
            }
        )
    return rows


def _offers_by_plugin(hooks: Any) -> dict[str, dict[str, list[str]]]:
    from prime_rl.plugins.offers import KINDS, collect

    found: dict[str, dict[str, list[str]]] = {}
    for kind in KINDS:
        for name, offered in collect(hooks, kind).items():
            kinds = found.setdefault(offered.source.plugin, {})
            kinds.setdefault(kind.plural, []).append(name)
    return found


def _hooks_of(hooks: Any, name: str) -> tuple[list[str], list[str]]:
    """Hooks a plugin implements beyond registration, and hooks it wraps."""
    implements: list[str] = []
    wraps: list[str] = []
    for caller in hooks.get_hookcallers(hooks.get_plugin(name)) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == name and not caller.name.startswith("register_"):
                (wraps if impl.wrapper or impl.hookwrapper else implements).append(caller.name)
    return sorted(implements), sorted(wraps)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="prime-rl plugins", title_justify="left")
    for title in ("plugin", "distribution", "version"):
        table.add_column(title, no_wrap=True)
    for title in ("offers", "hooks", "wraps"):
        table.add_column(title, overflow="fold")
    for row in rows:
        offers = "\n".join(f"{kind}: {_some(names)}" for kind, names in row["offers"].items())
        table.add_row(
            row["plugin"],
            row["distribution"],
            row["version"],
            offers,
            "\n".join(row["implements"]),
            "\n".join(row["wraps"]),
        )
    Console().print(table)


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
