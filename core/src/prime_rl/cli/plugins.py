"""``prime-rl plugins``: the installed plugins and their offers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(help="Installed plugins.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_plugins(as_json: AsJson = False) -> None:
    """Every installed plugin: distribution, version, offers, and the hooks it implements and
    wraps; for a broken one, the reason."""
    from prime_rl.cli.plugin_facts import inventory
    from prime_rl.cli.plugin_tables import print_inventory

    show = print_json if as_json else print_inventory
    show(inventory())


@app.command("show")
def show_plugin(
    name: Annotated[str, typer.Argument(help="A plugin, a distribution, or the name of an offer.")],
    as_json: AsJson = False,
) -> None:
    """One plugin in full: its origin, its offers, and every setting with its default."""
    from prime_rl.cli.plugin_facts import described
    from prime_rl.cli.plugin_tables import print_described

    show = print_json if as_json else print_described
    show(described(name))


def print_json(value: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))
