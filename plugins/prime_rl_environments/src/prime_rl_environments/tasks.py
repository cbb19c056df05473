"""The rules of the tasks, as pure functions: what the user says, what the tool knows, what counts.

The environments apply them and the warm-up of ``tiny-chat`` rehearses them, so they import nothing.
"""

from __future__ import annotations

import random
from typing import Any

from prime_rl_environments.words import ALPHABET

HIDDEN = "?"
"""What the user writes where a letter is wrong or missing (``reverse-retry``)."""

DELEGATE = "@"
"""A reply that begins with it is handed to the sub-agent (``reverse-relay``)."""

PROPOSE = "+"
"""A prompt that begins with it asks for a word that begins with the rest (``propose-solve``)."""

ENTRY_LETTERS = 3
"""Letters of a book entry that its key does not tell (``word-lookup``)."""

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
"""The tool of ``word-lookup``, as the model is told of it."""


def feedback(reply: str, answer: str) -> str:
    """The answer with ``?`` wherever the reply does not have its letter: the right letters are
    confirmed in place, and the length is told; no letter is given away."""
    padded = reply.ljust(len(answer))
    return "".join(a if r == a else HIDDEN for r, a in zip(padded, answer, strict=False))


def book_entry(key: str) -> str:
    """The word the book holds under a key: the key itself, then ``ENTRY_LETTERS`` letters that
    nobody can guess. The first part of every tool response is thus predictable from the call."""
    rng = random.Random(f"book {key}")
    return key + "".join(rng.choices(ALPHABET, k=ENTRY_LETTERS))


def is_proposal(reply: str, stem: str, min_letters: int, max_letters: int) -> bool:
    """Whether the reply is a word in lowercase letters of an allowed length, beginning with
    ``stem``."""
    letters = bool(reply) and all(letter in ALPHABET for letter in reply)
    return letters and reply.startswith(stem) and min_letters <= len(reply) <= max_letters


def difficulty_score(solved: float) -> float:
    """1 where half the attempts succeed, falling linearly to 0 where all or none do."""
    return 1.0 - abs(2.0 * solved - 1.0)
