"""``prime-rl plugins list``, ``show``, ``search``, ``check``, ``prove`` and ``new``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from prime_rl.testing.conformance import Report

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_plugins(
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Import each plugin: all that it offers, the hooks it implements and wraps; for "
            "a broken one, the reason.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what --verbose shows as JSON.")
    ] = False,
) -> None:
    """Every installed plugin: distribution, version and offers, by the metadata of the packages.
    The exit code is 1 if one is broken.

    ```
    prime-rl plugins list
    prime-rl plugins list --verbose
    ```
    """
    if not (verbose or as_json):
        from prime_rl_devkit.distributions import distributions
        from prime_rl_devkit.tables import print_distributions

        listed = distributions()
        print_distributions(listed)
        is_broken = any(each.error for each in listed)
    else:
        from prime_rl_devkit.facts import inventory
        from prime_rl_devkit.tables import print_inventory

        rows = inventory()
        print_answer = print_json if as_json else print_inventory
        print_answer(rows)
        is_broken = any(row["error"] for row in rows)

    if is_broken:
        raise typer.Exit(1)


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A plugin, a distribution, or the name of an offer.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """One plugin in full: its origin, its offers, and every setting with its default.

    ```
    prime-rl plugins show grpo
    ```
    """
    from prime_rl_devkit.facts import described
    from prime_rl_devkit.tables import print_described

    print_answer = print_json if as_json else print_described
    print_answer(described(name))


def print_json(value: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME | PATH",
            help="A plugin, a distribution, the name of an offer, or the folder of a package "
            "that need not be installed. Left out: everything installed.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the checked class; VALUE as in TOML."
        ),
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            help="Seconds after which code that does not return is ended; those in which it waits "
            "for a CPU do not count.",
            min=0.1,
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Run the conformance checks of plugins; the exit code is 1 if one fails.

    ```
    prime-rl plugins check grpo
    ```
    """
    from prime_rl_devkit.check import check as run_checks

    reports = run_checks(target, read_settings(settings or []), limit)
    ok = all(report.ok for report in reports)
    if as_json:
        print_json({"ok": ok, "reports": [report.as_dict() for report in reports]})
    else:
        _print_reports(reports, everything=target is not None)

    raise typer.Exit(0 if ok else 1)


