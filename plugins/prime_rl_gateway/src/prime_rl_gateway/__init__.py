"""The source ``gateway``: agents that run elsewhere talk to the live policy, and post rewards.

source      ``Gateway``: groups of rewarded sessions become rollouts
  |- server     HTTP: sessions, rewards, and the model's routes of each session
  |    |- dialects      chat completions, responses, messages
  |    |- policy        a model client over the live policy, which keeps the sampled tokens
  |- book       what each session is: open, rewarded, given, taken, gone
  |- store      a file for each session, so that a restart loses none
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl import hookimpl

if TYPE_CHECKING:  # `prime-rl --help` imports this module
    import typer

    from prime_rl import Source


@hookimpl
def register_sources() -> list[type[Source]]:
    """Offer ``gateway``."""
    from prime_rl_gateway.source import Gateway

    return [Gateway]


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add the command that prints the address and the keys of a run's gateway."""
    from prime_rl_gateway.command import gateway

    cli.command("gateway", rich_help_panel="Serve")(gateway)
