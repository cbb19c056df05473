"""Words, their splits, and the positional score."""

from itertools import islice

import pytest

from prime_rl_environments.words import position_score, split_of, words


def test_a_seed_gives_the_same_words_again() -> None:
    assert list(islice(words(7, "train"), 50)) == list(islice(words(7, "train"), 50))
    assert list(islice(words(7, "train"), 50)) != list(islice(words(8, "train"), 50))


def test_words_are_lowercase_letters_of_the_given_lengths() -> None:
    sample = list(islice(words(0, "train", 4, 8), 2000))
    assert {len(word) for word in sample} == {4, 5, 6, 7, 8}
    assert all(word.isascii() and word.isalpha() and word.islower() for word in sample)


def test_no_word_is_in_both_splits_for_any_seeds() -> None:
    train = set(islice(words(1, "train", 2, 2), 3000))
    held_out = set(islice(words(2, "held_out", 2, 2), 3000))
    assert not train & held_out
    assert len(train | held_out) > 600  # nearly all 676 words of two letters were drawn


def test_about_one_word_in_eight_is_held_out() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    held_out = sum(
        split_of(a + b + c) == "held_out" for a in letters for b in letters for c in letters
    )
    assert held_out / 26**3 == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("dcba", "dcba", 1.0),
        ("dcbx", "dcba", 0.75),
        ("cba", "dcba", 0.0),  # shifted by one: no position agrees
        ("dcbaa", "dcba", 0.8),  # four of five
        ("dc", "dcba", 0.5),
        ("", "dcba", 0.0),
        ("", "", 0.0),
    ],
)
def test_the_score_is_the_share_of_right_positions_in_the_longer_text(
    reply: str, answer: str, score: float
) -> None:
    assert position_score(reply, answer) == score
