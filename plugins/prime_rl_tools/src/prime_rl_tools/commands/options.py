"""Options that commands share: RUN, and one option for each field of a settings class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer

from prime_rl.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from prime_rl.config.base import Settings

AnySettings = TypeVar("AnySettings", bound="Settings")

OUTPUTS = Path("outputs")
LATEST = "latest"
"""The default of ``RunName`` in commands that only read a run."""

OutputDir = Annotated[
    Path, typer.Option("--output-dir", help="Folder with run directories, as output_dir names it.")
]


def run_names(incomplete: str) -> list[str]:
    """What a shell completes RUN to: ``latest`` and the runs in ``outputs``."""
    names = [path.parent.parent.name for path in OUTPUTS.glob("*/configs/run.json")]
    return [name for name in [LATEST, *sorted(names)] if name.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name or path of a run; latest: the newest.",
        show_default=False,
        autocompletion=run_names,
    ),
]

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def with_options(model: type[Settings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its parameter ``options`` is replaced by one option for each field of
    ``model`` that is not a table, and receives those that were given, unchecked."""
    fields = {name: field for name, field in model.model_fields.items() if not _is_table(field)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in fields}
            command(**arguments, options={k: v for k, v in values.items() if v is not None})

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "options":
                parameters += [_parameter(name, field) for name, field in fields.items()]
            else:
                parameters.append(parameter.replace(kind=KEYWORD_ONLY))

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def validated(model: type[AnySettings], table: Mapping[str, Any]) -> AnySettings:
    """The settings; names in messages are those of options. Raises ``ConfigError``."""
    from pydantic import ValidationError

    try:
        return model.model_validate(table)
    except ValidationError as error:
        from prime_rl.config.explain import explain

        problems = (line.partition(":") for line in explain(error, model).splitlines())
        said = (f"--{place.replace('_', '-')}:{problem}" for place, _, problem in problems)
        raise ConfigError("\n".join(said)) from error


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """What typer reads. The default stays the settings class's: None means not given."""
    typed = _plain(field.annotation)
    doc = " ".join((field.description or "").split())
    default = field.default
    if typed is bool:  # no --no-NAME
        option = typer.Option(f"--{name.replace('_', '-')}", help=doc, show_default=False)
    else:
        shown = "" if default in (None, (), "") else f" [default: {default}]"
        option = typer.Option(help=doc + shown, show_default=False)

    annotation = Annotated[typed | None, option]  # type: ignore[valid-type]  # known at run time only
    return inspect.Parameter(name, KEYWORD_ONLY, default=None, annotation=annotation)


def _plain(annotation: Any) -> Any:
    """A type without its constraints, which the settings class checks; a table is given as text."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _plain(arguments[0])
    if origin is tuple:
        return list[_plain(arguments[0])]  # type: ignore[misc]
    if origin is dict:
        return str
    if type(None) in arguments:
        return _plain(next(each for each in arguments if each is not type(None)))
    return annotation


def _is_table(field: FieldInfo) -> bool:
    from pydantic import BaseModel

    typed = _plain(field.annotation)
    return isinstance(typed, type) and issubclass(typed, BaseModel)
