"""``prime-rl inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A frame of micro batches (rollouts_wire/.../rank_R.bin), a file of rollouts "
            "(rollouts/step_N.msgpack), or a folder of weights or of a checkpoint.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the contents of a file of a run."""
    from prime_rl_tools.replay.inspect import facts_of, print_facts

    facts = facts_of(path)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
