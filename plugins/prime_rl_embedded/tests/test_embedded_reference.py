"""``ReferenceModel`` over a real server: completions and scores, against transformers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_rl import EngineError, ReferenceModel
from prime_rl.inference.pool import FrozenPool
from prime_rl.inference.scorer import PromptScorer
from prime_rl_embedded.testing import VOCAB_SIZE, Served

Score = Callable[[list[int]], Tensor]


@asynccontextmanager
async def reference_to(
    server: Served, version: Callable[[], str | None] = lambda: None
) -> AsyncIterator[ReferenceModel]:
    pool = FrozenPool([f"{server.url}/v1"], "tiny", where="env 'a': reference")
    try:
        yield PromptScorer(pool, "tiny", cache_salt=version)
    finally:
        await pool.close()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_a_branch_has_the_logprobs_of_the_model_it_was_sampled_from(
    server: Served, score: Score, temperature: float
) -> None:
    prompt = [3, 1, 4, 1, 5]
    async with reference_to(server, lambda: "0") as model:
        branches = await model.generate(prompt, max_tokens=12, temperature=temperature, n=4)
    assert len({tuple(branch.token_ids) for branch in branches}) == 4
    for branch in branches:
        sample = branch.sample()
        rows = score(sample.token_ids.tolist())[:-1] / temperature
        expected = rows.log_softmax(-1).gather(
            -1, torch.tensor(sample.token_ids[1:]).long()[:, None]
        )
        torch.testing.assert_close(
            torch.tensor(sample.inference_logprobs[1:])[sample.loss_mask[1:]],
            expected[:, 0][sample.loss_mask[1:]],
            atol=1e-4,
            rtol=0,
        )
        assert branch.finish_reason == "length" and sample.num_trainable_tokens == 12
        assert sample.policy_versions is not None
        assert sample.policy_versions.tolist() == [-1] * 5 + [0] * 12


async def test_the_mean_over_branches_is_the_value_of_a_prefix(
    server: Served, score: Score
) -> None:
    """Reward 1 if the next token is even. 2,048 branches: a standard error of at most 0.011."""
    prompt = [7, 7, 2]
    value = float(score(prompt)[-1].exp()[::2].sum())
    async with reference_to(server) as model:
        asked = [model.generate(prompt, max_tokens=1, n=128) for _ in range(16)]
        found = [branch for branches in await asyncio.gather(*asked) for branch in branches]
    assert abs(sum(b.token_ids[0] % 2 == 0 for b in found) / len(found) - value) < 0.05


async def test_a_seed_repeats_a_request_and_no_seed_repeats_none(server: Served) -> None:
    async def drawn(model: ReferenceModel, **settings: Any) -> tuple[int, ...]:
        (found,) = await model.generate([1, 2, 3], max_tokens=16, temperature=2.0, **settings)
        return tuple(found.token_ids.tolist())

    async with reference_to(server) as model:
        free = [await drawn(model) for _ in range(4)]
        same = [await drawn(model, seed=5) for _ in range(2)]
        others = [await drawn(model, seed=5, group_id=1), await drawn(model, seed=6)]
    async with reference_to(server) as model:
        again = [await drawn(model) for _ in range(4)]
    assert free == again and same[0] == same[1]
    assert set(Counter([*free, same[0], *others]).values()) == {1}


async def test_a_stop_token_ends_a_completion(server: Served, score: Score) -> None:
    likeliest = int(score([9, 9])[-1].argmax())
    async with reference_to(server) as model:
        (found,) = await model.generate(
            [9, 9], max_tokens=8, temperature=0.0, stop_token_ids=[likeliest]
        )
        with pytest.raises(EngineError, match=f"stop_token_ids holds {VOCAB_SIZE}"):
            await model.generate([9], max_tokens=1, stop_token_ids=[VOCAB_SIZE])
    assert (found.token_ids.tolist(), found.finish_reason) == ([likeliest], "stop")


async def test_the_most_likely_tokens_are_those_of_the_model(server: Served, score: Score) -> None:
    prompt = [3, 1, 4, 1, 5, 9]
    async with reference_to(server) as model:
        ids, logprobs = await model.top_logprobs(prompt, 7)
    best = score(prompt)[:-1].topk(7)
    assert (str(ids.dtype), str(logprobs.dtype), ids.shape) == ("int32", "float32", (6, 7))
    assert not ids[0].any() and not logprobs[0].any()
    assert ids[1:].tolist() == best.indices.tolist()
    torch.testing.assert_close(torch.tensor(logprobs[1:]), best.values, atol=1e-5, rtol=0)


async def test_the_kl_of_the_whole_vocabulary_is_that_of_the_models_own_logits(
    server: Served, score: Score
) -> None:
    """KL(p || q) of the served model p to one of its own after another prompt, q, in float64."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    shifted = [8, *prompt]
    async with reference_to(server) as model:
        ids, logprobs = await model.top_logprobs(prompt, VOCAB_SIZE)
        ids_, logprobs_ = await model.top_logprobs(shifted, VOCAB_SIZE)
    p, q = (
        torch.zeros(len(prompt) - 1, VOCAB_SIZE, dtype=torch.float64).scatter_(
            1, torch.tensor(i).long(), torch.tensor(x).double()
        )
        for i, x in ((ids[1:], logprobs[1:]), (ids_[2:], logprobs_[2:]))
    )
    expected_p, expected_q = score(prompt)[:-1].double(), score(shifted)[1:-1].double()
    expected = (expected_p.exp() * (expected_p - expected_q)).sum(-1)
    torch.testing.assert_close((p.exp() * (p - q)).sum(-1), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(p.exp().sum(-1), torch.ones(len(p)).double(), atol=1e-5, rtol=0)
    assert float(expected.min()) > 0.01


async def test_more_alternatives_than_tokens_are_refused(server: Served) -> None:
    async with reference_to(server) as model:
        with pytest.raises(EngineError, match=rf"prompt_logprobs is {VOCAB_SIZE + 1}"):
            await model.top_logprobs([1, 2], VOCAB_SIZE + 1)
        assert (await model.top_logprobs([1], 3))[1].tolist() == [[0.0] * 3]
