"""Tokens as the page shows them: the text of each, and its columns as short JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.errors import PrimeRLError
from prime_rl.rollout import ROLES, Rollout, Sample

DIGITS = 6
"""Decimals of a float."""

COLUMNS = {
    "token_ids": "ids",
    "loss_mask": "mask",
    "inference_logprobs": "logprobs",
    "roles": "roles",
    "is_content": "content",
    "policy_versions": "versions",
    "is_repeat": "repeat",
    "advantages": "advantages",
    "rl_weights": "rl",
    "ce_weights": "ce",
    "ref_kl_weights": "ref_kl",
    "ref_logprobs": "ref_logprobs",
}
"""Column of a sample -> name in the page."""


USER = ROLES.index("user")
PREVIEW = 120
"""Most tokens and characters of a prompt or a reply in the table."""


def prompt_ids(rollout: Rollout) -> list[int]:
    """What users said before the first sampled token, without the chat template."""
    if not rollout.samples:
        return []
    sample = rollout.samples[0]
    first = int(sample.loss_mask.argmax()) if sample.loss_mask.any() else len(sample)
    is_prompt = np.arange(len(sample)) < first
    if sample.roles is not None and (said := is_prompt & (sample.roles == USER)).any():
        is_prompt = said
    return _content(sample, is_prompt)


def reply_ids(rollout: Rollout) -> list[int]:
    """What was sampled in the first sample, without the chat template."""
    return _content(s := rollout.samples[0], s.loss_mask) if rollout.samples else []


def _content(sample: Sample, chosen: np.ndarray[Any, Any]) -> list[int]:
    if sample.is_content is not None:
        chosen = chosen & sample.is_content
    return [int(token) for token in sample.token_ids[chosen]]


def one_line(text: str, most: int = PREVIEW) -> str:
    """A text on one line, cut."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def columns_of(sample: Sample) -> dict[str, Any]:
    """Its columns by name: a list, or one value if all tokens have the same; absent if the sample
    has none. ``ids`` is always a list, because it gives the number of tokens."""
    columns = {name: getattr(sample, column) for column, name in COLUMNS.items()}
    made = {name: short(column) for name, column in columns.items() if column is not None}
    return made | {"ids": sample.token_ids.tolist()}


def short(column: np.ndarray[Any, Any]) -> Any:
    """[T] as plain values; bools as 0 and 1; one value if all are the same."""
    if column.dtype.kind == "b":
        column = column.astype(np.int8)
    elif column.dtype.kind == "f":
        column = np.round(column.astype(np.float64), DIGITS)
    values = column.tolist()
    return values[0] if values and values.count(values[0]) == len(values) else values


class Pieces:
    """The text of single tokens, by a run's own tokenizer."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Use the first of ``folders`` with a tokenizer."""
        self._tokenizer = next(filter(None, map(_load, folders)), None)
        self._known: dict[int, str] = {}

    @property
    def is_known(self) -> bool:
        """False: no tokenizer was found, and tokens show as their numbers."""
        return self._tokenizer is not None

    def add(self, token_ids: np.ndarray[Any, Any]) -> None:
        """Add tokens that will be shown."""
        for token in np.unique(token_ids).tolist():
            if token not in self._known:
                self._known[token] = self._text(token)

    def __len__(self) -> int:
        return len(self._known)

    def table(self, start: int = 0) -> dict[str, list[Any]]:
        """Every added token and its text, from the ``start``-th on."""
        return {"ids": [*self._known][start:], "texts": [*self._known.values()][start:]}

    def line(self, ids: list[int]) -> str:
        """Some tokens as one line of at most ``PREVIEW`` characters."""
        ids = ids[:PREVIEW]
        if self._tokenizer is None:
            return "".join(self._known[token] for token in ids[: PREVIEW // 4])
        return one_line(str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"⟨{token}⟩"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece writes a space before a word as ▁, and drops it at the start of a text.
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return f" {text}" if str(piece).startswith("▁") and not text.startswith(" ") else text


def _load(folder: Path) -> Any:
    if not (folder / "tokenizer_config.json").exists():
        return None
    from prime_rl.env.rendering import load_tokenizer

    try:
        return load_tokenizer(folder)
    except PrimeRLError:
        return None
