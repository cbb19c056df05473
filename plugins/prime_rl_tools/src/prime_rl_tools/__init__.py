"""What a user sees of a run, and the commands around it: look at it, replay it, evaluate and serve
its weights, stop it. And the observers of what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from prime_rl import hookimpl

if TYPE_CHECKING:
    from prime_rl import Observer, RunView


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add the commands that train, look at and serve runs."""
    from prime_rl_tools.commands import (
        chat,
        doctor,
        export,
        inspect,
        race,
        replay,
        report,
        runs,
        watch,
    )
    from prime_rl_tools.commands.later import CONTEXT, Later, evaluate, serve

    # panels of the help
    train = "Train"
    look = "Look"
    serving = "Serve"
    cli.command("race", context_settings=race.CONTEXT, rich_help_panel=train)(race.race)
    cli.command("stop", rich_help_panel=train)(runs.stop)
    cli.command("scale", rich_help_panel=train)(runs.scale)
    cli.command("runs", rich_help_panel=look)(runs.runs)
    cli.command("status", rich_help_panel=look)(runs.status)
    cli.command("watch", rich_help_panel=look)(watch.watch)
    cli.command("doctor", rich_help_panel=look)(doctor.doctor)
    cli.command("report", rich_help_panel=look)(report.report)
    cli.command("export", rich_help_panel=look)(export.export)
    cli.command("replay", rich_help_panel=look)(replay.replay)
    cli.command("inspect", rich_help_panel=look)(inspect.inspect)
    cli.command("serve", cls=Later, context_settings=CONTEXT, rich_help_panel=serving)(serve)
    cli.command("chat", context_settings=chat.CONTEXT, rich_help_panel=serving)(chat.chat)
    cli.command("eval", cls=Later, context_settings=CONTEXT, rich_help_panel=serving)(evaluate)


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer ``event_loop_lag`` and ``loaded_versions``."""
    from prime_rl_tools.lag import EventLoopLag
    from prime_rl_tools.versions import Versions

    return [EventLoopLag, Versions]


@hookimpl
def register_views() -> list[type[RunView]]:
    from prime_rl_tools.view.live import TerminalView

    return [TerminalView]
