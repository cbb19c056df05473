"""``prime-rl runs``, ``prime-rl status`` and ``prime-rl stop``: runs from another terminal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, RunName

if TYPE_CHECKING:
    from rich.text import Text

    from prime_rl_app.run_states import RunInfo

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

COLORS = {
    "running": "green",
    "failed": "red",
    "died": "red",
    "stopped": "yellow",
    "dry run": "dim",
    "unknown": "dim",
}


def runs(output_dir: OutputDir = OUTPUTS, as_json: AsJson = False) -> None:
    """List runs: state, step, reward of the last batch, age. The newest comes last.

    ```
    prime-rl runs --output-dir outputs
    ```
    """
    from prime_rl_app.run_states import list_runs

    listed = list_runs(output_dir, lambda error: typer.echo(f"error: {error}", err=True))
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in listed], indent=2))
    elif not listed:
        typer.echo(f"no runs in {output_dir}. Start one with prime-rl run, or set --output-dir.")
    else:
        _print_runs(listed)


def _print_runs(found: list[RunInfo]) -> None:
    from rich.table import Table
    from rich.text import Text

    from prime_rl_app.output import as_reward
    from prime_rl_tools.terminal import Console

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold", ratio=1)
    table.add_column("state", no_wrap=True)
    for title in ("step", "reward", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for run in found:
        reward = "-" if run.reward is None else as_reward(run.reward)
        progress = f"{run.step}/{run.max_steps}"
        table.add_row(
            Text(run.name), _state(run.state), progress, reward, age(time.time() - run.started)
        )

    Console().print(table)


def status(run: RunName = LATEST, output_dir: OutputDir = OUTPUTS, as_json: AsJson = False) -> None:
    """Say how far a run is and what each of its processes does or waits for.

    ```
    prime-rl status latest
    ```
    """
    from prime_rl_app.files import reading
    from prime_rl_app.run_states import failures, find_run, full_disk, processes, run_info
    from prime_rl_tools.view.summary import LOG, read_restarts, restarts_text

    run_dir = find_run(run, output_dir)
    info = run_info(run_dir)
    reports = processes(run_dir)
    with reading(run_dir / LOG):
        restarts = read_restarts(run_dir)
    if as_json:
        rows = {name: asdict(report) for name, report in reports.items()}
        table = {**asdict(info), "restarts": restarts, "processes": rows}
        typer.echo(json.dumps(table, indent=2))
        return

    from prime_rl_tools.terminal import Console

    console = Console()
    console.print(_headline(info))
    if restarts:
        console.print(f"restarts  {restarts_text(restarts)}", markup=False, soft_wrap=True)
    if info.state == "running":
        console.print(_processes(reports))
    elif info.state in ("failed", "died"):
        for error in failures(run_dir):
            console.print(f"failed  {error}", markup=False, soft_wrap=True)
        console.print(f"logs    {run_dir / 'logs' / 'latest'}", markup=False, soft_wrap=True)

    fault = full_disk(run_dir)
    if fault:
        console.print(f"disk    {fault}", markup=False, soft_wrap=True)


def _headline(info: RunInfo) -> Any:
    from rich.table import Table
    from rich.text import Text

    from prime_rl_app.output import as_reward
    from prime_rl_app.run_states import last_batch
    from prime_rl_tools.view.outcomes import outcomes, outcomes_style, outcomes_text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("run", Text(info.path, "bold"))
    table.add_row("state", _state(info.state))
    table.add_row("step", f"{info.step}/{info.max_steps}")
    table.add_row("reward", "-" if info.reward is None else as_reward(info.reward))
    shares = outcomes(last_batch(Path(info.path) / "metrics.jsonl"))
    if shares:
        table.add_row("of rollouts", Text(outcomes_text(shares), outcomes_style(shares)))
    table.add_row("started", f"{age(time.time() - info.started)} ago")
    return table


def _processes(reports: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    from prime_rl_tools.view.live import plain

    table = Table(box=None, header_style="dim", padding=(1, 2, 0, 0))
    for title in ("process", "does", "waits for", "since"):
        table.add_column(title, no_wrap=title in ("process", "since"))
    for name, report in reports.items():
        share = "" if report.progress is None else f" {report.progress:.0%}"
        numbers = "".join(f"\n{key} {plain(value)}" for key, value in report.detail.items())
        does = Text.assemble(report.state + share, (numbers, "dim"))
        waits = Text(report.waiting_for or "", "yellow")
        since = age(time.time() - report.time)
        table.add_row(Text(name, "bold"), does, waits, since)

    return table


def stop(
    run: RunName,
    output_dir: OutputDir = OUTPUTS,
    timeout: Annotated[
        float, typer.Option(help="Seconds the run may take to finish its step, save and end.")
    ] = 1800.0,
) -> None:
    """Have a run save its weights and end cleanly, as Ctrl-C in its own terminal would, and wait
    until it is gone. A second stop ends it at once.

    ```
    prime-rl stop latest
    ```
    """
    from prime_rl.errors import RunError
    from prime_rl_app.run_states import find_run, state_of
    from prime_rl_app.run_states import stop as stop_run

    run_dir = find_run(run, output_dir)
    if state_of(run_dir) == "running":
        typer.echo("saving weights; another `prime-rl stop` ends the run at once", err=True)
    try:
        was_running = stop_run(run_dir, timeout)
    except RunError as error:
        typer.echo(f"error: {run_dir}: {error}", err=True)
        raise typer.Exit(1) from None

    state = state_of(run_dir)
    typer.echo(f"{run_dir}: {state if was_running else f'does not run (it is {state})'}")


def scale(
    run: RunName,
    replicas: Annotated[
        int | None,
        typer.Argument(min=0, metavar="REPLICAS", help="Number of engines of the run."),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="An engine that runs elsewhere; once for each. They replace the others."),
    ] = None,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Change the number of engines while a run trains. A new engine loads the current weights
    first. Requests of an engine that leaves are sent again to the others.

    ```
    prime-rl scale latest 3
    ```
    """
    from prime_rl.errors import ConfigError
    from prime_rl_app.run_states import find_run, state_of
    from prime_rl_app.scaling import Wish, bare, check_wish

    run_dir = find_run(run, output_dir)
    if state_of(run_dir) != "running":
        raise ConfigError(f"{run_dir} does not run (it is {state_of(run_dir)}): nothing to scale")
    wish = Wish(replicas, [bare(url) for url in base_url] if base_url else None)
    check_wish(run_dir, wish)
    wish.write(run_dir)
    asked = ", ".join(wish.base_url or ()) or f"{replicas} engine{'s' * (replicas != 1)}"
    typer.echo(f"{run_dir}: asked for {asked}. `prime-rl status {run_dir.name}` shows them.")


def age(seconds: float) -> str:
    """``95`` -> ``1 min``: the largest unit that fits."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _state(state: str) -> Text:
    from rich.text import Text

    return Text(state, COLORS.get(state, ""))
