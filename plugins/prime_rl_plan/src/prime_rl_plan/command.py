"""``prime-rl plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from prime_rl_plan.advice import Change
    from prime_rl_plan.devices import Machines
    from prime_rl_plan.estimate import Plan
    from prime_rl_plan.places import Placed

    Planned: TypeAlias = Callable[[list[Change]], tuple[Plan, Placed]]
    """Plans the config with changes; and where its processes are."""

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
    suggested: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="Print the three fastest divisions of the GPUs between engines and trainer that "
            "fit, with the lines of TOML that make them.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what a run would start where, and whether it fits: memory by process and kind, tokens,
    least time and bytes of a step. Starts nothing; needs no GPU and no network.

    Exit code 1: it does not fit; with --suggest: nothing fits.

    ```
    prime-rl plan my.toml --gpus 8xH100-80
    prime-rl plan my.toml --gpus 8xH100-80 --suggest
    prime-rl plan latest --seq-len 4096
    ```
    """
    import json

    from prime_rl_app.cli.run import split_arguments
    from prime_rl_plan import devices, places, show
    from prime_rl_plan.advice import advise
    from prime_rl_plan.estimate import estimate

    machines = devices.here() if gpus is None else devices.parse(gpus)
    paths, overrides = split_arguments([*files, *context.args])
    paths = [*map(_config, paths)] if len(paths) == 1 else paths

    def planned(changes: list[Change]) -> tuple[Plan, Placed]:
        more = [f"--{key}={value}" for key, value in changes]
        placed = places.read(paths, [*overrides, *more], machines)
        parts = placed.config, placed.hooks, placed.engine, placed.ranks, placed.places
        return estimate(*parts, machines), placed

    if suggested:
        raise typer.Exit(_suggest(machines, planned, as_json=as_json))
    found, placed = planned([])
    if as_json:
        typer.echo(json.dumps(show.as_table(found)))
        raise typer.Exit(0 if found.fits else 1)

    for line in [*show.lines(found), *(f"note       {note}" for note in placed.notes)]:
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


def _suggest(machines: Machines, planned: Planned, as_json: bool) -> int:
    """Print the best layouts. Exit code 1: nothing fits."""
    import json

    from prime_rl import ConfigError
    from prime_rl_plan import show
    from prime_rl_plan.suggest import suggest

    shared, state, plan, notes = _start(machines, planned)

    def again(changes: Sequence[Change]) -> Plan:
        changed, placed = planned([*(dict(shared) | dict(changes)).items()])
        refused = [note for note in placed.notes if "would refuse" in note and note not in notes]
        if refused:
            raise ConfigError(refused[0])
        return changed

    suggestions = suggest(plan, again, shared)
    if as_json:
        typer.echo(json.dumps([show.suggestion_table(each) for each in suggestions]))
    else:
        for line in show.suggestion_lines(state, suggestions):
            typer.echo(line)
    return 0 if suggestions else 1


def _start(machines: Machines, planned: Planned) -> tuple[list[Change], str, Plan, list[str]]:
    """Changes that each layout has, what to say of the config as it is, a plan to start from, and
    its notes. If the config's own division is not possible on these machines, the plan is of
    another. Raises the ``ConfigError`` of the config as it is, if no other division is possible."""
    from prime_rl import ConfigError
    from prime_rl_plan import show
    from prime_rl_plan.suggest import SEVERAL_MACHINES, first_divisions

    problem: ConfigError | None = None
    starts: list[list[Change]] = [[]] if machines.nodes == 1 else [[], [*SEVERAL_MACHINES]]
    try:
        plan, placed = planned([])
    except ConfigError as error:
        problem = error
        state = f"not on these machines: {error}"
    else:
        state = show.state(plan)
        if machines.nodes == 1 or placed.is_remote:
            return [], state, plan, placed.notes
        state += ", on one of these machines"
        starts = starts[1:]  # its launcher uses no other

    for shared in starts if machines.count else ():
        for division in first_divisions(machines):
            try:
                other, placed = planned([*shared, *division])
            except ConfigError:
                continue
            if machines.nodes == 1 or placed.is_remote:
                return [*shared, *division], state, other, placed.notes

    if problem is not None:
        raise problem
    return [], state, plan, placed.notes


def _config(given: str) -> str:
    """A config itself, or that of a run."""
    from prime_rl_app.run_states import find_run
    from prime_rl_tools.commands.options import OUTPUTS

    if given.endswith((".toml", ".json")):
        return given
    return str(find_run(given, OUTPUTS) / "configs" / "run.json")
