"""Whether a reply has the right answer, by math-verify. Imports no verifiers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from math_verify import parse, verify
from math_verify.errors import TimeoutException

Where = Literal["boxed", "reply"]

BOXED = "\\boxed"
SECONDS = 2
"""Limit for parsing one text and for one comparison. math-verify keeps it by an alarm signal in
the main thread, where verifiers scores."""


def gold_answer(text: str) -> str:
    """The answer in a dataset's answer column: after GSM8K's last ``####`` if there is one, else
    the whole text (math-verify finds a ``\\boxed`` in it)."""
    return text.rsplit("####", 1)[-1].strip()


NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
"""A plain number, with or without thousands separators."""


def parsed(text: str) -> list[Any]:
    """What math-verify reads in a text; empty if it reads nothing."""
    try:
        return list(parse(text, parsing_timeout=SECONDS))
    except (Exception, TimeoutException):  # it raises on some malformed formulas
        return []


@lru_cache(maxsize=16384)
def parsed_gold(answer: str) -> tuple[Any, ...]:
    """The parsed answer of a row: the first reading that a reply with this answer in a box equals,
    for ``2\\sqrt{3}`` without a box is read as 3. Empty if there is none."""
    text = gold_answer(answer)
    if NUMBER.fullmatch(text):
        return tuple(parsed(text.replace(",", "")))
    reply = parsed(text if BOXED in text else f"{BOXED}{{{text}}}")
    for form in (text, f"${text}$", f"{BOXED}{{{text}}}"):
        reading = parsed(form)
        if reading and is_equal(reading, reply):
            return tuple(reading)

    return ()


def is_equal(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Whether math-verify finds two parsed answers equal."""
    try:
        return bool(verify(list(gold), list(answer), timeout_seconds=SECONDS))
    except (Exception, TimeoutException):  # sympy gives up on some pairs: not shown to be equal
        return False


def is_answer(answer: str) -> bool:
    """Whether a reply can be right: one that gives the row's own answer is. A plain number is,
    which takes no parsing: a file of thousands of them loads at once."""
    return bool(NUMBER.fullmatch(gold_answer(answer)) or parsed_gold(answer))


def is_right(reply: str, answer: str, where: Where) -> bool:
    """Whether the reply's answer equals the row's. ``boxed``: only what stands in ``\\boxed`` after
    a thought counts; ``reply``: the last expression of the reply does."""
    final = reply.rsplit("</think>", 1)[-1]
    if where == "boxed":
        if BOXED not in final:
            return False
        final = final[final.rindex(BOXED) :]
    return is_equal(parsed_gold(answer), parsed(final))
