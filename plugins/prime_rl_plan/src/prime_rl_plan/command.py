"""``prime-rl plan``."""

from __future__ import annotations

from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def plan(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml... | RUN [--dotted.key VALUE]...",
            help="As for prime-rl run: TOML files, composed left to right, then overrides; or a "
            "run: its name or path, or latest.",
        ),
    ],
    gpus: Annotated[
        str | None,
        typer.Option(
            help="The machines: 8xH100-80, or 2x8xH100-80 for two. Default: this machine."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what a run would start where, and whether it fits: memory by process and kind, tokens,
    least time and bytes of a step. Starts nothing; needs no GPU and no network.

    Exit code 1: it does not fit.

    ```
    prime-rl plan my.toml --gpus 8xH100-80
    prime-rl plan latest --seq-len 4096
    ```
    """
    import json

    from prime_rl_app.cli.run import split_arguments
    from prime_rl_plan import devices, places, show
    from prime_rl_plan.advice import Change, advise
    from prime_rl_plan.estimate import Plan, estimate

    machines = devices.here() if gpus is None else devices.parse(gpus)
    paths, overrides = split_arguments([*files, *context.args])
    paths = [*map(_config, paths)] if len(paths) == 1 else paths

    def planned(changes: list[Change]) -> tuple[Plan, list[str]]:
        more = [f"--{key}={value}" for key, value in changes]
        placed = places.read(paths, [*overrides, *more], machines)
        own = placed.config, placed.hooks, placed.engine, placed.ranks, placed.places
        return estimate(*own, machines), placed.notes

    found, notes = planned([])
    if as_json:
        typer.echo(json.dumps(show.as_table(found)))
        raise typer.Exit(0 if found.fits else 1)

    for line in [*show.lines(found), *(f"note       {note}" for note in notes)]:
        typer.echo(line)
    typer.echo(show.verdict(found))
    if found.fits:
        return
    changes, _ = advise(found, lambda each: planned(each)[0])
    if not changes:
        typer.echo("no setting that plan knows makes it fit: use more or larger GPUs")
    for key, value in changes:
        typer.echo(f"change     {key} = {value}")
    raise typer.Exit(1)


def _config(given: str) -> str:
    """A config itself, or that of a run."""
    from prime_rl_app.runs import find_run
    from prime_rl_tools.commands.options import OUTPUTS

    if given.endswith((".toml", ".json")):
        return given
    return str(find_run(given, OUTPUTS) / "configs" / "run.json")
