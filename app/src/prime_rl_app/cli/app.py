"""The command tree: ``run``, ``sft`` and ``migrate`` are of the application, others of plugins.

The help loads only the plugins of the entry-point group ``prime_rl.commands``, because loading all
plugins takes longer than everything else. A command that none of them registers is looked for in
all plugins.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from prime_rl.entries import entries, misspelt_groups
from prime_rl.errors import PluginError
from prime_rl.plugins.hookspecs import PROJECT
from prime_rl.registry.manager import (
    Hooks,
    add_entry,
    disabled_names,
    source_of,
)
from prime_rl_app.cli import migrate, run

COMMANDS = "prime_rl.commands"
"""Entry-point group of the plugins whose commands the help shows."""
PLUGINS = "Plugins: list, show and search them; write, check and prove your own."


class CommandGroup(TyperGroup):
    """Finds the commands of plugins, and names the package of a command that is not installed."""

    # ``Any``: newer versions of typer have their own copy of click and its Context.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click does, after adding the commands of all plugins if the first argument names no
        known one. Raises ``UsageError``."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.commands:
            broken = add_commands(PROJECT)
            from prime_rl.registry.offers import bringer

            here, path = (app, name) if ctx.parent is None else (plugins, f"plugins.{name}")
            self.commands.update(get_group(here).commands)
            if name not in self.commands and (package := bringer("command", path)):
                ctx.fail(f"no command {name!r} is installed. Run: pip install {package}")
            if name not in self.commands and broken:
                ctx.fail(f"no command {name!r}. {_missing(broken)}")
            if name not in self.commands and (misspelt := misspelt_groups()):
                ctx.fail(f"no command {name!r}. {' '.join(map(str, misspelt))}")

        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="prime-rl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins a docstring's lines, and shows its examples as they are
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=CommandGroup,
)
plugins = typer.Typer(help=PLUGINS, no_args_is_help=True, rich_markup_mode="markdown")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"prime-rl-core {version('prime-rl-core')}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="PLUGIN",
            help="Do not load this plugin; works after every command.",
        ),
    ] = None,  # cli.main has read it: plugins bring commands
) -> None:
    """Reinforcement-learning post-training in which an algorithm is a pip package."""


def add_commands(group: str) -> list[PluginError]:
    """Add the commands of the plugins in an entry-point group. Returns the errors of plugins that
    cannot be loaded; the others still work."""
    hooks = Hooks()
    broken = list[PluginError]()
    disabled_names()  # an unknown name is an error
    for entry in entries(group):
        try:
            add_entry(hooks, entry, source_of(entry))
        except PluginError as error:
            broken.append(error)

    hooks.hook.register_commands(cli=app, plugins=plugins)
    return broken


def _bringers() -> str:
    """Which packages bring the commands of ``prime-rl plugins``, where none is installed."""
    prefix = "command.plugins."
    known = [entry for entry in entries("prime_rl.known") if entry.name.startswith(prefix)]
    packages = sorted({entry.value.replace("_", "-") for entry in known})
    names = ", ".join(sorted({entry.name.removeprefix(prefix) for entry in known}))
    return f"Its commands ({names}) are not installed. Run: pip install {' '.join(packages)}"


def _missing(broken: list[PluginError]) -> str:
    return f"Commands of these plugins are missing: {' '.join(map(str, broken))}"


app.command("run", context_settings=run.CONTEXT, rich_help_panel="Train")(run.run)
app.command("sft", context_settings=run.CONTEXT, rich_help_panel="Train")(run.sft)
app.command("migrate", rich_help_panel="Train")(migrate.migrate)
app.add_typer(plugins, name="plugins", cls=CommandGroup, rich_help_panel="Extend")
errors = add_commands(COMMANDS)
if not plugins.registered_commands:
    plugins.info.help = f"{PLUGINS} {_bringers()}"
if errors:
    app.info.epilog = _missing(errors)
