"""Hand-computed distributions, and samples compared with the logprobs of their reply."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.sampling import sample, sampling_logprobs, score_tokens
from prime_rl_embedded.testing import Served

# Probabilities 0.5, 0.25, 0.15, 0.1 of tokens 2, 0, 3, 1.
LOGITS = torch.tensor([[0.25, 0.1, 0.5, 0.15]]).log()


def probabilities(**params: Any) -> list[float]:
    logprobs = sampling_logprobs(LOGITS, [SamplingParams(max_tokens=1, **params)])
    return [round(p, 4) for p in logprobs[0].exp().tolist()]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.25, 0.1, 0.5, 0.15]),
        # Squared and renormalized: 0.0625, 0.01, 0.25, 0.0225 over 0.345.
        ({"temperature": 0.5}, [0.1812, 0.029, 0.7246, 0.0652]),
        ({"top_k": 2}, [0.3333, 0, 0.6667, 0]),
        ({"top_k": 9}, [0.25, 0.1, 0.5, 0.15]),
        ({"min_p": 0.3}, [0.2778, 0, 0.5556, 0.1667]),  # 0.15 = 0.3 * 0.5 stays
        ({"min_p": 1.0}, [0, 0, 1, 0]),
        ({"top_p": 0.5}, [0, 0, 1, 0]),  # the first token reaches 0.5 already
        ({"top_p": 0.51}, [0.3333, 0, 0.6667, 0]),
        ({"top_p": 0.0001}, [0, 0, 1, 0]),
        # top-k leaves 5/9, 2.5/9, 1.5/9; top-p 0.6 over those keeps two.
        ({"top_k": 3, "top_p": 0.6}, [0.3333, 0, 0.6667, 0]),
        ({"temperature": 0.0, "top_k": 1}, [0.25, 0.1, 0.5, 0.15]),  # greedy reports raw logprobs
    ],
)
def test_the_sampling_distribution(params: dict[str, Any], expected: list[float]) -> None:
    assert probabilities(**params) == pytest.approx(expected, abs=1e-4)


def test_rows_with_different_parameters_do_not_affect_each_other() -> None:
    rows = [
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.5, min_p=0.5),
    ]
    together = sampling_logprobs(LOGITS.expand(3, -1), rows)
    for i, params in enumerate(rows):
        assert torch.equal(together[i], sampling_logprobs(LOGITS, [params])[0])


def test_a_token_without_probability_is_never_drawn() -> None:
    """Uniforms at both ends of [0, 1), with excluded tokens first, last and between."""

    class Fixed(random.Random):
        def __init__(self, bits: int) -> None:
            super().__init__()
            self.bits = bits

        def getrandbits(self, k: int) -> int:
            return self.bits

    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for bits, token in ((0, 1), (2**31 - 1, 1), (2**31, 3), (2**32 - 1, 3)):
        request = Request([1], SamplingParams(max_tokens=1))
        request.rng = Fixed(bits)
        assert sample(logits, [request]).tokens == [token]


def test_a_large_vocabulary_gives_the_tokens_of_one_long_sum() -> None:
    """5,000 words, of which 40 have all the probability; the oracle cumulates every word."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((400, 5000), float("-inf"))
    for row in logits:
        row[torch.randperm(5000, generator=generator)[:40]] = torch.randn(40, generator=generator)
    params = SamplingParams(max_tokens=1)
    requests = [Request([1], params, rng=random.Random(seed)) for seed in range(400)]
    uniforms = [random.Random(seed).getrandbits(32) / 2**32 for seed in range(400)]
    expected = []
    for row, uniform in zip(logits.double().softmax(-1).cumsum(-1), uniforms, strict=True):
        expected.append(int(torch.searchsorted(row, uniform * row[-1], right=True)))
    drawn = sample(logits, requests)
    assert drawn.tokens == expected
    assert all(math.isfinite(logprob) for logprob in drawn.logprobs)


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-32])
def test_the_ends_of_a_large_vocabulary_are_drawn_exactly(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal probability at both ends of a block and nothing between: no zero is ever drawn."""
    monkeypatch.setattr("prime_rl_embedded.sampling._uniform", lambda rng: share)
    logits = torch.full((1, 5000), float("-inf"))
    logits[0, [256, 511]] = 0.0
    drawn = sample(logits, [Request([1], SamplingParams(max_tokens=1))])
    assert drawn.tokens == [256 if share < 0.5 else 511]


def test_scores_of_given_tokens_are_raw_and_ranked() -> None:
    rows = score_tokens(LOGITS.expand(2, -1), torch.tensor([3, 2]), 2)
    found = [[(s.token_id, round(math.exp(s.logprob), 3), s.rank) for s in row] for row in rows]
    assert found == [[(3, 0.15, 3), (2, 0.5, 1), (0, 0.25, 2)], [(2, 0.5, 1), (0, 0.25, 2)]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_samples_follow_their_own_logprobs(server: Served, temperature: float) -> None:
    """Chi-square of 2,048 first tokens. Expected counts come from the returned logprobs alone."""
    counts: Counter[int] = Counter()
    probability: dict[int, float] = {}
    for seed in range(16):
        reply = server.generate(
            [50, 60, 70], max_tokens=1, n=128, seed=1000 * seed, temperature=temperature, top_p=0.9
        )
        for choice in reply["choices"]:
            entry = choice["logprobs"]["content"][0]
            counts[entry["token_id"]] += 1
            expected = math.exp(entry["logprob"])
            previous = probability.setdefault(entry["token_id"], expected)
            assert previous == pytest.approx(expected, rel=1e-5)
    total = counts.total()
    common = [token for token in counts if total * probability[token] >= 5]
    rest = 1 - sum(probability[token] for token in common)
    bins = [(counts[token], total * probability[token]) for token in common]
    if total * rest >= 5:
        bins.append((total - sum(counts[token] for token in common), total * rest))
    assert len(bins) > 5 and rest < 0.2
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    assert statistic < chi_square_quantile(len(bins) - 1)
    assert sum(probability.values()) < 1 + 1e-5


def chi_square_quantile(degrees: int) -> float:
    """The 99.9 % quantile, by Wilson and Hilferty (1931): z = 3.09."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3