def prove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An installed algorithm.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the algorithm, or of trainer.loss, trainer.losses.NAME or "
            "trainer.heads.NAME; VALUE as in TOML.",
        ),
    ] = None,
    group_size: Annotated[str, typer.Option(help="Rollouts of a group, such as 2,4.")] = "2,4",
    loss: Annotated[
        str | None, typer.Option(help="The loss of the rl component.", show_default="default")
    ] = None,
    normalize_by: Annotated[
        str | None,
        typer.Option(
            help="What the loss is divided by, as in [trainer.loss]; constant: G.",
            show_default="what the loss declares",
        ),
    ] = None,
    staleness: Annotated[
        str, typer.Option(help="Versions between the policy that samples and the one that trains.")
    ] = "0,1,2",
    partial_groups: Annotated[
        int | None,
        typer.Option(help="Members after which a group is handed on, the shortest replies first."),
    ] = None,
    rest: Annotated[
        str, typer.Option(help="The others, as in [orchestrator.partial_groups]: group or cancel.")
    ] = "group",
    png: Annotated[Path | None, typer.Option(help="A picture to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """What an algorithm's update is on average, exactly, and whether that is the gradient of what
    it declares.

    ```
    prime-rl plugins prove grpo
    ```
    """
    from prime_rl.errors import ConfigError
    from prime_rl.plugins.hookspecs import TRAINER_GROUP
    from prime_rl.registry.manager import load_plugins
    from prime_rl.registry.offers import ALGORITHM, LOSS, collect, select, settings_of
    from prime_rl_devkit.lab.prove import prove as run_proof
    from prime_rl_devkit.lab.show import picture, print_proof

    algorithms = collect(load_plugins("prime_rl"), ALGORITHM)
    if name not in algorithms and name in collect(load_plugins(TRAINER_GROUP), LOSS):
        raise ConfigError(
            f"plugins prove: {name!r} is a loss, and a proof is of an algorithm with its loss. "
            f"Write: prime-rl plugins prove grpo --loss {name}"
        )
    cls = select(ALGORITHM, name, offers=algorithms, where="plugins prove")
    values = read_settings(settings or [])
    trainer = {} if "trainer" in cls.config_class.model_fields else values.pop("trainer", {})
    proof = run_proof(
        cls(settings_of(cls, ALGORITHM, settings=values, where="--set")),
        group_size=_numbers(group_size, "--group-size"),
        loss=loss,
        normalize_by=normalize_by,
        staleness=_numbers(staleness, "--staleness"),
        partial_groups=_partial(partial_groups, rest),
        trainer=trainer,
    )
    print_answer = print_proof if not as_json else lambda each: print_json(each.as_dict())
    print_answer(proof)
    if png is not None:
        picture(proof, png)


def _partial(at_least: int | None, rest: str) -> Any:
    """Raises ``ConfigError`` for what is no table ``[orchestrator.partial_groups]``."""
    from pydantic import ValidationError

    from prime_rl.config.explain import explain
    from prime_rl.config.orchestrator import PartialGroupsConfig
    from prime_rl.errors import ConfigError

    if at_least is None:
        return None
    try:
        return PartialGroupsConfig(at_least=at_least, rest=rest)
    except ValidationError as error:
        problem = explain(error, PartialGroupsConfig)
        raise ConfigError(f"--partial-groups {at_least} --rest {rest}: {problem}") from error


def _numbers(text: str, option: str) -> list[int]:
    """Raises ``ConfigError`` unless ``text`` is numbers with commas between them."""
    from prime_rl.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option}: expected numbers such as 2,4, got {text!r}") from error


def _print_reports(reports: Sequence[Report], *, everything: bool) -> None:
    """Print a line per report, and below it the failures, or ``everything``."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for report in reports:
        style = "green" if report.ok else "bold red"
        console.print(
            Text.assemble((f"{report.kind} {report.name}", "bold"), "  ", (report.summary(), style))
        )
        shown = report.outcomes if everything else report.failed
        if shown:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            for outcome in shown:
                said = outcome.message or outcome.promise
                grid.add_row(
                    Text(outcome.status, style=STYLES[outcome.status]),
                    outcome.check,
                    Text(said, style="" if outcome.message else "dim"),
                )
            console.print(Padding(grid, (0, 2)))


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs as a table; keys may have dots. Raises ``ConfigError``."""
    import tomllib

    from prime_rl.errors import ConfigError

    try:
        return tomllib.loads("\n".join(pairs))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--set: expected KEY=VALUE with a value as TOML writes it (text in quotes), got "
            f"{' '.join(pairs)!r}: {error}"
        ) from error


def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD...",
            help="Words of a name, a summary, an offer (algorithm.rloo) or its description.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Packages that extend prime-rl, installed or not, from the index that ships.

    ```
    prime-rl plugins search critic
    ```
    """
    from prime_rl_devkit.index import search as find
    from prime_rl_devkit.tables import print_found

    packages = [each.model_dump() | {"installed": each.installed} for each in find(words or [])]
    print_answer = print_json if as_json else print_found
    print_answer(packages)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name in a TOML, such as my-algo.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="algorithm, filter, loss, head, engine, sampler, renderer, source, monitor, "
            "launcher, model, wrapper, observer, command, optimizer, kernel, transport "
            "or environment; several in one package: algorithm+loss."
        ),
    ] = "algorithm",
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder to write; ./prime-rl-NAME if left out.", show_default=False),
    ] = None,
) -> None:
    """Write a package with one working plugin, its tests, a README and a CI workflow.

    ```
    prime-rl plugins new my-algo
    prime-rl plugins new my-loss --kind loss
    ```
    """
    from prime_rl_devkit.scaffold import write_package

    package = write_package(name, kind, directory)
    typer.echo(f"wrote {package.folder}: the {kind} {package.name!r}, {len(package.files)} files")
    typer.echo("\nNext:")
    for command in package.next_commands():
        typer.echo(f"  {command}")
