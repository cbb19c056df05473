"""Prompts for any vocabulary, the same in every run."""

from __future__ import annotations

import random
from functools import cache

from prime_rl_devkit.engines.subject import EngineSubject

SMALL_VOCAB = 256


@cache
def _drawn(length: int, number: int) -> tuple[int, ...]:
    draw = random.Random(f"{length}/{number}")
    return tuple(draw.randrange(10, SMALL_VOCAB) for _ in range(length))


def prompt_of(engine: EngineSubject, length: int, number: int = 0) -> list[int]:
    """``length`` ordinary token ids; another ``number``, another prompt.

    It may be longer than ``max_model_len``: the engine must refuse that itself.
    """
    return [*_drawn(length, number)]


def lively(engine: EngineSubject, nats: float = 2.5, tries: int = 24) -> list[int]:
    """Among ``tries`` prompts, the one whose next token has an entropy nearest to ``nats``."""
    reference = engine.reference()

    def entropy(prompt: list[int]) -> float:
        logprobs = reference.logits(prompt)[-1].log_softmax(-1)
        return float(-(logprobs.exp() * logprobs).sum())

    prompts = [prompt_of(engine, 6, number) for number in range(tries)]
    return min(prompts, key=lambda prompt: abs(entropy(prompt) - nats))
