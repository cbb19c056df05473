"""``prime-rl export``: good rollouts of a run as a data set of messages, for ``[sft]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, RunName


def export(
    run: RunName = LATEST,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: sft.jsonl in the run directory.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Leave out rollouts with a lower reward.")
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(
            min=1, help="For each example, keep this many rollouts with the highest reward."
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Only of this env; may be given several times.")
    ] = None,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Write the rollouts of a run as a data set of messages, one line each. Replies that were cut
    off, and conversations that occur twice, are left out. `[sft] data` takes the file.

    ```
    prime-rl export latest --min-reward 0.9 --out good.jsonl
    ```
    """
    from prime_rl_app.run_states import find_run
    from prime_rl_tools.conversations import write_conversations

    run_dir = find_run(run, output_dir)
    path = out or run_dir / "sft.jsonl"
    counts = write_conversations(run_dir, path, min_reward=min_reward, best=best, envs=env or ())
    left_out = ", ".join(f"{number:,} {why}" for why, number in counts.left_out.items() if number)
    typer.echo(f"wrote {path}: {counts.written:,} conversations; left out: {left_out or 'none'}")
