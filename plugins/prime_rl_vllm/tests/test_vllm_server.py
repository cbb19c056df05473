"""What the engine suite does not ask of a server, and our vLLM does."""

import asyncio
import itertools

import numpy as np
import pytest
import torch

from prime_rl.inference.reference import ScoringPool
from prime_rl.testing.engines.checkpoints import changed

pytestmark = pytest.mark.vllm
GAP = 1e-4


def letters(count, seed=0):
    """Ids of ordinary tokens."""
    return torch.randint(9, 265, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(subject, token_ids):
    """log p of each token given those before it, by transformers in float32; 0.0 for the first."""
    logprobs = torch.log_softmax(subject.reference().logits(token_ids), -1)
    picked = logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


@pytest.mark.parametrize("length", ["short", "the whole context"])
def test_a_teacher_scores_as_transformers_does(vllm, length):
    """What opd asks of its teacher, through the pool that it asks with."""
    token_ids = letters(40 if length == "short" else vllm.max_model_len)

    async def score():
        pool = ScoringPool([vllm.url], vllm.model, where="teacher", api_key=vllm.api_key)
        try:
            return await pool.logprobs(token_ids)
        finally:
            await pool.close()

    assert np.abs(asyncio.run(score()) - expected(vllm, token_ids)).max() < GAP


def test_more_seeded_prompts_than_a_step_takes_are_all_answered(vllm):
    """On a CPU vLLM dies of a seeded prompt that it cuts in two: 64 x 60 tokens, 2,048 a step."""
    bodies = [vllm.body(letters(60, seed=i), max_tokens=2, seed=i) for i in range(64)]
    assert len(vllm.replies(bodies)) == 64


def test_text_routes_never_find_the_cache_of_older_weights(vllm, tmp_path):
    question = {"role": "user", "content": "a" * 300}
    body = {"model": vllm.model, "messages": [question], "max_tokens": 1}

    def cached():
        answer = vllm.http.post("/v1/chat/completions", json=body, headers=vllm.headers())
        return vllm.ok(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, second = cached(), cached()
    vllm.update(changed(vllm.model_folder, tmp_path / "new"))
    after = cached()
    vllm.restore()
    assert (first, after) == (0, 0)
    assert second > 0


def test_an_update_says_how_long_it_took(vllm, tmp_path):
    before = vllm.metric("weight_updates")
    vllm.update(changed(vllm.model_folder, tmp_path / "new"))
    assert vllm.metric("weight_updates") == before + 1
    assert vllm.metric("policy_version") == vllm.version
    seconds = vllm.metric("weight_update_seconds")
    vllm.restore()
    assert 0 < seconds < 10


def test_routes_for_development_need_the_admin_key(vllm):
    body = {"method": "get_model"}
    assert vllm.http.post("/collective_rpc", json=body).status_code == 401
    answer = vllm.http.post("/collective_rpc", json=body, headers=vllm.headers())
    assert answer.status_code == 403


def test_versions_may_jump_and_name_themselves(vllm):
    vllm.version += 40
    vllm.update(vllm.model_folder)
    choice = vllm.choice(letters(5), max_tokens=3)
    assert choice.versions == [(str(vllm.version), 0, 3)]


def test_nothing_is_lost_between_two_updates_in_a_row(vllm):
    """The same weights three times over: a greedy completion is the same each time."""
    completions = []
    for _ in range(3):
        vllm.update(vllm.model_folder)
        completions.append(vllm.choice(letters(20), temperature=0, max_tokens=20).token_ids)
    assert all(a == b for a, b in itertools.pairwise(completions))
