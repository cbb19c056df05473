# mypy: allow-subclassing-any
"""What every word taskset's ``args`` have in common. Imports verifiers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import PositiveInt, model_validator

from prime_rl_environments.words import Split, words


class WordsConfig(vf.TasksetConfig):
    """Which random words, and how many examples of them."""

    seed: int = 0
    split: Split = "train"
    """``held_out``: words that no seed's ``train`` split contains, nor any warm-up made here."""
    num_examples: PositiveInt | None = 2000
    """None: examples without end."""
    min_letters: PositiveInt = 4
    max_letters: PositiveInt = 8

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> WordsConfig:
        if self.min_letters > self.max_letters:
            raise ValueError(
                f"{self.id or type(self).__name__}: min_letters = {self.min_letters} exceeds "
                f"max_letters = {self.max_letters}"
            )
        return self

    def words(self) -> Iterator[str]:
        """Endless words of the split."""
        return words(self.seed, self.split, self.min_letters, self.max_letters)


def first(examples: Iterator[Any], config: WordsConfig) -> Iterator[Any]:
    """As many of ``examples`` as ``num_examples`` says."""
    return islice(examples, config.num_examples)
