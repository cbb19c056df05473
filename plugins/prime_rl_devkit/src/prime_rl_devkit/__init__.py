"""For authors of plugins: ``plugins new``, ``plugins check``, the suite for inference engines."""

import typer

from prime_rl import hookimpl


@hookimpl
def register_commands(plugins: typer.Typer) -> None:
    """Add ``check`` and ``new``."""
    from prime_rl_devkit import commands

    plugins.command("check")(commands.check)
    plugins.command("new")(commands.new)
