"""What a sample's columns leave to be worked out: who sampled a token that trains elsewhere.

The samples of a rollout are paths of one tree, so what a sample repeats of an earlier one is a
prefix of both; it trains in the earlier one. Shapes: T = tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from prime_rl import Sample

BoolColumn = npt.NDArray[np.bool_]
FloatColumn = npt.NDArray[np.float32]


def sampled_tokens(samples: Sequence[Sample]) -> list[BoolColumn]:
    """True where a model sampled the token, also where that trains in an earlier sample: [T]
    each."""
    found = [sample.loss_mask.copy() for sample in samples]
    for later, earlier, length in _shared_prefixes(samples):
        found[later][:length] |= found[earlier][:length]
    return found


def move_to_trained(samples: Sequence[Sample], weights: Sequence[FloatColumn]) -> None:
    """Give a shared token the largest of its weights, in the sample that trains it; in place."""
    for later, earlier, length in reversed([*_shared_prefixes(samples)]):
        ours, theirs = weights[later][:length], weights[earlier][:length]
        np.maximum(ours, theirs, out=theirs)
        ours[:] = 0.0


def generation_prompts(sampled: BoolColumn, assistant: BoolColumn) -> BoolColumn:
    """True on the assistant's tokens that lead up to a sampled one: the template wrote them."""
    prompts = np.zeros_like(sampled)
    for start in np.flatnonzero(sampled[1:] & ~sampled[:-1]) + 1:
        first = start
        while first > 0 and assistant[first - 1] and not sampled[first - 1]:
            first -= 1
        prompts[first:start] = True
    return prompts


def _shared_prefixes(samples: Sequence[Sample]) -> Iterator[tuple[int, int, int]]:
    """Per sample that repeats tokens: its index, the index of an earlier one that holds them, and
    how many."""
    for later, sample in enumerate(samples):
        if sample.is_repeat is None or not sample.is_repeat.any():
            continue
        length = int(sample.is_repeat.sum())
        shared = sample.token_ids[:length]
        for earlier in range(later):
            if np.array_equal(samples[earlier].token_ids[:length], shared):
                yield later, earlier, length
                break
