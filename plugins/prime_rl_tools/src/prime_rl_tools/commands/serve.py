"""``prime-rl serve``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prime_rl_tools.commands.options import with_options
from prime_rl_tools.serve.settings import ServeSettings

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


@with_options(ServeSettings)
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder (such as outputs/RUN/weights), a hub id (owner/name), or the name "
            "of a model that an installed plugin makes here.",
            show_default=False,
        ),
    ],
    options: dict[str, Any],
) -> None:
    """Serve one model with one engine until Ctrl-C: a teacher for a run, or a trained policy.

    Settings of a model that is made here, and of the engine, are those of a run's TOML:
    --model.KEY VALUE and --inference.ENGINE.KEY VALUE.
    """
    from rich.console import Console

    from prime_rl.errors import RunError
    from prime_rl_tools.serve.request import read_settings
    from prime_rl_tools.serve.server import serve as serve_until_interrupted

    settings = read_settings(model, context.args, options)
    try:
        serve_until_interrupted(settings, Console())
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
