"""``prime-rl serve``."""

from __future__ import annotations

from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder (outputs/RUN/weights, say), a hub id (owner/name), or the name "
            "of a model that an installed plugin makes here.",
            show_default=False,
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(help="Name of an installed engine; a run's default if left out.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback if left out.")] = None,
    port: Annotated[
        int | None, typer.Option(help="8000 if left out, or a free one where 8000 is taken.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call it; MODEL if left out.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Prompt and completion, in tokens; the model's own if left out."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of model making, and of sampling without one.")] = 0,
    api_key_var: Annotated[
        str | None,
        typer.Option(help="Environment variable with the key that clients must bring."),
    ] = None,
    show_admin_key: Annotated[
        bool, typer.Option("--show-admin-key", help="Print the key of the admin routes.")
    ] = False,
) -> None:
    """Serve one model with one engine until Ctrl-C: a teacher for a run, or a finished policy to
    talk to.

    Settings of a model that is made here, and of the engine, are those of a run's TOML:
    --model.KEY VALUE and --inference.ENGINE.KEY VALUE.
    """
    from rich.console import Console

    from prime_rl.errors import RunError
    from prime_rl_tools.serve.request import read_request
    from prime_rl_tools.serve.server import serve as serve_until_interrupted

    inference = {"engine": engine, "host": host, "port": port, "max_model_len": max_model_len}
    request = read_request(
        model,
        context.args,
        seed=seed,
        inference=inference,
        served_model_name=served_model_name,
        api_key_var=api_key_var,
        show_admin_key=show_admin_key,
    )
    try:
        serve_until_interrupted(request, Console())
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
