"""The trainer's values per token, joined to saved rollouts: ``<run>/token_exports/step_N``.

The export has packed sequences without a rollout's id, so a sample is found by its env, its tokens
and their sampling logprobs, all exact. Samples that are equal in all three have the same trainer
logprobs, so their order does not matter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from prime_rl.errors import RunError
from prime_rl.rollout import Sample
from prime_rl.rundir.rows import parse_row
from prime_rl_app.files import reading

SHOWN = {
    "trainer_logprobs": "trainer_logprobs",
    "importance_ratio": "ratio",
    "entropy": "entropy",
    "is_masked": "is_masked",
    "is_masked_high": "is_masked_high",
    "is_masked_low": "is_masked_low",
}
"""Field of the export -> name in the page."""

Key = tuple[str, bytes, bytes]


class StepExports:
    """One step's export; empty if the run exported nothing."""

    def __init__(self, run_dir: Path, step: int, seq_len: int) -> None:
        self._seq_len = seq_len
        self._found: dict[Key, list[dict[str, Any]]] = {}
        directory = run_dir / "token_exports" / f"step_{step}"
        for path in sorted(directory.glob("rank_*")):
            with reading(path):
                for record in _records(path):
                    place = _key(
                        record["env_name"], record["token_ids"], record["inference_logprobs"]
                    )
                    self._found.setdefault(place, []).append(record)

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(self, env: str, sample: Sample) -> dict[str, list[Any]]:
        """The trainer's values of a sample, [T] by name; empty if it did not train."""
        limit = self._seq_len
        export = self._found.get(
            _key(env, sample.token_ids[:limit], sample.inference_logprobs[:limit])
        )
        if not export:
            return {}
        record = export.pop()
        rest = [None] * (len(sample) - len(record["token_ids"]))
        return {
            name: list(record[field]) + rest
            for field, name in SHOWN.items()
            if record.get(field) is not None
        }


def _key(env: str, token_ids: Any, logprobs: Any) -> Key:
    ids = np.asarray(token_ids, np.int32)
    floats = np.asarray(logprobs, np.float32)
    return env, ids.tobytes(), floats.tobytes()


class _Record(TypedDict):
    """Fields that every line has."""

    env_name: str
    token_ids: list[int]
    inference_logprobs: list[float | None]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            parquet: Any = importlib.import_module("pyarrow.parquet")
            yield from parquet.read_table(path).to_pylist()
        else:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield parse_row(line, _Record, number)
    except (OSError, ImportError, ValueError) as error:
        raise RunError(f"{path}: the token export cannot be read: {error}") from error
