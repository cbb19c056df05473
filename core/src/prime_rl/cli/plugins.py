"""``prime-rl plugins``: who is installed, what it offers, whether it keeps its promises, and a new
one in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Installed plugins, and new ones.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def group() -> None:
    """Installed plugins, and new ones."""


@app.command("list")
def list_plugins(as_json: AsJson = False) -> None:
    """Every installed plugin: distribution, version, what it offers, which hooks it implements and
    wraps."""
    from prime_rl.cli.plugin_tables import print_inventory

    rows = inventory()
    if as_json:
        _print_json(rows)
    else:
        print_inventory(rows)


def inventory() -> list[dict[str, Any]]:
    """One entry a plugin, of both entry-point groups, with the names of what it offers."""
    from prime_rl.cli import plugin_facts

    return plugin_facts.inventory()


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(help="A plugin, a distribution, or something that one offers.")
    ],
    as_json: AsJson = False,
) -> None:
    """One plugin in full: where it is from, what it offers, and every setting with its default."""
    from prime_rl.cli.plugin_facts import described
    from prime_rl.cli.plugin_tables import print_described

    rows = described(name)
    if as_json:
        _print_json(rows)
    else:
        print_described(rows)


@app.command("check")
def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME | PATH",
            help="A plugin, a distribution, something that one offers, or the folder of a package "
            "that need not be installed. Left out: everything installed.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of what is checked; VALUE as in TOML."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold plugins to their promises (prime_rl.testing); the exit code is 1 if one is broken."""
    from prime_rl.cli.plugin_check import check as run_checks
    from prime_rl.cli.plugin_tables import print_reports

    reports = run_checks(target, read_settings(settings or []))
    ok = all(report.ok for report in reports)
    if as_json:
        _print_json({"ok": ok, "reports": [report.as_dict() for report in reports]})
    else:
        print_reports(reports, everything=target is not None)
    raise typer.Exit(0 if ok else 1)


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs as a table; keys may have dots. Raises ``ConfigError``."""
    import tomllib

    from prime_rl.plugins.errors import ConfigError

    try:
        return tomllib.loads("\n".join(pairs))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--set: expected KEY=VALUE with a value as TOML writes it (text in quotes), got "
            f"{' '.join(pairs)!r}: {error}"
        ) from error


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What a TOML will select it by: my-algo.")],
    kind: Annotated[
        str,
        typer.Option(help="algorithm, filter, loss, engine, sampler, renderer, source or monitor."),
    ] = "algorithm",
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder to write; ./prime-rl-NAME if left out.", show_default=False),
    ] = None,
) -> None:
    """Write a package with one plugin that works, its tests, a README and a CI workflow."""
    from prime_rl.scaffold import write_package

    package = write_package(name, kind, directory)
    typer.echo(f"wrote {package.folder}: the {kind} {package.name!r}, {len(package.files)} files")
    typer.echo("\nNext:")
    for command in package.next_commands():
        typer.echo(f"  {command}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
