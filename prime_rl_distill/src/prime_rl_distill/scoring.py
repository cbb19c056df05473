"""A rollout's sampled tokens under a reference model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from prime_rl import ReferenceModel, Rollout


async def sampled_logprobs(
    model: ReferenceModel, rollout: Rollout, prefix: Sequence[int] = ()
) -> np.ndarray:
    """Logprobs of the C trainable tokens, in order: [C].

    All samples are scored concurrently and as a whole, each after ``prefix``, whose logprobs are
    dropped. Raises ``EngineError`` if the model refuses.
    """
    columns = await asyncio.gather(
        *(
            model.logprobs([*prefix, *sample.token_ids], group_id=rollout.group_id)
            for sample in rollout.samples
        )
    )
    start = len(prefix)
    pairs = zip(columns, rollout.samples, strict=True)
    return np.concatenate([column[start:][sample.loss_mask] for column, sample in pairs])


async def sampled_top_logprobs(
    model: ReferenceModel, rollout: Rollout, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logprobs of the model's ``k`` likeliest tokens in the place of each of the C
    trainable ones, in order: [C, k] each. Raises ``EngineError`` if the model refuses."""
    scores = await asyncio.gather(
        *(
            model.top_logprobs(sample.token_ids, k, group_id=rollout.group_id)
            for sample in rollout.samples
        )
    )
    masks = [sample.loss_mask for sample in rollout.samples]
    ids, logprobs = (
        np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)])
        for parts in zip(*scores, strict=True)
    )
    return ids, logprobs
