"""What a user sees of a run, and the commands around it: look at it, replay it, evaluate and serve
its weights, stop it. And the observers of what they show."""

import typer

from prime_rl import Observer, RunView, hookimpl


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add ``serve``, ``eval``, ``report``, ``replay``, ``inspect``, ``runs``, ``status`` and
    ``stop``."""
    from prime_rl_tools.commands import eval as evaluation
    from prime_rl_tools.commands import inspect, replay, report, runs, serve

    cli.command("serve", context_settings=serve.CONTEXT)(serve.serve)
    cli.command("eval", context_settings=evaluation.CONTEXT)(evaluation.evaluate)
    cli.command("report")(report.report)
    cli.command("replay")(replay.replay)
    cli.command("inspect")(inspect.inspect)
    cli.command("runs")(runs.runs)
    cli.command("status")(runs.status)
    cli.command("stop")(runs.stop)


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer ``event_loop_lag`` and ``save_rollouts``."""
    from prime_rl_tools.lag import EventLoopLag
    from prime_rl_tools.rollouts import SaveRollouts

    return [EventLoopLag, SaveRollouts]


@hookimpl
def register_views() -> list[type[RunView]]:
    from prime_rl_tools.view.live import TerminalView

    return [TerminalView]
