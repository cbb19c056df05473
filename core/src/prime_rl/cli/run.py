"""``prime-rl run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml... [--dotted.key VALUE]...",
            help="TOML files, composed left to right, then overrides: --trainer.optim.lr 1e-4.",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Validate, write the resolved config, and exit."),
    ] = False,
) -> None:
    """Train: start every process of a run, show what they do, and say what came of it."""
    from prime_rl.config.load import load_config
    from prime_rl.run.directory import make_run_dir
    from prime_rl.run.resolve import check

    paths, overrides = split_arguments([*files, *context.args])
    config = load_config([Path(path) for path in paths], overrides)
    check(config)
    run_dir = make_run_dir(config, dry=dry_run)
    if dry_run:
        typer.echo(f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}")
        return
    _train(config, run_dir)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files come first; everything from the first ``--key`` on is an override."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("--")), len(arguments))
    return arguments[:first], arguments[first:]


def _train(config, run_dir: Path) -> None:  # type: ignore[no-untyped-def]
    from rich.console import Console

    from prime_rl.plugins.errors import RunError
    from prime_rl.run import supervisor
    from prime_rl.run.report import print_summary
    from prime_rl.run.view import View

    console = Console()
    try:
        with View(console, run_dir, config.max_steps) as view:
            supervisor.run(config, run_dir, view)
    except KeyboardInterrupt:
        console.print(f"stopped; what was done so far is in {run_dir}", markup=False)
        raise typer.Exit(130) from None
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print_summary(console, run_dir)
