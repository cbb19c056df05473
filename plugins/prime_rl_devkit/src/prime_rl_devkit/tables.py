"""Plugins on a terminal, 80 columns and up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from prime_rl_devkit.distributions import Distribution


def print_distributions(rows: Sequence[Distribution]) -> None:
    """Print one row per distribution. Where no index declares its offers: its summary."""
    table = Table(title="prime-rl plugins", title_justify="left", box=SIMPLE_HEAD)
    for title in ("distribution", "version"):
        table.add_column(title, no_wrap=True)
    table.add_column("plugins")
    table.add_column("offers", ratio=1)
    for row in rows:
        lines = (f"{kind}: {', '.join(names)}" for kind, names in row.offers.items())
        offers = Text("\n".join(lines)) if row.offers else Text(row.summary, "dim")
        table.add_row(
            row.name,
            row.version,
            "\n".join(row.plugins),
            Text(f"broken: {row.error}", "red", overflow="fold") if row.error else offers,
        )

    console = Console()
    console.print(table)
    console.print(
        "Nothing was imported. prime-rl plugins list --verbose imports each plugin: hooks, all "
        "offers, and what is broken. prime-rl plugins show NAME shows one with its settings.",
        style="dim",
    )


def print_inventory(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per plugin."""
    table = Table(title="prime-rl plugins", title_justify="left", box=SIMPLE_HEAD)
    for title in ("plugin", "distribution"):
        table.add_column(title, no_wrap=True)
    table.add_column("offers", ratio=1, overflow="fold")
    for row in rows:
        lists = row["offers"] | {key: row[key] for key in ("implements", "wraps") if row[key]}
        offers = "\n".join(f"{kind}: {_some(names)}" for kind, names in lists.items())
        table.add_row(
            row["plugin"],
            f"{row['distribution']}\n{row['version']}, contract {row['contract']}",
            Text(f"broken: {row['error']}", "red", overflow="fold") if row["error"] else offers,
        )

    Console().print(table)


def print_found(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per package of the index."""
    table = Table(title="packages for prime-rl", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("package", no_wrap=True)
    table.add_column("what it is, and what it offers")
    table.add_column("installed", no_wrap=True)
    for row in rows:
        offers = _some([*row["offers"]])
        place = "" if not row["source"].startswith("https://") else f"\n{row['source']}"
        table.add_row(
            row["distribution"], Text(f"{row['summary']}\n{offers}{place}"), row["installed"]
        )

    Console().print(table)
    if any(not row["installed"] for row in rows):
        Console().print("pip install PACKAGE adds one.")


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def print_described(rows: Sequence[dict[str, Any]]) -> None:
    """Print a block per plugin, and below it one per offered class."""
    console = Console()
    for row in rows:
        console.print(_head(row))
        for offer in row["offers"]:
            console.print(_offer(offer))


def _head(row: dict[str, Any]) -> RenderableType:
    facts = {
        "broken": row["error"],
        "distribution": f"{row['distribution']} {row['version']}",
        "": row["summary"],
        "needs": row["requires"],
        "contract": f"version {row['contract']}",
        "entry point": f"{row['group']}: {row['plugin']} = {row['entry_point']}",
        "file": row["file"],
        "hooks": ", ".join(row["implements"]),
        "wraps": ", ".join(row["wraps"]),
    }
    return Group(Text(f"plugin {row['plugin']}", style="bold"), Padding(_pairs(facts), (0, 2)))


def _offer(offer: dict[str, Any]) -> RenderableType:
    facts = {
        "": offer["doc"],
        "select": offer["select"],
        "class": offer["class"],
        "declares": ", ".join(f"{key} = {value}" for key, value in offer["declares"].items()),
        "hooks": ", ".join(offer["hooks"]),
        "settings": "" if offer["settings"] else "none",
    }
    parts: list[RenderableType] = [
        Text(f"\n{offer['kind']} {offer['name']}", style="bold"),
        Padding(_pairs(facts), (0, 2)),
    ]
    if offer["settings"]:
        parts.append(Padding(_settings(offer["settings"]), (0, 2)))
    return Group(*parts)


def _pairs(facts: dict[str, str | None]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            grid.add_row(name, Text(value))
    return grid


def _settings(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(header_style="dim", box=SIMPLE_HEAD)
    table.add_column("key", no_wrap=True)
    table.add_column("type", max_width=20)
    table.add_column("default", max_width=20, overflow="fold")
    table.add_column("what", ratio=1)
    for row in rows:
        default = "none" if row["default"] is None else json.dumps(row["default"])
        cells = (row["key"], row["type"], "required" if row["required"] else default, row["doc"])
        table.add_row(*map(Text, cells))

    return table
