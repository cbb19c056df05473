"""A reward that the program gives: the last line that it prints, or a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

TERM = "program"
"""Name of the reward where the program gives a number."""

EXPECTED = 'expected a number, or a JSON object of numbers such as {"correct": 1, "brief": 0.2}'


def last_line(output: str) -> str:
    """The last line with anything in it. Empty: there is none."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def terms_of(text: str) -> dict[str, float]:
    """The terms of a reward by name. Raises ``ValueError`` with what was found and expected."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"found {text[-200:]!r}; {EXPECTED}") from None

    terms: Mapping[str, Any] = answer if isinstance(answer, dict) else {TERM: answer}
    for name, value in terms.items():
        if not _is_number(value):
            raise ValueError(f"found {value!r:.200} as {name!r}; {EXPECTED}")
    if not terms:
        raise ValueError(f"found an empty object; {EXPECTED}")
    return {name: float(value) for name, value in terms.items()}


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, as a float. An integer may be larger than any."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
