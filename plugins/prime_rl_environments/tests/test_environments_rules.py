"""The tasks' rules, and the warm-up's conversations."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from prime_rl_environments.tasks import book_entry, difficulty_score, feedback, is_proposal
from prime_rl_environments.tiny.lessons import LESSONS, lessons, wrong_try
from prime_rl_environments.words import split_of


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        ("olxeh", "olleh", "ol?eh"),
        ("xxxxx", "olleh", "?????"),
        ("ol", "olleh", "ol???"),  # too short: missing letters are hidden
        ("ollehxx", "olleh", "olleh"),  # too long: the answer's length is shown
        ("", "ab", "??"),
        ("hello", "olleh", "??l??"),
    ],
)
def test_feedback_confirms_right_letters_and_reveals_no_other(
    reply: str, answer: str, expected: str
) -> None:
    assert feedback(reply, answer) == expected


def test_a_book_entry_begins_with_its_key_and_the_rest_looks_random() -> None:
    keys = [a + b + "c" for a in "abcdefghij" for b in "klmnopqrst"]
    entries = {key: book_entry(key) for key in keys}
    assert all(entry.startswith(key) and len(entry) == 6 for key, entry in entries.items())
    assert len({entry[3:] for entry in entries.values()}) > 95
    assert entries == {key: book_entry(key) for key in keys}


@pytest.mark.parametrize(
    ("reply", "valid"),
    [
        ("abc", True),
        ("abcdefghijkl", True),
        ("ab", False),  # too short
        ("abcdefghijklm", False),  # too long
        ("bac", False),  # another beginning
        ("abC", False),
        ("ab c", False),
        ("abß", False),
        ("", False),
    ],
)
def test_proposals_have_a_given_stem_and_length(reply: str, valid: bool) -> None:
    assert is_proposal(reply, "ab", 3, 12) is valid


def test_difficulty_is_highest_when_half_the_attempts_succeed() -> None:
    assert [difficulty_score(p) for p in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 0.5, 0]


def test_a_wrong_try_never_equals_the_answer() -> None:
    rng = random.Random(0)
    tries = [wrong_try(rng, "olleh") for _ in range(2000)]
    assert "olleh" not in tries
    assert {4, 5, 6} == {len(each) for each in tries}
    assert sum(a == b for each in tries for a, b in zip(each, "olleh", strict=False)) / 1e4 > 0.3


@pytest.mark.parametrize("kind", LESSONS)
def test_a_lesson_trains_only_replies_and_ends_with_one(kind: Any) -> None:
    for talk in islice(lessons(kind, 3), 50):
        assert talk.messages[-1].role == "assistant" and talk.messages[-1].trained
        assert all(message.role == "assistant" for message in talk.messages if message.trained)
    assert list(islice(lessons(kind, 3), 5)) == list(islice(lessons(kind, 3), 5))
    assert list(islice(lessons(kind, 3), 5)) != list(islice(lessons(kind, 4), 5))


@pytest.mark.parametrize("kind", LESSONS)
def test_no_lesson_uses_a_held_out_word(kind: Any) -> None:
    for talk in islice(lessons(kind, 0), 200):
        asked = next(message.text for message in talk.messages if message.role == "user")
        assert {split_of(word) for word in asked.lstrip("+").split()} == {"train"}
