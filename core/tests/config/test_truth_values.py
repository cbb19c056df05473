"""``true`` and ``false`` are no numbers: in every table of the run, and in settings of plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import Field, ValidationError

from prime_rl import PluginConfig
from prime_rl.config.base import Settings
from prime_rl.config.contract import FrozenModel
from prime_rl.config.run import RunConfig

NUMBERS = (int, float, int | None, float | None)


def tables(cls: type[Settings]) -> Iterator[type[Settings]]:
    """A class and those of its tables, at any depth."""
    yield cls
    for field in cls.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, (Settings, PluginConfig)):
                yield from tables(part)


NUMBER_FIELDS = sorted(
    {
        (table, name)
        for table in tables(RunConfig)
        for name, field in table.model_fields.items()
        if field.annotation in NUMBERS
    },
    key=str,
)


NEEDED = {FrozenModel: {"name": "judge", "base_url": ["http://127.0.0.1:8000/v1"]}}
"""Of tables that look at these keys first."""


def test_there_are_such_fields() -> None:
    names = {name for _, name in NUMBER_FIELDS}
    assert len(NUMBER_FIELDS) > 30 and {"max_steps", "lr", "seq_len"} <= names


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("table", "name"), NUMBER_FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_a_number_is_not_true(table: type[Settings], name: str, value: bool) -> None:
    with pytest.raises(ValidationError) as caught:
        table.model_validate(NEEDED.get(table, {}) | {name: value})
    said = {error["loc"]: error["msg"] for error in caught.value.errors()}
    assert "expected a number, not true or false" in said[(name,)]


class Several(PluginConfig):
    betas: tuple[float, float] = (0.9, 0.99)
    layers: list[int] = []
    limit: int | None = None
    on: bool = False
    either: bool | float = 1.0
    any: Any = None
    choice: int | bool = 0
    off: int | Literal[False] = 1
    word: Literal["auto"] | float = 1.0
    penalties: dict[str, float] = {}
    rows: list[dict[str, float]] = []
    several: tuple[int, ...] = ()
    positive: Annotated[int, Field(gt=0)] | None = None


@pytest.mark.parametrize(
    "table",
    [
        *({"betas": [True, 0.9]}, {"layers": [1, False]}, {"limit": True}, {"word": True}),
        *({"penalties": {"kl": True}}, {"rows": [{"a": 1.0}, {"b": False}]}),
        *({"several": [1, True]}, {"positive": True}),
    ],
    ids=str,
)
def test_nor_in_a_list_or_a_plugins_table(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="expected a number"):
        Several.model_validate(table)


@pytest.mark.parametrize(
    "table",
    [
        *({"on": True}, {"either": True}, {"any": True}, {"choice": False}, {"betas": [1, 0]}),
        *({"off": False}, {"word": "auto"}, {"penalties": {"kl": 1}}, {"several": [1]}),
    ],
    ids=str,
)
def test_other_fields_take_them(table: dict[str, Any]) -> None:
    assert Several.model_validate(table)
