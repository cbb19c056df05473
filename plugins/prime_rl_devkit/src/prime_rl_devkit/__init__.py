"""For authors of plugins: the commands ``plugins ...``, and the suite for inference engines."""

import typer

from prime_rl import hookimpl


@hookimpl
def register_commands(plugins: typer.Typer) -> None:
    """Add ``list``, ``show``, ``search``, ``check``, ``prove`` and ``new``."""
    from prime_rl_devkit import commands

    plugins.command("list")(commands.list_plugins)
    plugins.command("show")(commands.show)
    plugins.command("search")(commands.search)
    plugins.command("check")(commands.check)
    plugins.command("prove")(commands.prove)
    plugins.command("new")(commands.new)
