"""Scores of the embedded engine by core's scorer."""

import asyncio

import pytest
import warm
from waiting import LIMIT

from prime_rl.inference.pool import FrozenPool
from prime_rl.inference.scorer import PromptScorer


async def test_scores_of_the_embedded_engine_are_those_of_a_plain_forward(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    from prime_rl_embedded import testing
    from prime_rl_embedded.testing import serve, write_model

    monkeypatch.setattr(testing, "subprocess", warm.SUBPROCESS)
    folder = write_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(9, 265, (n,), generator=generator).tolist() for n in (2, 40, 63, 17)]
    with serve(folder, max_model_len=64) as served:
        engines = FrozenPool([f"{served.url}/v1"], "tiny", where="env 'a': teacher")
        await engines.wait_ready(LIMIT)
        columns = await asyncio.gather(*map(PromptScorer(engines, "tiny").logprobs, rows))
        await engines.close()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for ids, column in zip(rows, columns, strict=True):
        with torch.no_grad():
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [0.0, *(float(table[i - 1, ids[i]]) for i in range(1, len(ids)))]
        assert column.tolist() == pytest.approx(expected, abs=1e-4)
