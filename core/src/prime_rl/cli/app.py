"""The command tree."""

from __future__ import annotations

from typing import Annotated

import typer

from prime_rl.cli import eval as evals
from prime_rl.cli import inspect, join, plugins, replay, report, run, runs, serve

app = typer.Typer(
    name="prime-rl",
    help="Reinforcement-learning post-training in which an algorithm is a pip package.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"prime-rl-core {version('prime-rl-core')}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Reinforcement-learning post-training in which an algorithm is a pip package."""


app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("join")(join.join)
app.command("serve", context_settings=serve.CONTEXT)(serve.serve)
app.command("eval", context_settings=evals.CONTEXT)(evals.evaluate)
app.command("report")(report.report)
app.command("replay")(replay.replay)
app.command("inspect")(inspect.inspect)
app.command("runs")(runs.runs)
app.command("status")(runs.status)
app.command("stop")(runs.stop)
app.add_typer(plugins.app, name="plugins")
