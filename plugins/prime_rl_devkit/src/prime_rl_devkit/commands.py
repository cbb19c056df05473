"""``prime-rl plugins list``, ``show``, ``check`` and ``new``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from prime_rl.testing.report import Report

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_plugins(as_json: AsJson = False) -> None:
    """Every installed plugin: distribution, version, offers, and the hooks it implements and
    wraps; for a broken one, the reason."""
    from prime_rl_devkit.facts import inventory
    from prime_rl_devkit.tables import print_inventory

    print_answer = print_json if as_json else print_inventory
    print_answer(inventory())


def show(
    name: Annotated[str, typer.Argument(help="A plugin, a distribution, or the name of an offer.")],
    as_json: AsJson = False,
) -> None:
    """One plugin in full: its origin, its offers, and every setting with its default."""
    from prime_rl_devkit.facts import described
    from prime_rl_devkit.tables import print_described

    print_answer = print_json if as_json else print_described
    print_answer(described(name))


def print_json(value: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME | PATH",
            help="A plugin, a distribution, the name of an offer, or the folder of a package "
            "that need not be installed. Left out: everything installed.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the checked class; VALUE as in TOML."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the conformance checks of plugins; the exit code is 1 if one fails."""
    from prime_rl_devkit.check import check as run_checks

    reports = run_checks(target, read_settings(settings or []))
    ok = all(report.ok for report in reports)
    if as_json:
        print_json({"ok": ok, "reports": [report.as_dict() for report in reports]})
    else:
        _print_reports(reports, everything=target is not None)
    raise typer.Exit(0 if ok else 1)


def _print_reports(reports: Sequence[Report], *, everything: bool) -> None:
    """Print a line per report, and below it the failures, or ``everything``."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for report in reports:
        style = "green" if report.ok else "bold red"
        console.print(
            Text.assemble((f"{report.kind} {report.name}", "bold"), "  ", (report.summary(), style))
        )
        shown = report.outcomes if everything else report.failed
        if shown:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            for outcome in shown:
                said = outcome.message or outcome.promise
                grid.add_row(
                    Text(outcome.status, style=STYLES[outcome.status]),
                    outcome.check,
                    Text(said, style="" if outcome.message else "dim"),
                )
            console.print(Padding(grid, (0, 2)))


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs as a table; keys may have dots. Raises ``ConfigError``."""
    import tomllib

    from prime_rl.errors import ConfigError

    try:
        return tomllib.loads("\n".join(pairs))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--set: expected KEY=VALUE with a value as TOML writes it (text in quotes), got "
            f"{' '.join(pairs)!r}: {error}"
        ) from error


def new(
    name: Annotated[str, typer.Argument(help="The name in a TOML, such as my-algo.")],
    kind: Annotated[
        str,
        typer.Option(help="algorithm, filter, loss, engine, sampler, renderer, source or monitor."),
    ] = "algorithm",
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder to write; ./prime-rl-NAME if left out.", show_default=False),
    ] = None,
) -> None:
    """Write a package with one working plugin, its tests, a README and a CI workflow."""
    from prime_rl_devkit.scaffold import write_package

    package = write_package(name, kind, directory)
    typer.echo(f"wrote {package.folder}: the {kind} {package.name!r}, {len(package.files)} files")
    typer.echo("\nNext:")
    for command in package.next_commands():
        typer.echo(f"  {command}")
