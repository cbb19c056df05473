"""Whether a reply has the right answer, by math-verify. Imports no verifiers."""

from __future__ import annotations

import re
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


def parsed_gold(answer: str) -> list[Any]:
    """The parsed answer of a row; empty if math-verify cannot read it."""
    text = gold_answer(answer)
    if NUMBER.fullmatch(text):
        text = text.replace(",", "")
    return parsed(text) or parsed(f"${text}$")


def is_readable(answer: str) -> bool:
    """Whether a row's answer can be compared. A plain number can, which takes no parsing: a file
    of thousands of them loads at once."""
    return bool(NUMBER.fullmatch(gold_answer(answer)) or parsed_gold(answer))


def is_right(reply: str, answer: str, where: Where) -> bool:
    """Whether the reply's answer equals the row's. ``boxed``: only what stands in ``\\boxed`` after
    a thought counts; ``reply``: the last expression of the reply does."""
    final = reply.rsplit("</think>", 1)[-1]
    if where == "boxed":
        if BOXED not in final:
            return False
        final = final[final.rindex(BOXED) :]
    try:
        return bool(verify(parsed_gold(answer), parsed(final), timeout_seconds=SECONDS))
    except (Exception, TimeoutException):  # sympy gives up on some pairs: not shown to be equal
        return False
