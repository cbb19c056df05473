"""The results of ``python -m bench.gpu``: a file, and the records that ``docs/benchmarks.md``
shows.

The machine with the GPU may have neither git nor a way to push: its ``results.json`` says what it
was measured with, and ``python -m bench --record gpu --results FILE`` records it elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import flat, unit_of
from bench.gpu.stages import Outcome
from bench.records import RECORDS, Conditions, conditions, read, write

PREFIX = "gpu"
"""Of the records' names."""


def describe_device() -> str:
    """The GPU that torch sees; empty without one."""
    if not torch.cuda.is_available():
        return ""
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name(0)}, {gib:.1f} GiB"


def write_results(path: Path, device: str, outcomes: Mapping[str, Outcome], command: str) -> None:
    """Write the outcomes with what they were measured with."""
    stages = {
        name: {"state": each.state, "seconds": each.seconds, "figures": each.figures}
        for name, each in outcomes.items()
    }
    table = {"device": device, "conditions": conditions(command), "stages": stages}
    path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def record_results(path: Path, records: Path = RECORDS) -> int:
    """Record the figures of a results file in place of all earlier ones of its stages; their
    number. Raises ``ValueError`` if it is not of a GPU, or a stage failed."""
    table = json.loads(path.read_text("utf-8"))
    if not table["device"]:
        raise ValueError(f"{path}: measured without a GPU, at toy size. Nothing is recorded")
    failed = [name for name, each in table["stages"].items() if each["state"].isupper()]
    if failed:
        raise ValueError(f"{path}: {', '.join(failed)} failed. Nothing is recorded")

    measured_with: Conditions = table["conditions"] | {"gpu": table["device"]}
    stages = {name: each for name, each in table["stages"].items() if each["state"] == "ok"}
    measured = tuple(f"{PREFIX}.{stage}." for stage in stages)
    figures = {name: each for name, each in read(records).items() if not name.startswith(measured)}
    number = 0
    for stage, outcome in stages.items():
        for name, value in numbers(outcome["figures"]).items():
            full_name = f"{PREFIX}.{stage}.{name}"
            figures[full_name] = {
                "name": full_name,
                "value": float(f"{value:.6g}"),
                "unit": unit_of(name),
                **measured_with,
            }
            number += 1

    write(figures, records)
    return number


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among figures, by dotted names."""
    return {
        name: float(value)
        for name, value in flat(figures).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
