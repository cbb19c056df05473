"""The device that a stage runs on, a clock for it, and how a stage fails or is skipped."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

Figures: TypeAlias = dict[str, Any]
"""Numbers and texts by name, or tables of them."""

UNITS = {
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "percent": "%",
    "gib": "GiB",
    "ms": "ms",
    "s": "s",
}
"""The unit of a figure by the end of its name; other figures are plain numbers."""


class Skip(Exception):
    """Why a stage cannot run here."""


def on_gpu() -> bool:
    """Whether torch sees a GPU. Without one, stages run at toy size on the CPU."""
    return torch.cuda.is_available()


def need(condition: bool, expected: str, figures: Mapping[str, Any]) -> None:
    """Raises ``AssertionError`` with what was expected and the figures."""
    if not condition:
        raise AssertionError(f"expected {expected}, found {show(figures)}")


def clock(run: Callable[[], Any], times: int) -> float:
    """Median seconds of a call. The first call is not timed: it compiles and reserves memory."""
    run()
    seconds = []
    for _ in range(times):
        finish()
        started = time.perf_counter()
        run()
        finish()
        seconds.append(time.perf_counter() - started)

    return statistics.median(seconds)


def finish() -> None:
    """Wait until the device has done what was asked of it."""
    if on_gpu():
        torch.cuda.synchronize()


def unit_of(name: str) -> str:
    """The unit that a figure's name ends with."""
    return next((unit for end, unit in UNITS.items() if f"_{name}".endswith(f"_{end}")), "")


def flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Figures of tables by dotted names."""
    result: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value

    return result


def show(figures: Any) -> str:
    """Figures in one line."""
    if isinstance(figures, float):
        return f"{figures:.4g}"
    if isinstance(figures, Mapping):
        parts = []
        for name, value in figures.items():
            text = show(value)
            parts.append(f"{name} ({text})" if isinstance(value, Mapping) else f"{name} {text}")
        return ", ".join(parts)
    return str(figures)
