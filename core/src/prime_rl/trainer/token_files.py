"""The files of the token export: one object, or one line of a table, a packed sequence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from prime_rl.trainer.token_columns import COLUMNS, Column, Kind

FACTS: dict[str, Kind | Literal["str"]] = {
    "schema_version": "int",
    "step": "int",
    "rank": "int",
    "micro_step": "int",
    "micro_sequence_idx": "int",
    "export_sequence_idx": "int",
    "env_name": "str",
}
"""What is exported of every sequence, before its tokens."""


@dataclass(frozen=True)
class Exported:
    """The sequences of one micro batch that train anything, end to end."""

    facts: list[dict[str, Any]]
    columns: Mapping[str, Column | None]
    """[T'] tokens of those sequences; None: null as a whole."""
    offsets: list[int]
    """[S' + 1] where each sequence begins, and where the last one ends."""


class Writer(Protocol):
    """A file of one step and rank."""

    def write(self, exported: Exported) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object a sequence; opened for each micro batch, so that nothing stays open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, exported: Exported) -> None:
        """Append."""
        with self.path.open("ab") as file:
            for each in _objects(exported):
                file.write(msgspec.json.encode(each))  # NaN and the infinities become null
                file.write(b"\n")

    def close(self) -> None:
        """Nothing is open."""


def _objects(exported: Exported) -> Iterator[dict[str, Any]]:
    lists = {name: _plain(name, column) for name, column in exported.columns.items()}
    for facts, start, end in zip(
        exported.facts, exported.offsets[:-1], exported.offsets[1:], strict=True
    ):
        parts = {n: None if values is None else values[start:end] for n, values in lists.items()}
        yield facts | parts


def _plain(name: str, column: Column | None) -> list[Any] | None:
    if column is None:
        return None
    values: list[Any] = column.tolist()
    if COLUMNS[name] == "bool" and column.dtype != np.bool_:
        return list(map(_TRUTH.get, values))
    return values


_TRUTH = {1.0: True, 0.0: False}
"""NaN is neither: None."""


class Parquet:
    """One line a sequence, a list column a field; micro batches are held until the step is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow: Any = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
        self._types = {
            "int": self._arrow.int64(),
            "bool": self._arrow.bool_(),
            "float": self._arrow.float32(),
            "str": self._arrow.string(),
        }
        facts = [(name, self._types[kind]) for name, kind in FACTS.items()]
        lists = [(name, self._arrow.list_(self._types[kind])) for name, kind in COLUMNS.items()]
        self._schema = self._arrow.schema(facts + lists)
        self._batches: list[Any] = []

    def write(self, exported: Exported) -> None:
        """Keep."""
        arrays = [
            self._arrow.array([each[name] for each in exported.facts], self._types[kind])
            for name, kind in FACTS.items()
        ]
        arrays += [self._lists(name, exported) for name in COLUMNS]
        self._batches.append(self._arrow.record_batch(arrays, schema=self._schema))

    def close(self) -> None:
        """Write it all."""
        table = self._arrow.Table.from_batches(self._batches, self._schema)
        self._arrow.parquet.write_table(table, self.path)

    def _lists(self, name: str, exported: Exported) -> Any:
        column, kind = exported.columns[name], self._types[COLUMNS[name]]
        if column is None:
            return self._arrow.nulls(len(exported.facts), self._arrow.list_(kind))
        missing = ~np.isfinite(column) if column.dtype.kind == "f" else None
        if COLUMNS[name] == "bool":
            column = column == 1
        values = self._arrow.array(column, kind, mask=missing)
        return self._arrow.ListArray.from_arrays(exported.offsets, values)
