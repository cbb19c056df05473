"""``prime-rl plan``: what a run starts where, and whether it fits."""

import typer

from prime_rl import hookimpl


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add ``plan``."""
    from prime_rl_plan.command import CONTEXT, plan

    cli.command("plan", context_settings=CONTEXT, rich_help_panel="Train")(plan)
