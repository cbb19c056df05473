"""Random words for the tasks, in two splits.

A word's checksum decides its split. So the splits are disjoint for all seeds, and evaluation uses
words that neither warm-up nor training has seen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Split = Literal["train", "held_out"]

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_ONE_IN = 8


def split_of(word: str) -> Split:
    """The split of a word. About one in eight words is held out."""
    return "held_out" if zlib.crc32(word.encode()) % HELD_OUT_ONE_IN == 0 else "train"


def random_word(rng: random.Random, min_letters: int, max_letters: int) -> str:
    """Lowercase letters, each length equally likely."""
    letters = rng.randint(min_letters, max_letters)
    return "".join(rng.choices(ALPHABET, k=letters))


def words(seed: int, split: Split, min_letters: int = 4, max_letters: int = 8) -> Iterator[str]:
    """Endless words of one split, the same for the same seed."""
    rng = random.Random(f"{seed} {split}")
    while True:
        word = random_word(rng, min_letters, max_letters)
        if split_of(word) == split:
            yield word


def position_score(reply: str, answer: str) -> float:
    """Share of positions where the reply has the answer's letter, 0 to 1, over the longer of both.

    It is graded, so a partly right policy can learn from it. A reply of another length cannot
    score 1.
    """
    matches = sum(a == b for a, b in zip(reply, answer, strict=False))
    return matches / max(len(reply), len(answer), 1)


def score_reply(reply: str, task: Mapping[str, Any]) -> float:
    """``position_score`` with the task's ``answer``, as ``text-reversal`` scores a reply. For an
    algorithm that scores replies by itself."""
    return position_score(reply.strip(), str(task["answer"]))
