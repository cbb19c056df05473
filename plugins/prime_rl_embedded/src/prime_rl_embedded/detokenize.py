"""Incremental detokenization with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that chat uses."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Builds ``text`` from tokens. Only a window of recent tokens is decoded again, so the cost is
    linear in the length.

    A character split over several tokens is held back until it is complete, or until ``finish``.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], skip_special_tokens: bool
    ) -> None:
        self.text = ""
        self.stopped: str | None = None
        """The stop string that ended the text, which excludes it."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._settled = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens, unless a stop string has ended the text."""
        if self.stopped is None:
            self._window += token_ids
            self._extend(final=False)

    def finish(self) -> None:
        """No token follows: release what is held back."""
        if self.stopped is None:
            self._extend(final=True)

    @property
    def has_stops(self) -> bool:
        return bool(self._stop)

    @property
    def shown(self) -> int:
        """Characters that are final: a tail that may begin a stop string is held back."""
        if self.stopped is not None:
            return len(self.text)
        held = max((_overlap(self.text, s) for s in self._stop), default=0)
        return len(self.text) - held

    def _extend(self, final: bool) -> None:
        before = self._decode(self._window[: self._settled])
        after = self._decode(self._window)
        if after.endswith(_UNFINISHED) and not final:
            return
        start = len(self.text)
        self.text += after[len(before) :]
        # Decoding depends on a few tokens before (spaces, merges), so the newest ones stay.
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._cut(start)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _cut(self, start: int) -> None:
        longest = max((len(s) for s in self._stop), default=0)
        matches = [
            (at, s) for s in self._stop if (at := self.text.find(s, max(0, start - longest))) >= 0
        ]
        if matches:
            at, self.stopped = min(matches)
            self.text = self.text[:at]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
