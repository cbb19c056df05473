"""``prime-rl report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write one HTML page that shows a run: curves, every rollout, and credit token by token."""
    from prime_rl_tools.report import write_report

    path = out or run_dir / "report.html"
    facts = write_report(run_dir, path)
    typer.echo(
        f"wrote {path}: {facts.num_rollouts:,} rollouts, {facts.num_tokens:,} tokens, "
        f"{facts.num_bytes / 1e6:.1f} MB"
    )
