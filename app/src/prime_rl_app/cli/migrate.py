"""``prime-rl migrate``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
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
    from prime_rl.errors import ConfigError
    from prime_rl_app.config import build_config, merge
    from prime_rl_app.errors import explained
    from prime_rl_app.migrate import as_whole, sbatch, written
    from prime_rl_app.migrate import migrate as translate
    from prime_rl_app.output import counted
    from prime_rl_app.resolve import check_settings
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
        texts = {target: text}
        said = {target: _summary(migration)}
        if migration.slurm is not None and target.name:
            script = target.with_suffix(".sbatch")
            if script == target:
                raise ConfigError(f"-o {output}: the name of the batch file. Give another name.")
            texts[script] = sbatch(migration, whole, config=target.name, script=script.name)
            said[script] = "the table [slurm] as a batch file"
        _write(texts)
        for path, what in said.items():
            typer.echo(f"{path}: {what}", err=True)

    problems = []
    try:
        check_settings(build_config(without_data(migration.table)))
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


def _write(texts: Mapping[Path, str]) -> None:
    """New files, all of them or none. Raises ``ConfigError``."""
    from prime_rl.errors import ConfigError

    written = []
    try:
        for file, text in texts.items():
            with file.open("x", encoding="utf-8") as stream:
                written.append(file)
                stream.write(text)
    except (OSError, ValueError) as error:
        for each in written:
            each.unlink()
        if isinstance(error, FileExistsError):
            why = "exists already. Give another name, or delete it."
        elif isinstance(error, FileNotFoundError):
            why = "no such folder"
        else:
            why = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(f"-o {file}: {why}") from error


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
        _check_plain(table, ())
    except ImportError:
        raise ConfigError(
            f"{file}: YAML needs a package: pip install 'prime-rl-app[yaml]'"
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not a YAML file: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: expected a table of keys, got {type(table).__name__}")
    return table


def _check_plain(value: Any, place: tuple[Any, ...]) -> None:
    """YAML has values that TOML lacks. Raises ``ValueError``, or ``RecursionError`` for a table
    that contains itself."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                where = f"{'.'.join(map(str, place))}: " if place else ""
                raise ValueError(f"{where}the key {key} is no text. Write it in quotes.")
            _check_plain(inner, (*place, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_plain(inner, (*place, number))
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{'.'.join(map(str, place))}: {error}") from error
    elif not isinstance(value, int | float | date | None):
        kind = type(value).__name__
        raise ValueError(f"{'.'.join(map(str, place))}: TOML has no value of type {kind}")


def _summary(migration: Any) -> str:
    counts = {
        "left out": len(migration.left_out),
        "not known": len(migration.unknown),
        "other defaults": len(migration.defaults),
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{said} (in its comments)" if said else "every key is carried over"
