# mypy: allow-subclassing-any
"""The ``args`` that all word tasksets share. Imports verifiers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import PositiveInt, model_validator

from prime_rl_environments.words import Split, words


class WordsConfig(vf.TasksetConfig):
    """The random words, and the number of examples."""

    seed: int = 0
    split: Split = "train"
    """``held_out``: words that no ``train`` split and no warm-up contains, for any seed."""
    num_examples: PositiveInt | None = 2000
    """None: unlimited."""
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
        return words(
            self.seed, self.split, min_letters=self.min_letters, max_letters=self.max_letters
        )


def first(examples: Iterator[Any], config: WordsConfig) -> Iterator[Any]:
    """The first ``num_examples`` of ``examples``."""
    return islice(examples, config.num_examples)
