"""A rollout with all real parts: policy, engine, taskset, harness, adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from renderers import Qwen3RendererConfig
from waiting import LIMIT

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import BranchTokens, EnvSettings, ModelEndpoint

pytestmark = pytest.mark.slow
VERSION = 3


@pytest.fixture(scope="module")
def engine(tiny_reverse: Path) -> Iterator[ModelEndpoint]:
    """The embedded engine serving the tiny policy as version 3."""
    testing = pytest.importorskip("prime_rl_embedded.testing", reason="needs prime-rl-embedded")
    with testing.serve(tiny_reverse, max_model_len=64, policy_version=VERSION) as served:
        yield ModelEndpoint("tiny", f"{served.url}/v1")


async def test_rollouts_of_the_real_policy_have_what_the_trainer_needs(
    tiny_reverse: Path, engine: ModelEndpoint
) -> None:
    settings = EnvSettings(
        default_harness={"id": "in-process"},
        id="reverse-text",
        args={"split": "held_out", "num_examples": 64},
        renderer=Qwen3RendererConfig(thinking_retention="all"),
        tokenizer_path=tiny_reverse,
        timeout=LIMIT,
    )
    sampling = SamplingSettings(temperature=0.8, max_completion_tokens=12)
    async with Environment(settings) as env:

        async def sample(index: int) -> BranchTokens:
            (result,) = await env.run(
                env.examples[index], model=engine, sampling=sampling, cache_salt="3", seed=index
            )
            assert result.ok, result.error
            rewards.append(result.reward)
            return result.branches[0]

        rewards: list[float] = []
        await sample(0)
        branches = await asyncio.gather(*(sample(index) for index in range(64)))
        again = await sample(7)
    assert 0.3 < sum(rewards) / len(rewards) < 0.85
    assert again.token_ids == branches[7].token_ids  # whatever else is in the batch
    for branch in branches:
        assert branch.policy_versions is not None
        assert [v for v in branch.policy_versions if v != -1] == [VERSION] * sum(
            branch.sampled_mask
        )
    assert max(logprob_gap(tiny_reverse, branch, 0.8) for branch in branches[:16]) < 1e-4


def logprob_gap(model_path: Path, branch: BranchTokens, temperature: float) -> float:
    """Largest difference between the engine's logprobs and those of a plain forward."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([branch.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_path)(ids).logits[0, :-1]
    logprobs = torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, 1:, None])[:, 0]
    mask = np.asarray(branch.sampled_mask)[1:]
    gap: float = np.abs(logprobs.numpy() - np.asarray(branch.logprobs)[1:])[mask].max()
    return gap
