"""``[sft]``: supervised fine-tuning on a data set of messages, as tables of an ordinary run.

    data set -> env ``conversations``, shown by the source ``dataset`` -> loss ``ce``
    epochs   -> ``max_steps``;  validation -> a second env, which is only measured
    no evaluation -> no engine

What the config says of a key replaces what ``[sft]`` makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from prime_rl.config.base import Settings
from prime_rl.config.explain import explain
from prime_rl.entries import entries, load_entry
from prime_rl.errors import ConfigError

TABLE = "sft"
COUNTER = "num_rows"
"""Entry point of ``prime_rl.api``."""

FILES = (".jsonl", ".csv", ".parquet")
"""How the name of a file with rows ends."""

VALIDATION = "validation"
"""Name of the env that is measured."""


class SftConfig(Settings):
    """``[sft]``: a data set to learn from. ``prime-rl sft`` reads it, and so does every command
    that reads a config."""

    data: str
    """A file (``.jsonl``, ``.csv``, ``.parquet``), or the name of a data set of the hub. A row has
    ``messages``, or ``prompt`` and ``completion``; ``tools`` where messages call some."""
    split: str | None = None
    """Split of a data set of the hub. None: ``train``."""
    subset: str | None = None
    """Subset of a data set of the hub."""
    epochs: PositiveFloat = 1.0
    """Passes over the data; ``max_steps``, if it is set, decides instead."""
    batch_size: PositiveInt = 32
    """Conversations of a step."""
    shuffle: bool = True
    """A new random order on each pass. False: the order of the data."""
    roles: tuple[Literal["system", "user", "assistant", "tool"], ...] | Literal["all"] = (
        "assistant",
    )
    """Whose tokens train. ``"all"``: every token, those of the chat template included."""
    validation: str | None = None
    """Data whose loss is measured and which does not train, as ``data``."""
    validation_split: str | None = None
    """Split of a data set of the hub that validates. None: ``test``."""
    hold_out: NonNegativeInt = 0
    """Instead of ``validation``: measure the first rows of ``data``, so many, and train on the
    others."""
    validate_every: PositiveInt | None = None
    """Steps between two measurements; step ``max_steps`` has one too. None: an epoch."""

    @model_validator(mode="after")
    def _one_validation(self) -> SftConfig:
        if self.validation is not None and self.hold_out:
            raise ValueError("validation and hold_out both name data to measure. Leave one out.")
        if self.validation is None and self.validation_split is not None:
            raise ValueError(
                "validation_split is set, and there is no validation. Name its data: the same as "
                "data, for another split of that."
            )
        return self


FIXED = {
    "batch_size": "Set sft.batch_size.",
    "group_size": "Each conversation trains once an epoch: leave it out.",
}
"""Keys of ``[orchestrator]`` that epochs are counted by."""


def expanded(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables that ``[sft]`` stands for, and the config without it, which lies over them. Raises
    ``ConfigError``."""
    if TABLE not in table:
        return {}, dict(table)
    rest = {name: value for name, value in table.items() if name != TABLE}
    sft = _read(table[TABLE])

    orchestrator = _table(rest, "orchestrator")
    if _table(orchestrator, "train").get("env"):
        raise ConfigError(
            "sft: the config has orchestrator.train.env too, and a run trains on one of them. "
            "Leave one out; a mixed run has an env with the source 'dataset' (docs/sft.md)."
        )

    size = _num_rows(sft) - sft.hold_out
    if size <= 0:
        raise ConfigError(f"sft.hold_out: {sft.hold_out} rows leave none of {sft.data!r} to train")
    for key, instead in FIXED.items():
        if key in orchestrator:
            raise ConfigError(f"orchestrator.{key}: the config has [sft]. {instead}")

    steps_of_epoch = math.ceil(size / sft.batch_size)
    made: dict[str, Any] = {
        "max_steps": max(1, math.ceil(sft.epochs * size / sft.batch_size)),
        "orchestrator": _orchestrator(sft, sft.validate_every or steps_of_epoch),
        "trainer": {"optim": {"lr": 2e-5}},
    }
    inference = _table(rest, "inference")
    if not (_table(orchestrator, "eval").get("env") or inference.get("base_url")):
        made["inference"] = {"replicas": 0}
    return made, rest


def without_data(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose other keys can be checked without its data set, which may have to be loaded.
    Raises ``ConfigError`` for the table ``[sft]``."""
    if TABLE not in table:
        return dict(table)
    sft = _read(table[TABLE])
    rest = {name: value for name, value in table.items() if name != TABLE}
    orchestrator = {**_orchestrator(sft, every=1), **_table(rest, "orchestrator")}
    return {"max_steps": 1, **rest, "orchestrator": orchestrator}


def _read(table: Any) -> SftConfig:
    """Raises ``ConfigError``."""
    try:
        return SftConfig.model_validate(table)
    except ValidationError as error:
        lines = explain(error, SftConfig).splitlines()
        raise ConfigError("\n".join(f"{TABLE}.{line}" for line in lines)) from error


def _orchestrator(sft: SftConfig, every: int) -> dict[str, Any]:
    """``every``: steps between two measurements."""
    source = {"type": "dataset", "demo_key": "conversation", "roles": sft.roles}
    return {
        "batch_size": sft.batch_size,
        "group_size": 1,
        "env_workers": 0,
        "algo": {"type": "sft", "sampling": {"source": source}},
        "sampler": {"type": "standard", "shuffle": sft.shuffle},
        "pre_batch_filters": [],
        "post_batch_filters": [],
        "train": {"env": [*_envs(sft, every)]},
    }


def _envs(sft: SftConfig, every: int) -> list[dict[str, Any]]:
    data = _data(sft, sft.data, sft.split)
    env = {"id": "conversations"}
    train = {**env, "args": data | ({"first": sft.hold_out} if sft.hold_out else {})}
    measured = {**env, "name": VALIDATION, "measure_every": every}
    if sft.validation is not None:
        split = sft.validation_split
        if split is None and not is_file(sft.validation):
            split = "test"
        return [train, {**measured, "args": _data(sft, sft.validation, split)}]
    if sft.hold_out:
        return [train, {**measured, "args": {**data, "num_examples": sft.hold_out}}]
    return [train]


def _data(sft: SftConfig, data: str, split: str | None) -> dict[str, Any]:
    """The args of an env that name its rows. The subset is for ``data`` and ``validation``, as far
    as they are of the hub; if neither is, the reader of files refuses it."""
    of_hub = [each for each in (sft.data, sft.validation) if each and not is_file(each)]
    subset = sft.subset if data in of_hub or not of_hub else None
    args = {"data": data, "split": split, "subset": subset}
    return {name: value for name, value in args.items() if value is not None}


def is_file(data: str) -> bool:
    """Whether data is a file here, and not a data set of the hub."""
    return data.lower().endswith(FILES) or Path(data).expanduser().exists()


def _num_rows(sft: SftConfig) -> int:
    for entry in entries("prime_rl.api"):
        if entry.name == COUNTER:
            try:
                args = _data(sft, sft.data, sft.split)
                return int(load_entry(entry)(args.pop("data"), **args))
            except ConfigError as error:
                raise ConfigError(f"{TABLE}.{error}") from error
    raise ConfigError(
        "sft: no installed package reads data sets. pip install prime-rl-environments"
    )


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}
