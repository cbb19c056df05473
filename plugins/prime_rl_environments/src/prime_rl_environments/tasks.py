"""The rules of the tasks as pure functions: feedback of the user, the tool's data, scores.

Both the environments and the warm-up of ``tiny-chat`` use them, so they import nothing heavy.
"""

from __future__ import annotations

import random
from typing import Any

from prime_rl_environments.words import ALPHABET

HIDDEN = "?"
"""Replaces a wrong or missing letter in the user's feedback (``reverse-retry``)."""

DELEGATE = "@"
"""A reply with this prefix goes to the sub-agent (``reverse-relay``)."""

PROPOSE = "+"
"""A prompt with this prefix asks for a word that begins with the rest (``propose-solve``)."""

ENTRY_LETTERS = 3
"""Random letters of a book entry after its key (``word-lookup``)."""

LOOKUP_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "The book's word for a key.",
        "parameters": {
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "required": ["k"],
        },
    },
}
"""The tool of ``word-lookup``, as the model sees it."""


def feedback(reply: str, answer: str) -> str:
    """The answer with ``?`` for every letter that the reply does not have in place. It confirms
    correct letters and shows the length, but reveals no other letter."""
    padded = reply.ljust(len(answer))
    return "".join(a if r == a else HIDDEN for r, a in zip(padded, answer, strict=False))


def book_entry(key: str) -> str:
    """The book's word for a key: the key itself, then ``ENTRY_LETTERS`` pseudo-random letters. So
    the first part of every tool response is predictable from the call."""
    rng = random.Random(f"book {key}")
    return key + "".join(rng.choices(ALPHABET, k=ENTRY_LETTERS))


def is_proposal(reply: str, stem: str, min_letters: int, max_letters: int) -> bool:
    """Whether the reply is a lowercase word of an allowed length that begins with ``stem``."""
    letters = bool(reply) and all(letter in ALPHABET for letter in reply)
    return letters and reply.startswith(stem) and min_letters <= len(reply) <= max_letters


def difficulty_score(solved: float) -> float:
    """1 if half the attempts succeed, falling linearly to 0 if all or none do."""
    return 1.0 - abs(2.0 * solved - 1.0)
