"""Tokens and texts of the tests' tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from prime_rl_environments.tiny.tokenizer import build_tokenizer

END = "<|im_end|>"


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def text_of(ids: Any) -> str:
    return tokenizer().decode([int(each) for each in ids], skip_special_tokens=False)
