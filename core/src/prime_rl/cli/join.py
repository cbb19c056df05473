"""``prime-rl join``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def join(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="The run's directory, on a disk that all its machines share. Need not be there "
            "yet.",
        ),
    ],
    part: Annotated[
        Literal["inference", "trainer"],
        typer.Argument(help="What this machine is to be: an engine, or a node of the trainer."),
    ],
    address: Annotated[
        str,
        typer.Option(
            help="Where this machine listens and the others find it; 'auto': its own address.",
        ),
    ] = "127.0.0.1",
) -> None:
    """Be one machine of a run that `prime-rl run ... --launcher join` supervises elsewhere.

    Started by hand, by Slurm or by Kubernetes; it ends when the run does.
    """
    from prime_rl.plugins.errors import RunError
    from prime_rl.run.agent import join as take_part

    try:
        code = take_part(run_dir, part, address, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)
