"""vLLM in bfloat16, as on a GPU: its logits are float32 all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import PYTHON, SETTINGS
from torch import Tensor

from prime_rl_devkit.engines import started
from prime_rl_vllm import Vllm, VllmConfig

GRID = 2.0**-9
"""Between neighbors of bfloat16 from 1/4 to 1/2; between larger ones it is a multiple of that."""
PROMPT = list(range(20, 60))


def share_on_grid(logprobs: Tensor) -> float:
    """Share of log-probabilities [V] that differ from the largest one by a multiple of ``GRID``, as
    those of rounded logits do. float32 leaves 1e-6 of rounding."""
    steps = (logprobs - logprobs.max()).double() / GRID
    return float(((steps - steps.round()).abs() < 0.01).float().mean())


@pytest.mark.vllm
def test_logits_are_not_rounded_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16"}
    engine = Vllm(VllmConfig.model_validate(settings))
    with started(engine, tmp_path, python=PYTHON) as server:
        server.meet()
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "logprobs": 200}
        answer = server.ok(server.http.post("/v1/completions", json=body, headers=server.headers()))
        logits = server.reference().logits(PROMPT)[-1]

    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    logprobs = torch.tensor([*top.values()])
    assert len(logprobs) > 50
    # The rest of the model is in bfloat16: near the exact ones, and not equal to them.
    gap = (logprobs.max() - logits.log_softmax(-1).max()).abs()
    assert 1e-5 < gap < 0.15
    assert share_on_grid(logprobs) < 0.2
    assert share_on_grid(logits.bfloat16().float().log_softmax(-1)) > 0.5
