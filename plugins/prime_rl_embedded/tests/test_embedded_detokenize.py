"""Text from tokens: split characters, stop strings, windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl_embedded.detokenize import TextStream


class Bytes:
    """Token i is byte i; 256 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if t < 256]
        mark = "" if skip_special_tokens or len(kept) == len(token_ids) else "<end>"
        return bytes(kept).decode("utf-8", errors="replace") + mark


def run(tokens: Sequence[int], stop: Sequence[str] = (), size: int = 1) -> tuple[TextStream, str]:
    """The stream after all tokens, and the pieces that a client was shown."""
    stream, shown = TextStream(Bytes(), stop, True), ""
    for i in range(0, len(tokens), size):
        stream.push(tokens[i : i + size])
        shown += stream.text[len(shown) : stream.shown]
    stream.finish()
    return stream, shown + stream.text[len(shown) :]


@given(st.text(max_size=60), st.integers(1, 5))
def test_the_text_does_not_depend_on_the_chunks(text: str, size: int) -> None:
    stream, shown = run(text.encode(), size=size)
    assert stream.text == shown == text


def test_half_a_character_is_held_back_until_the_end() -> None:
    stream = TextStream(Bytes(), (), True)
    stream.push("é".encode()[:1])
    assert stream.text == ""
    stream.finish()
    assert stream.text == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "by"),
    [
        ("one two", ["two"], "one ", "two"),
        ("one two", ["ne", "one"], "", "one"),  # the earliest wins
        ("aab", ["ab"], "a", "ab"),
        ("abc", ["abcd"], "abc", None),
    ],
)
def test_a_stop_string_cuts_the_text(
    text: str, stop: list[str], expected: str, by: str | None
) -> None:
    stream, shown = run(text.encode(), stop)
    assert (stream.text, shown, stream.stopped) == (expected, expected, by)


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4), st.integers(1, 4))
def test_shown_text_never_changes(text: str, stop: str, size: int) -> None:
    expected = text.split(stop)[0]
    stream, shown = run(text.encode(), [stop], size)
    assert stream.text == shown == expected


def test_tokens_after_a_stop_string_are_ignored() -> None:
    stream = TextStream(Bytes(), ["b"], True)
    for token in b"abc":
        stream.push([token])
    assert stream.text == "a" and all(a <= b for a, b in pairwise([stream.shown, len(stream.text)]))
