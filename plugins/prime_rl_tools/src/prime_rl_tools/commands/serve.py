"""``prime-rl serve``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prime_rl_tools.commands.options import run_names, with_options
from prime_rl_tools.serve.settings import ServeSettings


@with_options(ServeSettings)
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN | MODEL",
            help="A run (its name or path, or latest), whose trained weights are served; a model "
            "folder; a hub id (owner/name); or the name of a model that an installed plugin makes.",
            show_default=False,
            autocompletion=run_names,
        ),
    ],
    options: dict[str, Any],
) -> None:
    """As ``later.serve`` says."""
    from prime_rl.errors import RunError
    from prime_rl_tools.serve.request import read_settings
    from prime_rl_tools.serve.server import serve as serve_until_interrupted
    from prime_rl_tools.terminal import Console

    settings = read_settings(model, context.args, options)
    try:
        serve_until_interrupted(settings, Console())
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
