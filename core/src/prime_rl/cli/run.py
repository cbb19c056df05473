"""``prime-rl run``."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prime_rl.config.run import RunConfig
    from prime_rl.plugins.manager import Hooks
    from prime_rl.rundir.checkpoints import Checkpoint

NAME = "prime-rl"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml... [--resume [latest | STEP | DIR]] [--dotted.key VALUE]...",
            help="TOML files, composed left to right, then overrides: --trainer.optim.lr 1e-4. "
            "--resume continues from a checkpoint: the run's newest one, that of a step, or (in a "
            "new run) that in a folder.",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Validate, write the resolved config, and exit."),
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(help="The launcher that starts the processes; short for --launcher.type."),
    ] = None,
) -> None:
    """Train: start every process of a run, show what they do, and print a summary. Ctrl-C (or
    SIGTERM) saves and stops the run; a second one ends it at once."""
    from prime_rl.config.load import load_config
    from prime_rl.run import resume
    from prime_rl.run.models import check_tuning
    from prime_rl.run.resolve import check
    from prime_rl.rundir.directory import held, make_run_dir

    arguments, checkpoint = split_resume([*files, *context.args])
    paths, overrides = split_arguments(arguments)
    overrides += [] if launcher is None else [f"--launcher.type={launcher}"]
    config = load_config([Path(path) for path in paths], overrides)
    hooks = check(config)
    tuning = check_tuning(config)
    typed = sys.argv[0]  # this program as a shell finds it
    program = typed if Path(typed).name == NAME and shutil.which(NAME) is None else NAME
    again = shlex.join([program, "run", *paths, *overrides])
    if checkpoint is not None:
        chosen = resume.plan(config, checkpoint, tuning)
        typer.echo("\n".join(chosen.notes))
        if not dry_run:
            with resume.begin(config, chosen) as (run_dir, resumed):
                _train(config, hooks, run_dir, again, resumed)
        return
    run_dir = make_run_dir(config, dry=dry_run)
    if dry_run:
        typer.echo(f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}")
        return
    with held(run_dir):
        _train(config, hooks, run_dir, again, None)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split into files, which come first, and overrides, which start at the first ``--key``."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("--")), len(arguments))
    return arguments[:first], arguments[first:]


def split_resume(arguments: list[str]) -> tuple[list[str], str | None]:
    """Extract ``--resume [WHAT]`` or ``--resume=WHAT``; ``latest`` if it has no value. Typer has no
    options with an optional value."""
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


def _train(
    config: RunConfig, hooks: Hooks, run_dir: Path, again: str, checkpoint: Checkpoint | None
) -> None:
    from prime_rl.errors import RunError
    from prime_rl.plugins.offers import VIEW, make
    from prime_rl.run import supervisor
    from prime_rl.rundir.control import supervised
    from prime_rl.rundir.stop import Stopped

    view = make(
        *(VIEW, config.view.type, config.view.settings, hooks, "view"), run_dir, config.max_steps
    )
    try:
        with supervised(run_dir):
            with view:
                supervisor.run(config, view, checkpoint)
            view.ended()
    except KeyboardInterrupt as interrupt:
        step, saved = (
            (interrupt.step, interrupt.trained) if isinstance(interrupt, Stopped) else (None, False)
        )
        named = "" if config.run.name else shlex.join(["--run.name", run_dir.name])
        view.stopped(step, saved, f"{again} {named}".strip())
        raise typer.Exit(130) from None
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
