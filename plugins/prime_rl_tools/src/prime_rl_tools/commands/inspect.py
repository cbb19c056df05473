"""``prime-rl inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, run_names


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN | FILE",
            help="A run (its name or path, or latest), a frame of micro batches "
            "(rollouts_wire/.../rank_R.bin), a file of rollouts (rollouts/step_N.msgpack), or a "
            "folder of weights or of a checkpoint.",
            autocompletion=run_names,
        ),
    ] = Path(LATEST),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output_dir: OutputDir = OUTPUTS,
) -> None:
    """Print the contents of a run or of one of its files.

    ```
    prime-rl inspect
    prime-rl inspect outputs/mine/rollouts/step_3.msgpack
    ```
    """
    from prime_rl.errors import ConfigError
    from prime_rl_app.run_states import find_run
    from prime_rl_tools.replay.inspect import facts_of, print_facts

    if not path.exists() and path.name == str(path) and not path.suffix:  # a name, not a path
        try:
            path = find_run(str(path), output_dir)
        except ConfigError as error:
            if str(path) == LATEST:  # the default: the user has named no file
                raise
            raise ConfigError(f"{path}: no such file, and {error}") from error
    facts = facts_of(path)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
