"""Difficulty pools on disk: three JSON-lines files, found again by what the examples say.

    easy_examples.jsonl, hard_examples.jsonl    one retired example a line
    rollout_buffer.jsonl                        first the sampler's own state (random numbers, the
                                                keys hashed), then one env a line (how far it is in
                                                its examples, what came back since the last step)

An example is known by the sha256 of the JSON of its ``hash_keys``, so the pools fit although the
examples' order has changed. Of examples that hash alike, the one of the same env and index is taken
first: nothing moves when nothing has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prime_rl import ConfigError, SampledEnv
from prime_rl_samplers.rotation import POOLS, Pool

ENV_NAME = "env_name"
"""The hash key that stands for the env's label; every other is a field of its tasks."""

STATE_FILE = "rollout_buffer.jsonl"

Place = tuple[int, int]
"""An example's env and its index there."""


@dataclass(frozen=True)
class Row:
    """One retired example as a file holds it."""

    hash: str
    env_name: str
    example_id: int
    fields: Mapping[str, Any]
    """The values hashed, by key: for whoever reads the file."""


def pool_file(directory: Path, pool: Pool) -> Path:
    """Where one pool is kept."""
    return directory / f"{pool}_examples.jsonl"


def row_of(env: SampledEnv, example: int, keys: Sequence[str]) -> Row:
    """What is written of one example. Raises ``ConfigError`` if its task lacks a key, and
    ``IndexError`` beyond the env's end."""
    known = {**env.task(example), ENV_NAME: env.name}
    if missing := [key for key in keys if key not in known]:
        raise ConfigError(
            f"orchestrator.buffer.hash_keys: env {env.name!r}, example {example}: got no field "
            f"{missing[0]!r}, expected one of {', '.join(sorted(known))}. List fields that tell "
            "its examples apart."
        )
    fields = {key: known[key] for key in keys}
    try:
        text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"orchestrator.buffer.hash_keys: env {env.name!r}, example {example}: expected fields "
            f"that JSON can hold, got {error}. List other fields."
        ) from error
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Row(digest, env.name, example, json.loads(text))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One pool, one example a line."""
    write_lines(path, (asdict(row) for row in rows))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_pools(directory: Path) -> dict[Pool, list[Row]]:
    """Both pools. Raises ``ConfigError`` naming the file and the line."""
    return {pool: _read_rows(pool_file(directory, pool)) for pool in POOLS}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file. Raises ``ConfigError`` naming the file and the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"difficulty_pools: cannot read {path}: {error.strerror}. Expected a folder that this "
            "sampler saved: checkpoints/step_N/orchestrator of a run."
        ) from error
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: expected JSON, got {line[:60]!r} ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: expected a JSON object, got {line[:60]!r}")
    return record


def _read_rows(path: Path) -> list[Row]:
    rows = []
    for number, record in enumerate(read_lines(path), 1):
        try:
            rows.append(Row(**record))
        except TypeError as error:
            raise ConfigError(
                f"{path}:{number}: expected an example of a pool (hash, env_name, example_id, "
                f"fields), got keys {', '.join(sorted(record))}"
            ) from error
    return rows


def find(
    pools: Mapping[Pool, Sequence[Row]], envs: Sequence[SampledEnv], keys: Sequence[str]
) -> tuple[list[tuple[Place, Pool]], int]:
    """Where the saved examples are now, each place at most once, and how many are nowhere."""
    free = _places(envs, keys) if any(pools.values()) else {}
    indices = {env.name: index for index, env in enumerate(envs)}
    found: list[tuple[Place, Pool]] = []
    moved: list[tuple[Row, Pool]] = []
    for pool, rows in pools.items():
        for row in rows:
            place = (indices.get(row.env_name, -1), row.example_id)
            places = free.get(row.hash, {})
            if place in places:
                del places[place]
                found.append((place, pool))
            else:
                moved.append((row, pool))
    missing = 0
    for row, pool in moved:
        if left := free.get(row.hash):
            place = next(iter(left))
            del left[place]
            found.append((place, pool))
        else:
            missing += 1
    return found, missing


def _places(envs: Sequence[SampledEnv], keys: Sequence[str]) -> dict[str, dict[Place, None]]:
    """Every example that can be retired, by its hash; a dict of places is an ordered set."""
    places: dict[str, dict[Place, None]] = {}
    for index, env in enumerate(envs):
        for example in range(env.num_examples or 0):
            try:
                row = row_of(env, example, keys)
            except IndexError:
                # A source may hold more demonstrations than its env has tasks: never retired.
                break
            places.setdefault(row.hash, {})[index, example] = None
    return places
