"""What the trainer saw of a token, joined to saved rollouts: ``<run>/token_exports/step_N``.

The export is by packed sequence and names no rollout, so a sample is found by what it is: its env,
its tokens, and the logprobs they were sampled with, all exact. Samples that are alike in all three
get the same trainer logprobs, whichever takes which.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prime_rl.errors import RunError
from prime_rl.rollout import Sample

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
    """One step's export; empty where the run exported nothing."""

    def __init__(self, run_dir: Path, step: int, seq_len: int) -> None:
        self._seq_len = seq_len
        self._found: dict[Key, list[dict[str, Any]]] = {}
        directory = run_dir / "token_exports" / f"step_{step}"
        for path in sorted(directory.glob("rank_*")):
            for record in _records(path):
                key = _key(record["env_name"], record["token_ids"], record["inference_logprobs"])
                self._found.setdefault(key, []).append(record)

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(self, env: str, sample: Sample) -> dict[str, list[Any]]:
        """What the trainer saw of a sample, [T] by name; empty if it trained nothing of it."""
        limit = self._seq_len
        found = self._found.get(
            _key(env, sample.token_ids[:limit], sample.inference_logprobs[:limit])
        )
        if not found:
            return {}
        record = found.pop()
        rest = [None] * (len(sample) - len(record["token_ids"]))
        return {
            name: list(record[field]) + rest
            for field, name in SHOWN.items()
            if record.get(field) is not None
        }


def _key(env: str, token_ids: Any, logprobs: Any) -> Key:
    ids, floats = np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32)
    return env, ids.tobytes(), floats.tobytes()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            parquet: Any = importlib.import_module("pyarrow.parquet")
            yield from parquet.read_table(path).to_pylist()
        else:
            with path.open("rb") as file:
                for line in file:
                    yield msgspec.json.decode(line)
    except (OSError, ImportError, msgspec.DecodeError) as error:
        raise RunError(f"{path}: the token export cannot be read: {error}") from error
