"""Commands whose options come from settings classes, which take longer to import than the help of
all commands takes. Each function here gives the command; its docstring is the help's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


class Later(TyperCommand):
    """Imports its command when that is used."""

    # ``Any``: newer versions of typer have their own copy of click and its Context.
    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The context of the command that the callback gives."""
        assert self.callback is not None
        alone = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        settings = dict(self.context_settings)
        alone.command(self.name, help=self.help, context_settings=settings)(self.callback())
        return get_command(alone).make_context(info_name, args, parent, **extra)


def serve() -> Callable[..., None]:
    """Serve one model with one engine until Ctrl-C: a teacher for a run, or a trained policy.

    Settings of a model that is made here, and of the engine, are those of a run's TOML:
    --model.KEY VALUE and --inference.ENGINE.KEY VALUE.

    ```
    prime-rl serve latest
    prime-rl serve outputs/mine/weights --port 8001
    ```
    """
    from prime_rl_tools.commands.serve import serve

    return serve


def evaluate() -> Callable[..., None]:
    """Measure a model on environments: any OpenAI-compatible endpoint, no training.

    Prints avg@k, and pass@k and pass^k where rewards are 0 or 1; every rollout is saved. The exit
    code is 1 if every rollout of an environment failed.

    ```
    prime-rl eval latest --base-url http://127.0.0.1:8000/v1
    prime-rl eval text-reversal --num-examples 32 --group-size 4
    ```
    """
    from prime_rl_tools.commands.eval import evaluate

    return evaluate
