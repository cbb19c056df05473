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
            metavar="CONFIG.toml... [--resume [latest | STEP | DIR]] [--dotted.key VALUE]...",
            help="TOML files, composed left to right, then overrides: --trainer.optim.lr 1e-4. "
            "--resume goes on from a checkpoint: the run's newest one, that of a step, or (in a "
            "new run) that in a folder.",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Validate, write the resolved config, and exit."),
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(help="Who starts the processes, and where; short for --launcher.type."),
    ] = None,
) -> None:
    """Train: start every process of a run, show what they do, and say what came of it."""
    from prime_rl.config.load import load_config
    from prime_rl.run.directory import make_run_dir
    from prime_rl.run.lora_names import check_lora_names
    from prime_rl.run.resolve import check

    arguments, resume = split_resume([*files, *context.args])
    paths, overrides = split_arguments(arguments)
    overrides += [] if launcher is None else ["--launcher.type", launcher]
    config = load_config([Path(path) for path in paths], overrides)
    check(config)
    check_lora_names(config)
    if resume is not None:
        _resume(config, resume, dry_run)
        return
    run_dir = make_run_dir(config, dry=dry_run)
    if dry_run:
        typer.echo(f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}")
        return
    _train(config, run_dir)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files come first; everything from the first ``--key`` on is an override."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("--")), len(arguments))
    return arguments[:first], arguments[first:]


def split_resume(arguments: list[str]) -> tuple[list[str], str | None]:
    """Take ``--resume [WHAT]`` or ``--resume=WHAT`` out; ``latest`` if it has no value. Typer knows
    no option whose value may be left out."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != "--resume":
            continue
        before, after = arguments[:index], arguments[index + 1 :]
        if equals:
            return before + after, value
        if after and not after[0].startswith("--") and not after[0].endswith(".toml"):
            return before + after[1:], after[0]
        return before + after, "latest"
    return arguments, None


def _resume(config, what: str, dry_run: bool) -> None:  # type: ignore[no-untyped-def]
    from contextlib import nullcontext

    from prime_rl.run.directory import held
    from prime_rl.run.resume import begin, plan

    chosen = plan(config, what)
    for note in chosen.notes:
        typer.echo(note)
    if dry_run:
        return
    with nullcontext() if chosen.run_dir is None else held(chosen.run_dir):
        run_dir, checkpoint = begin(config, chosen)
        _train(config, run_dir, checkpoint, lock=chosen.run_dir is None)


def _train(config, run_dir: Path, checkpoint=None, lock: bool = True) -> None:  # type: ignore[no-untyped-def]
    from contextlib import nullcontext

    from rich.console import Console

    from prime_rl.plugins.errors import RunError
    from prime_rl.run import supervisor
    from prime_rl.run.directory import held
    from prime_rl.run.report import print_summary
    from prime_rl.run.view import View

    console = Console()
    try:
        with (
            held(run_dir) if lock else nullcontext(),
            View(console, run_dir, config.max_steps) as view,
        ):
            supervisor.run(config, run_dir, view, checkpoint)
    except KeyboardInterrupt:
        console.print(f"stopped; what was done so far is in {run_dir}", markup=False)
        raise typer.Exit(130) from None
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print_summary(console, run_dir)
