"""The command tree."""

from __future__ import annotations

import typer

from prime_rl.cli import plugins, run

app = typer.Typer(
    name="prime-rl",
    help="Reinforcement-learning post-training in which an algorithm is a pip package.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.add_typer(plugins.app, name="plugins")
