"""Difficulty pools on disk: three JSON-lines files. Examples are identified by their content.

    easy_examples.jsonl, hard_examples.jsonl    one retired example per line
    rollout_buffer.jsonl                        first the sampler's own state (random state, hash
                                                keys), then one env per line (position in its
                                                examples, counts since the last step)

The sha256 of the JSON of its ``hash_keys`` identifies an example, so the pools stay valid if the
order of the examples changes. Among examples with equal hashes, the one with the same env and index
comes first, so nothing moves if nothing has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from prime_rl import ConfigError, SampledEnv
from prime_rl_samplers.rotation import POOLS, Pool

ENV_NAME = "env_name"
"""The hash key for the env's label. All other keys are fields of its tasks."""

STATE_FILE = "rollout_buffer.jsonl"

Place = tuple[int, int]
"""An example's env and its index there."""


@dataclass(frozen=True)
class Row:
    """One retired example, as a line of a file."""

    hash: str
    env_name: str
    example_id: int
    fields: Mapping[str, Any]
    """The hashed values by key, for human readers of the file."""


def pool_file(directory: Path, pool: Pool) -> Path:
    return directory / f"{pool}_examples.jsonl"


def row_of(env: SampledEnv, example: int, keys: Sequence[str]) -> Row:
    """The row of one example. Raises ``ConfigError`` if its task lacks a key, and ``IndexError``
    beyond the env's end."""
    known = {**env.task(example), ENV_NAME: env.name}
    missing = [key for key in keys if key not in known]
    if missing:
        raise ConfigError(
            f"orchestrator.sampler.hash_keys: env {env.name!r}, example {example}: got no field "
            f"{missing[0]!r}, expected one of {', '.join(sorted(known))}. List fields that "
            "distinguish its examples."
        )

    fields = {key: known[key] for key in keys}
    try:
        text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"orchestrator.sampler.hash_keys: env {env.name!r}, example {example}: expected fields "
            f"that JSON can encode, got {error}. List other fields."
        ) from error

    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Row(digest, env.name, example_id=example, fields=json.loads(text))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one pool, one example per line."""
    write_lines(path, (asdict(row) for row in rows))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_pools(directory: Path) -> dict[Pool, list[Row]]:
    """Both pools. Raises ``ConfigError`` with the file and the line."""
    return {pool: _read_rows(pool_file(directory, pool)) for pool in POOLS}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file. Raises ``ConfigError`` with the file and the line."""
    return [record for _, record in _numbered(path)]


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """With the number of each one's line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"difficulty_pools: cannot read {path}: {error.strerror}. Expected a folder that this "
            "sampler saved: checkpoints/step_N/orchestrator of a run."
        ) from error

    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: expected JSON, got {line[:60]!r} ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: expected a JSON object, got {line[:60]!r}")
    return record


def _read_rows(path: Path) -> list[Row]:
    rows = []
    for number, record in _numbered(path):
        try:
            rows.append(msgspec.convert(record, Row))
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path}:{number}: expected an example of a pool (hash, env_name, example_id, "
                f"fields), got keys {', '.join(sorted(record))}: {error}"
            ) from error

    return rows


def find(
    pools: Mapping[Pool, Sequence[Row]], envs: Sequence[SampledEnv], keys: Sequence[str]
) -> tuple[list[tuple[Place, Pool]], int]:
    """The current places of the saved examples, each at most once, and how many are missing."""
    free = _places(envs, keys) if any(pools.values()) else {}
    indices = {env.name: index for index, env in enumerate(envs)}
    placed: list[tuple[Place, Pool]] = []
    moved: list[tuple[Row, Pool]] = []
    for pool, rows in pools.items():
        for row in rows:
            place = (indices.get(row.env_name, -1), row.example_id)
            places = free.get(row.hash, {})
            if place in places:
                del places[place]
                placed.append((place, pool))
            else:
                moved.append((row, pool))

    missing = 0
    for row, pool in moved:
        left = free.get(row.hash)
        if left:
            place = next(iter(left))
            del left[place]
            placed.append((place, pool))
        else:
            missing += 1

    return placed, missing


def _places(envs: Sequence[SampledEnv], keys: Sequence[str]) -> dict[str, dict[Place, None]]:
    """All examples that can be retired, by hash. The inner dict is an ordered set of places."""
    places: dict[str, dict[Place, None]] = {}
    for index, env in enumerate(envs):
        for example in range(env.num_examples or 0):
            try:
                row = row_of(env, example, keys)
            except IndexError:
                # A source may have more demonstrations than its env has tasks. They never retire.
                break
            places.setdefault(row.hash, {})[index, example] = None

    return places
