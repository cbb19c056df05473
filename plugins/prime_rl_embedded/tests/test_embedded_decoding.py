"""Decoding rows: what a row computes does not depend on the rows beside it, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl_embedded.decoding import attend_run, prefix_length, row_runs
from prime_rl_embedded.model import ServedModel, load_model
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.testing import write_model

POSITIONS = [5, 100, 300, 31, 1024, 1100, 1200, 1041, 970, 1500, 15, 600]
OWNERS: list[tuple[int, object]] = [(0, None)] * 4 + [(960, "a")] * 4 + [(960, "b"), (1472, "c")]
PREFIXES = [*OWNERS, (0, None), (0, None)]


def attended(rows: slice, query: Tensor, keys: Tensor, values: Tensor, more: int = 0) -> Tensor:
    """[rows, H * D] of some rows, as if there were no others. ``more``: positions that a longer row
    would add."""
    capacity, positions = keys.shape[2], POSITIONS[rows]
    mask = torch.zeros(len(positions), 1, 1, capacity)
    hidden = torch.arange(capacity) > torch.tensor(positions)[:, None]
    mask.masked_fill_(hidden[:, None, None], float("-inf"))
    runs = row_runs(positions, PREFIXES[rows], capacity)
    for run in runs:
        run.context = min(run.context + more, capacity)
    return torch.cat([attend_run(run, query[rows], keys[rows], values[rows], mask) for run in runs])


@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(3, 3, 64), (2, 2, 8), (8, 4, 64), (1, 8, 128), (4, 1, 16)]
)
def test_a_row_has_the_same_bits_beside_any_others(heads: int, group: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, len(POSITIONS), heads, 2048, dim, generator=generator)
    query = torch.randn(len(POSITIONS), heads, group, dim, generator=generator) * dim**-0.5
    for each in (keys, values):
        each[4:8, :, :960] = each[4:5, :, :960]
    whole = attended(slice(0, 12), query, keys, values)
    for row, end in enumerate(POSITIONS):
        expected = F.scaled_dot_product_attention(
            query[row], keys[row, :, : end + 1], values[row, :, : end + 1], scale=1.0
        )
        assert (whole[row] - expected.flatten()).abs().max() < 1e-5
        for more in (0, 16, 400):
            alone = attended(slice(row, row + 1), query, keys, values, more)
            assert torch.equal(alone[0], whole[row]), (row, more)
    for first, last in ((0, 3), (2, 5), (5, 8), (4, 9), (6, 12)):
        some = attended(slice(first, last), query, keys, values, 16)
        assert torch.equal(some, whole[first:last]), (first, last)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("long")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    write_model(folder, max_position_embeddings=2048, initializer_range=0.1, **sizes)
    return load_model(folder, max_len=1100)


def generated(model: ServedModel, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    scheduler = Scheduler(model, num_slots=8, max_model_len=1100)
    requests = [
        Request(prompt, SamplingParams(max_tokens=9 + index % 3, seed=index))
        for index, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.step()
    return [(request.token_ids, request.logprobs) for request in requests]


def test_replies_to_a_long_prompt_have_the_same_bits_whoever_shares_it(model: ServedModel) -> None:
    """Rows of one prompt, with rows of others between them, end at different steps."""
    prompt, other = [7 * i % 64 for i in range(1030)], [5 * i % 64 for i in range(1000)]
    assert prefix_length(len(prompt)) == 1024 and prefix_length(len(other)) == 960
    together = generated(model, [prompt, prompt, prompt, prompt, other, [1, 2, 3]])
    fewer = generated(model, [prompt, prompt, other, prompt])
    assert together[:2] == fewer[:2]
    assert together[3] == fewer[3]
    assert generated(model, [prompt])[0] == together[0]
