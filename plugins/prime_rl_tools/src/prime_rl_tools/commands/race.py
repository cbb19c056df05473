"""``prime-rl race``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prime_rl_tools.race.schedule import Budget, Entry, Point

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def race(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="A.toml B.toml... [--dotted.key VALUE]...",
            help="The configs, then overrides for all of them.",
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each config: 1, 2, ...")] = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="Budget: steps.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget: trained tokens.")] = None,
    cpu_seconds: Annotated[float | None, typer.Option(help="Budget: CPU seconds.")] = None,
    base: Annotated[
        Path | None, typer.Option(help="A config that each of the others is laid over.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Compare with this config only, by name: fewer intervals.")
    ] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the runs. A race goes on where it was interrupted.")
    ] = Path("outputs/race"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare configs: train each with the same seeds and budget, one run after the other, and say
    which has the better held-out reward.

    Two configs differ only if the paired difference is large against its spread. You can
    look at any time and add seeds: the intervals stay valid.

    ```
    prime-rl race grpo.toml max_rl.toml --seeds 3 --steps 40
    ```
    """
    from prime_rl.errors import ConfigError, RunError
    from prime_rl_app.cli.run import split_arguments
    from prime_rl_tools.race.schedule import Budget, read_entries
    from prime_rl_tools.race.show import as_json as shown
    from prime_rl_tools.race.show import draw_race, print_race
    from prime_rl_tools.terminal import Console

    paths, overrides = split_arguments([*files, *context.args])
    budget = Budget(steps, tokens, cpu_seconds)
    entries = read_entries([Path(path) for path in paths], overrides, budget=budget, base=base)
    if against not in (None, *(entry.name for entry in entries)):
        names = ", ".join(entry.name for entry in entries)
        raise ConfigError(f"--against {against}: no such config in the race, which has {names}")

    try:
        results = _results(entries, seeds, budget=budget, output_dir=output_dir)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

    picture = output_dir / "race.png"
    draw_race(picture, output_dir, results=results, against=against)
    if as_json:
        typer.echo(shown(results, against))
    else:
        print_race(Console(), results, against)
        typer.echo(f"\n{picture}")


def _results(
    entries: Sequence[Entry], seeds: int, budget: Budget, output_dir: Path
) -> dict[str, dict[int, Point]]:
    """Train seed by seed, so that an interrupted race has pairs."""
    from prime_rl_tools.race.schedule import result_of
    from prime_rl_tools.terminal import Console

    progress = Console(stderr=True)
    results: dict[str, dict[int, Point]] = {entry.name: {} for entry in entries}
    for seed in range(1, seeds + 1):
        for entry in entries:
            point, known = result_of(entry, seed, budget=budget, folder=output_dir)
            results[entry.name][seed] = point
            progress.print(
                f"{entry.name} seed {seed}: held-out reward {point.reward:.3f} at step "
                f"{point.step}{' (known)' if known else ''}",
                highlight=False,
            )

    return results
