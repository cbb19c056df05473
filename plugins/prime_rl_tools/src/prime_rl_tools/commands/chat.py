"""``prime-rl chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from prime_rl_tools.commands.options import OUTPUTS, OutputDir, RunName

if TYPE_CHECKING:
    from prime_rl_tools.serve.chat import Conversation
    from prime_rl_tools.terminal import Console

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def chat(
    context: typer.Context,
    run: RunName,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask this and end. Several are one conversation.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 256,
    seed: Annotated[int, typer.Option(help="Seeds both models alike.", min=0, max=2**63 - 1)] = 0,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Talk with a run's policy before and after training, side by side.

    A line is a message to both models; /new begins a new conversation, and Ctrl-D ends. Settings of
    the engine are those of prime-rl serve: --inference.ENGINE.KEY VALUE.

    ```
    prime-rl chat latest
    prime-rl chat mine --prompt "reverse: abc" --temperature 1
    ```
    """
    from prime_rl.errors import RunError
    from prime_rl_app.api import Run
    from prime_rl_tools.serve.chat import ChatOptions, opened
    from prime_rl_tools.terminal import Console

    console = Console()
    options = ChatOptions(system, temperature, max_tokens=max_tokens, seed=seed)

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    try:
        with opened(Run(run, output_dir), context.args, options=options, tell=tell) as talk:
            for line in prompt or _typed(console):
                _say(console, talk, line)
    except KeyboardInterrupt:
        typer.echo("ended", err=True)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _typed(console: Console) -> Iterator[str]:
    """The lines that the user types, or that are piped in."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = console.input("[bold]you>[/] ") if is_terminal else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _say(console: Console, talk: Conversation, line: str) -> None:
    """Print both replies beside each other. A conversation that is too long is an answer too."""
    from rich.table import Table
    from rich.text import Text

    from prime_rl.errors import RunError

    if line == "/new":
        talk.forget()
        return

    try:
        replies = talk.ask(line)
    except RunError as error:
        console.print(str(error), style="red", markup=False)
        return

    table = Table(expand=True, header_style="dim", title=Text(line, "bold"), title_justify="left")
    for side in talk.sides:
        table.add_column(side.label, overflow="fold", ratio=1)
    table.add_row(*(Text(reply) if reply else Text("(empty reply)", "dim") for reply in replies))
    console.print(table)
