"""The bases of every settings class: frozen, documented under the field. And of keys that are
gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator


def check_variable(name: str) -> str:
    """The name, if an environment variable may have it. Raises ``ValueError``."""
    # Processes would pass most of these on; a shell, or the file of a job, between them does not.
    if not name or any(each in "= " or not each.isprintable() for each in name):
        raise ValueError(
            "expected the name of an environment variable, not empty, without '=', spaces and "
            "control characters"
        )
    return name


def _variable_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("expected a text without the character NUL, which ends it for a process")
    return value


def _host(name: str) -> str:
    # A scheme, a path or a space would fail only where the process binds it.
    if not name or not all(each.isalnum() or each in ".:_%[]-" for each in name):
        raise ValueError("expected an IP address or the name of a host, such as '127.0.0.1'")
    return name


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_HEADER = re.compile(
    r"auth|cookie|secret|password|credential|jwt|(^|[-_])(\w*key|token)s?$", re.IGNORECASE
)


def _header(name: str) -> str:
    if not _HEADER.fullmatch(name):
        raise ValueError("expected the name of an HTTP header, such as 'X-Team'")
    return name


def _public_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if _SECRET_HEADER.search(name):
            raise ValueError(
                f"by its name, the header {name} holds a secret, and the config is written to the "
                f'run directory. Export its value, and set headers_from_env = {{ "{name}" = '
                '"VARIABLE" }; a bearer key is api_key_var'
            )
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"the header {name} has a character that no header may have")
    return headers


VariableName = Annotated[str, AfterValidator(check_variable)]
Variables = dict[VariableName, Annotated[str, AfterValidator(_variable_value)]]
"""Environment variables of a process."""
HeaderName = Annotated[str, AfterValidator(_header)]
Headers = Annotated[dict[HeaderName, str], AfterValidator(_public_headers)]
"""Headers without secrets."""
HostName = Annotated[str, AfterValidator(_host)]


def refuse_truth(cls: type[BaseModel], table: Any) -> Any:
    """The table, if no field that takes numbers has ``true`` or ``false``: pydantic reads them as 1
    and 0. Raises ``ValidationError`` with each such field."""
    if not isinstance(table, dict):
        return table
    wrong: list[Any] = []

    for name, value in table.items():
        field = cls.model_fields.get(name)
        if field is None or not _has_truth(value):
            continue

        leaves = {*_leaves(field.annotation)}
        # A table of its own class looks at its own fields.
        if leaves & {int, float} and leaves <= {int, float, str, NoneType, ...}:
            error = ValueError("expected a number, not true or false")
            wrong.append(
                {"type": "value_error", "loc": (name,), "input": value, "ctx": {"error": error}}
            )

    if wrong:
        raise ValidationError.from_exception_data(cls.__name__, wrong)
    return table


def _has_truth(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_truth(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_has_truth(each) for each in value)
    return isinstance(value, bool)


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from (type(part) for part in parts)
        return
    if not parts:
        yield annotation
    for part in parts[:1] if get_origin(annotation) is Annotated else parts:
        yield from _leaves(part)


class Settings(BaseModel):
    """One table of the TOML. Unknown keys are errors; the string under a field documents it."""

    # The validator is built when a value is first validated: most commands validate few classes.
    model_config = ConfigDict(
        defer_build=True, extra="forbid", frozen=True,
        use_attribute_docstrings=True, protected_namespaces=(),
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth(cls, table: Any) -> Any:
        return refuse_truth(cls, table)


class PluginTable(Settings):
    """A table that selects a plugin's class; keys it does not declare belong to that class."""

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the plugin validates."""
        return dict(self.model_extra or {})


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A key that is gone, and what to write instead.

    A config of an earlier version still loads, because its resolved ``run.json`` has every key.
    The old default is left out without a word, as nothing changes. Any other value is moved to
    ``moved_to``, or left out, with a ``ConfigWarning``.
    """

    default: Any
    """Its old default, which the code has as a constant now."""
    instead: str
    """A sentence for the user."""
    moved_to: str | None = None
    """The dotted key that takes the value. For core's own keys."""
    selected_by: str | None = None
    """For a table that moves: the key beside it, gone too, that named the plugin which the table is
    for. Its value becomes the table's ``type``. It may be a default of the application, for configs
    that left it out."""
