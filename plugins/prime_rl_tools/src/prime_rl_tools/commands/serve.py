"""``prime-rl serve``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prime_rl_tools.commands.options import run_names, with_options
from prime_rl_tools.serve.settings import ServeSettings

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


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
    """Serve one model with one engine until Ctrl-C: a teacher for a run, or a trained policy.

    Settings of a model that is made here, and of the engine, are those of a run's TOML:
    --model.KEY VALUE and --inference.ENGINE.KEY VALUE.

    ```
    prime-rl serve latest
    prime-rl serve outputs/mine/weights --port 8001
    ```
    """
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
