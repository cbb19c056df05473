"""Reads wandb's offline files: a LevelDB log of protobuf records, after a header of 7 bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def frames(data: bytes) -> Iterator[bytes]:
    """Whole records. A record may span several blocks."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no room for another header in this block
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7
        part = data[at : at + length]
        at += length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole


class WandbRun:
    """One offline run, read back."""

    def __init__(self, run_dir: Path) -> None:
        (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
        self.files = path.parent / "files"
        self.rows: list[dict[str, Any]] = []
        self.defined: dict[str, str] = {}
        for frame in frames(path.read_bytes()):
            record = Record.FromString(frame)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
            elif kind == "history":
                self.rows.append(_items(record.history.item))
            elif kind == "metric":
                metric = record.metric
                self.defined[metric.name or metric.glob_name] = metric.step_metric

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}

    def tables(self) -> dict[int, dict[str, Any]]:
        """Tables of rollouts by step."""
        found = [row for row in self.rows if "rollouts" in row]
        return {
            row["step"]: json.loads((self.files / row["rollouts"]["path"]).read_text())
            for row in found
        }


def _items(items: Any) -> dict[str, Any]:
    """Keys with a dot are nested: ``["rollouts", "path"]``."""
    found: dict[str, Any] = {}
    for item in items:
        keys = [item.key] if item.key else list(item.nested_key)
        place = found
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = json.loads(item.value_json)
    return found
