"""``prime-rl migrate``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer


def migrate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml...",
            help="TOML or YAML files of upstream prime-rl, TRL or verl, composed left to right.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="The file to write. Without it: standard output."),
    ] = None,
) -> None:
    """Translate a config of upstream prime-rl (RL or SFT), TRL (GRPOConfig) or verl. Comments in
    the new file say what was left out, and which defaults differ.

    ```
    prime-rl migrate rl.toml -o mine.toml
    ```
    """
    from pathlib import Path

    from prime_rl.errors import ConfigError
    from prime_rl_app.config import build_config, merge
    from prime_rl_app.errors import explained
    from prime_rl_app.migrate import as_whole, sbatch, written
    from prime_rl_app.migrate import migrate as translate
    from prime_rl_app.output import counted
    from prime_rl_app.sft import without_data

    whole: dict[str, Any] = {}
    for file in files:
        if file != "@":
            table = read(Path(file.removeprefix("@")))
            whole = merge(whole, as_whole(table))
    migration = translate(whole)
    text = written(migration, [Path(file).name for file in files if file != "@"])
    if output is None:
        typer.echo(text, nl=False)
    else:
        target = Path(output)
        if target.exists():
            raise ConfigError(f"{output}: exists already. Give another name, or delete it.")
        target.write_text(text, "utf-8")
        typer.echo(f"{output}: {_summary(migration)}", err=True)
        if migration.slurm is not None:
            script = target.with_suffix(".sbatch")
            script.write_text(
                sbatch(migration, whole, config=target.name, script=script.name), "utf-8"
            )
            typer.echo(f"{script}: the table [slurm] as a batch file", err=True)

    problems = []
    try:
        build_config(without_data(migration.table))
    except ConfigError as error:
        problems = explained(str(error), [output] if output else []).splitlines()
    for problem in problems:
        typer.echo(f"to complete: {problem}", err=True)
    if migration.unknown:
        number = len(migration.unknown)
        keys = f"{counted(number, 'key')} {'is' if number == 1 else 'are'}"
        unknown = "\n".join(f"  {each}" for each in migration.unknown)
        raise ConfigError(
            f"{keys} neither ours nor known of another framework, and left out:\n{unknown}"
        )
    if output is not None and not problems:
        command = "sft" if "sft" in migration.table else "run"
        typer.echo(f"check it: prime-rl {command} {output} --dry-run", err=True)


def read(file: Any) -> dict[str, Any]:
    """A TOML, JSON or YAML file as a table. Raises ``ConfigError``."""
    from prime_rl.errors import ConfigError
    from prime_rl_app.config import read_toml

    if file.suffix not in (".yaml", ".yml"):
        return read_toml(file)
    try:
        import yaml  # type: ignore[import-untyped]

        class Loader(yaml.SafeLoader):  # type: ignore[misc]
            """Reads ``1e-6`` and ``1.5e6`` as numbers, as the other frameworks do; YAML 1.1 asks
            for a dot and a sign. Three digits of an exponent are no float: a name."""

        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:float",
            re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d{1,2}$"),
            list("-+0123456789"),
        )
        table = Loader(file.read_text("utf-8-sig")).get_single_data()
    except ImportError:
        raise ConfigError(
            f"{file}: YAML needs a package: pip install 'prime-rl-app[yaml]'"
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not a YAML file: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: expected a table of keys, got {type(table).__name__}")
    return table


def _summary(migration: Any) -> str:
    counts = {
        "left out": len(migration.left_out),
        "not known": len(migration.unknown),
        "other defaults": len(migration.defaults),
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{said} (in its comments)" if said else "every key is carried over"
