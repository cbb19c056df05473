"""The command tree: ``run`` and ``plugins`` are core's, every other command is a plugin's."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prime_rl.cli import plugins, run
from prime_rl.errors import PluginError
from prime_rl.plugins.manager import load_plugins
from prime_rl.plugins.offers import bringer


class Commands(TyperGroup):
    """Names the package of a command that is not installed."""

    # ``Any``: newer versions of typer have their own copy of click and its Context.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click does; names the package of a missing command. Raises ``UsageError``."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            if app.info.epilog:
                ctx.fail(f"no command {name!r}. {app.info.epilog}")
            package = bringer("command", name)
            if package is not None:
                ctx.fail(f"no command {name!r} is installed. Run: pip install {package}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="prime-rl",
    help="Reinforcement-learning post-training in which an algorithm is a pip package.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    cls=Commands,
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
app.add_typer(plugins.app, name="plugins")


def add_commands() -> None:
    """Add the commands of every installed plugin. If one cannot be loaded, core's own
    commands work all the same, and the help says why the others are missing."""
    try:
        hooks = load_plugins()
    except PluginError as error:
        app.info.epilog = f"The commands of plugins are missing: {error}"
        return
    hooks.hook.register_commands(cli=app, plugins=plugins.app)


add_commands()
