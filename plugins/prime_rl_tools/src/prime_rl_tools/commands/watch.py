"""``prime-rl watch``."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, run_names


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            help="Name or path of a run; latest: the newest. Two runs are compared.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on loopback; 0 is a free one.")] = 0,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Serve the page of a run to a browser on this machine until Ctrl-C: curves, rollouts and
    held-out answers appear as the run writes them.

    ```
    prime-rl watch
    prime-rl watch mine yours
    ```
    """
    from prime_rl_app.run_states import find_run
    from prime_rl_tools.watch.server import Server, Watched

    server = Server(Watched([find_run(run, output_dir) for run in runs or [LATEST]]), port)
    server.start()
    typer.echo(f"watch it at {server.url}")
    typer.echo("Ctrl-C ends it", err=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    finally:
        server.close()
