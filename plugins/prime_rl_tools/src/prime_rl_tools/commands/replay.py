"""``prime-rl replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_rl_tools.commands.options import OUTPUTS, OutputDir, RunName

if TYPE_CHECKING:
    from prime_rl.config.run import RunConfig
    from prime_rl_tools.replay.compare import StepChange
    from prime_rl_tools.replay.score import Algorithms, Replayed

NUM_SHOWN = 8
"""Rollouts listed below the table."""


def replay(
    run: RunName,
    step: Annotated[int | None, typer.Option(help="Show this step. Default: every one.")] = None,
    algo: Annotated[
        str | None, typer.Option(help="Score by this algorithm, with its default settings.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="Score by the algorithms of this TOML; several are composed."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a page that shows both credits, token by token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Score saved rollouts again, without engine or GPU, and show the changes.

    With the run's own algorithm every frame that was sent must be reproduced byte for byte, else
    the exit code is 1.

    ```
    prime-rl replay latest --algo max_rl
    ```
    """
    import asyncio

    from prime_rl_app.run_states import find_run
    from prime_rl_tools.replay.compare import change_of
    from prime_rl_tools.replay.score import algorithms_of, read_run_config, read_steps
    from prime_rl_tools.replay.score import replay as score_again

    run_dir = find_run(run, output_dir)
    run_config = read_run_config(run_dir)
    algorithms = chosen_algorithms(run_config, algo, config or [])
    replayed = asyncio.run(score_again(run_config, read_steps(run_dir, step), algorithms))
    shown = [each for each in replayed.steps if step in (None, each.step)]
    changes = [change_of(run_config, replayed, each) for each in shown]
    if as_json:
        _print_json(changes)
    else:
        _print(run_config, algorithms, replayed=replayed, changes=changes)

    if out is not None:
        from prime_rl_tools.report import write_report

        write_report(run_dir, out, steps=shown, replayed=replayed, algorithms=algorithms)
        typer.echo(f"wrote {out}", err=as_json)

    if algorithms == algorithms_of(run_config) and any(c.frames_equal is False for c in changes):
        typer.echo(
            "error: frames differ from those that were sent, though the algorithm is the same. A "
            "package, or a plugin that wraps scoring, has another version.",
            err=True,
        )
        raise typer.Exit(1)


def chosen_algorithms(config: RunConfig, algo: str | None, files: list[Path]) -> Algorithms:
    """Algorithms by env, by default the run's own. Raises ``ConfigError``."""
    from prime_rl.config.orchestrator import AlgoConfig
    from prime_rl.errors import ConfigError
    from prime_rl_app.config import load_config
    from prime_rl_tools.replay.score import algorithms_of

    if algo is not None and files:
        raise ConfigError("--algo and --config both name an algorithm. Keep one of them.")
    configured = algorithms_of(config)
    if algo is not None:
        return {env: AlgoConfig(type=algo) for env in configured}
    return algorithms_of(load_config(files), tuple(configured)) if files else configured


def _print(
    config: RunConfig, algorithms: Algorithms, replayed: Replayed, changes: list[StepChange]
) -> None:
    from prime_rl_tools.replay import table
    from prime_rl_tools.replay.compare import most_changed
    from prime_rl_tools.replay.score import algorithms_of
    from prime_rl_tools.terminal import Console

    console = Console()
    table.print_algorithms(
        console, algorithms_of(config), algorithms, config.orchestrator.train.env
    )
    table.print_changes(console, changes)
    steps = {change.step for change in changes}
    stored = [r for each in replayed.steps if each.step in steps for r in each.rollouts]
    table.print_most_changed(console, most_changed([replayed.of(s) for s in stored], NUM_SHOWN))
    copied = sum(change.num_from_file for change in changes)
    if copied:
        console.print(
            f"{copied} rollouts keep their saved streams: scoring them needs a model, or siblings "
            "that are not saved."
        )


def _print_json(changes: list[StepChange]) -> None:
    import json
    from dataclasses import asdict

    typer.echo(json.dumps([asdict(change) for change in changes], indent=2))
