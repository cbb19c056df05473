"""``prime-rl report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, RunName


def report(
    run: RunName = LATEST,
    out: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in the run directory.")
    ] = None,
    beside: Annotated[
        list[str] | None, typer.Option(help="Another run, to compare: its name or path, or latest.")
    ] = None,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Write one HTML page that shows a run: curves, every rollout, and credit token by token.

    ```
    prime-rl report
    prime-rl report mine --beside yours
    ```
    """
    from prime_rl_app.output import counted
    from prime_rl_app.run_states import find_run
    from prime_rl_tools.report import write_report

    run_dir = find_run(run, output_dir)

    path = out or run_dir / "report.html"
    others = [find_run(each, output_dir) for each in beside or ()]
    facts = write_report(run_dir, path, beside=others)
    typer.echo(
        f"wrote {path}: {counted(facts.num_rollouts, 'rollout')}, "
        f"{counted(facts.num_tokens, 'token')}, "
        f"{facts.num_bytes / 1e6:.1f} MB"
    )
