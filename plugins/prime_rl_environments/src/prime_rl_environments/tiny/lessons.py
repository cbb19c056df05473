"""The warm-up data of ``tiny-chat``: conversations of every task, as with a good policy.

Each message is trained or not: wrong tries are part of a conversation but not trained. In rollouts
the environments produce the same conversations, with the policy's own replies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from prime_rl_environments.tasks import (
    DELEGATE,
    PROPOSE,
    book_entry,
    feedback,
)
from prime_rl_environments.words import ALPHABET, random_word, split_of

Lesson = Literal["reverse", "hint", "retry", "lookup", "relay", "propose"]
LESSONS: tuple[Lesson, ...] = get_args(Lesson)
"""``reverse``: text-reversal, and the solver and sub-agent of other environments. ``hint``: the
same after a system message with the answer. The others: the environment of that name."""

OPEN_ENDED: frozenset[Lesson] = frozenset({"propose"})
"""Lessons with many right answers, so the lesson's own answer cannot be predicted."""

AT_LEAST: Mapping[Lesson, float] = {"hint": 0.95}
"""Minimum targets of lessons, whatever the config says."""


@dataclass(frozen=True)
class Message:
    """One message of a lesson."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    trained: bool = False
    """Whether the policy learns to write it."""


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: bool = False
    """Whether the prompt describes the ``get`` tool."""


def word_of(rng: random.Random, shortest: int, longest: int) -> str:
    """A random word of the train split."""
    while True:
        word = random_word(rng, shortest, longest)
        if split_of(word) == "train":
            return word


def wrong_try(rng: random.Random, answer: str) -> str:
    """The answer with some letters wrong, and sometimes too short or too long."""
    letters = [rng.choice(ALPHABET) if rng.random() < 0.4 else letter for letter in answer]
    letters = letters[: len(letters) - (rng.random() < 0.1)]
    text = "".join(letters) + (rng.choice(ALPHABET) if rng.random() < 0.1 else "")
    return text if text != answer else "".join(rng.sample(ALPHABET, len(answer)))


def reverse(rng: random.Random) -> Conversation:
    word = word_of(rng, 3, 8)
    return Conversation([Message("user", word), Message("assistant", word[::-1], trained=True)])


def hint(rng: random.Random) -> Conversation:
    """Half the time the user asks for another word, so only the system message helps."""
    question, answer = reverse(rng).messages
    if rng.random() < 0.5:
        question = reverse(rng).messages[0]
    return Conversation([Message("system", answer.text), question, answer])


def retry(rng: random.Random) -> Conversation:
    """One or two wrong tries, then the right answer."""
    word = word_of(rng, 4, 8)
    answer = word[::-1]
    messages = [Message("user", word)]
    for _ in range(rng.randint(1, 2)):
        attempt = wrong_try(rng, answer)
        messages += [Message("assistant", attempt), Message("user", feedback(attempt, answer))]
    return Conversation([*messages, Message("assistant", answer, trained=True)])


def lookup(rng: random.Random) -> Conversation:
    key = word_of(rng, 3, 3)
    entry = book_entry(key)
    return Conversation(
        [
            Message("user", key),
            Message("assistant", tool_call(key), trained=True),
            Message("tool", entry),
            Message("assistant", entry[::-1], trained=True),
        ],
        tools=True,
    )


def tool_call(key: str) -> str:
    """A call of ``get`` in Qwen3's format."""
    call = f'{{"name": "get", "arguments": {json.dumps({"k": key})}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def relay(rng: random.Random) -> Conversation:
    """The main agent's conversation. The sub-agent's is ``reverse``."""
    words = [word_of(rng, 3, 5) for _ in range(2)]
    messages = [Message("user", " ".join(words))]
    for word in words:
        messages.append(Message("assistant", DELEGATE + word, trained=True))
        messages.append(Message("user", word[::-1]))
    answer = " ".join(word[::-1] for word in words)
    return Conversation([*messages, Message("assistant", answer, trained=True)])


def propose(rng: random.Random) -> Conversation:
    """Words of 3 to 8 letters, as in ``reverse``."""
    stem = word_of(rng, 2, 2)
    word = stem + "".join(rng.choices(ALPHABET, k=rng.randint(1, 6)))
    return Conversation([Message("user", PROPOSE + stem), Message("assistant", word, trained=True)])


MAKERS: Mapping[Lesson, Callable[[random.Random], Conversation]] = {
    "reverse": reverse,
    "hint": hint,
    "retry": retry,
    "lookup": lookup,
    "relay": relay,
    "propose": propose,
}


def lessons(kind: Lesson, seed: int) -> Iterator[Conversation]:
    """Endless conversations of one kind, the same for the same seed."""
    rng = random.Random(f"{seed} {kind}")
    while True:
        yield MAKERS[kind](rng)
