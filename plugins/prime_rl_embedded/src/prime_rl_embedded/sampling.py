"""Sample tokens by inverse CDF, with one uniform per row from the request's own generator, so a
row's token does not depend on the rest of the batch.

The distribution of a row is softmax(logits / temperature), truncated by top-k, min-p and top-p in
that order (top-p over what the others keep), and renormalized. Reported logprobs are those of this
distribution; for greedy rows, of the one at temperature 1.

Shapes: R = rows, V = vocabulary, K = top alternatives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl_embedded.requests import Request, SamplingParams, TokenScore
from prime_rl_kernels.device import to_device

_UNIFORM_BITS = 32
_UNIFORM_RANGE = float(1 << _UNIFORM_BITS)
_LARGE_VOCABULARY = 4096
_BLOCK = 256


@dataclass(frozen=True)
class Drawn:
    """The tokens of one step, on the host."""

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[list[TokenScore]] | None
    """The most likely tokens of each row, if any row asked for them."""


def sample(logits: Tensor, requests: Sequence[Request]) -> Drawn:
    """Draw one token per row. Logits: [R, V], any float dtype; row i belongs to ``requests[i]``."""
    params = [request.params for request in requests]
    logits = _without_early_stops(logits.float(), requests)
    kept = _sampling_logits(logits, params)
    probs = kept.softmax(-1)

    tokens = _draw(probs, [_uniform(request.rng) for request in requests])
    is_greedy = [each.greedy for each in params]
    if any(is_greedy):
        greedy = to_device(np.array(is_greedy), np.bool_, logits.device)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)

    chosen = probs.gather(-1, tokens[:, None])[:, 0].log_()
    alternatives = None
    num_alternatives = max(each.top_logprobs for each in params)
    if num_alternatives:
        alternatives = top_scores(kept.log_softmax(-1), num_alternatives)
    return Drawn(tokens.tolist(), chosen.tolist(), alternatives)


def sampling_logprobs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log of each row's sampling distribution. Logits: [R, V] float32; returns [R, V]."""
    return _sampling_logits(logits, params).log_softmax(-1)


def _sampling_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [R, V] of the sampling distributions."""
    if any(p.temperature != 1.0 for p in params):
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        logits = logits / to_device(np.array(temperatures), np.float32, logits.device)[:, None]

    truncated = [row for row, each in enumerate(params) if each.truncated]
    if not truncated:
        return logits
    if len(truncated) == len(params):
        return _truncate(logits, params)

    rows = to_device(np.array(truncated), np.int64, logits.device)
    shorter = _truncate(logits[rows], [params[row] for row in truncated])
    return logits.index_copy(0, rows, shorter)


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set logits to -inf where top-k, min-p or top-p exclude the token.

    The most likely token always stays, and so do ties with the last token kept.
    """
    device = logits.device
    size = logits.shape[-1]
    ordered = _descending(logits)
    top_k = to_device(np.array([p.top_k or size for p in params]), np.int64, device)[:, None]
    min_p = to_device(np.array([p.min_p for p in params]), np.float32, device)[:, None]
    top_p = to_device(np.array([p.top_p for p in params]), np.float32, device)[:, None]

    dropped = torch.arange(size, device=device) >= top_k
    # min-p drops p < min_p * p_max; here in log space. min_p = 0 gives -inf, which drops nothing.
    dropped |= ordered < ordered[:, :1] + min_p.log()
    kept = ordered.masked_fill(dropped, float("-inf")).softmax(-1)
    # top-p drops a token if those before it sum to top_p. At 1.0, rounding must not drop the tail.
    dropped |= (kept.cumsum(-1) - kept >= top_p) & (top_p < 1.0)
    last = (size - dropped.sum(-1, keepdim=True) - 1).clamp(min=0)
    return logits.masked_fill(logits < ordered.gather(-1, last), float("-inf"))


def _descending(logits: Tensor) -> Tensor:
    """Sort each row. On CPU with NumPy: its vectorized sort takes a fraction of torch's time."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))


def _draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Token ids [R]: the first whose cumulative probability exceeds the row's uniform.

    Probs: [R, V]. A large vocabulary is summed in blocks, and only the block with the token is
    cumulated.
    """
    size = probs.shape[-1]
    shares = to_device(np.array(uniforms), np.float64, probs.device)[:, None]
    if size < _LARGE_VOCABULARY:
        return _first_above(probs.cumsum(-1, dtype=torch.float64), shares)[:, 0]

    padded = F.pad(probs, (0, -size % _BLOCK)) if size % _BLOCK else probs
    blocks = padded.view(len(probs), -1, _BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    block = _first_above(ends, shares)

    # The share of the row becomes one of its block.
    of_block = sums.gather(-1, block)
    end = ends.gather(-1, block)
    rest = (shares * ends[:, -1:] - (end - of_block)) / of_block
    # Not 1, to which it may be rounded: nothing in the block is above its sum.
    rest.clamp_(0.0, 1.0 - torch.finfo(torch.float64).eps)
    inside = blocks[torch.arange(len(blocks), device=block.device), block[:, 0]]
    place = _first_above(inside.cumsum(-1, dtype=torch.float64), rest)
    return (block * _BLOCK + place)[:, 0].clamp_(max=size - 1)


def _first_above(cumulative: Tensor, shares: Tensor) -> Tensor:
    """[R, 1]: the first place whose value exceeds the row's share of the last one. Cumulative: [R,
    n] float64; shares: [R, 1], under 1.

    Scaling by the row's sum makes rounding harmless: a 32-bit uniform is at most 1 - 2^-32, so the
    target stays below the sum.
    """
    places = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
    # The end is reached only by a row of NaNs, which the scheduler fails.
    return places.clamp_(max=cumulative.shape[-1] - 1)


def _uniform(rng: random.Random) -> float:
    return rng.getrandbits(_UNIFORM_BITS) / _UNIFORM_RANGE


def _without_early_stops(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    for row, request in enumerate(requests):
        params = request.params
        if len(request.token_ids) < params.min_tokens and params.stop_token_ids:
            logits[row, list(params.stop_token_ids)] = float("-inf")
    return logits


def top_scores(logprobs: Tensor, count: int) -> list[list[TokenScore]]:
    """The ``count`` most likely tokens of each row that have any probability. Logprobs: [R, V]."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), -1)
    scores = []
    for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True):
        ranked = enumerate(zip(row_ids, row_values, strict=True), start=1)
        scores.append(
            [
                TokenScore(token, logprob, rank)
                for rank, (token, logprob) in ranked
                if logprob > float("-inf")
            ]
        )
    return scores


def score_tokens(logits: Tensor, tokens: Tensor, num_alternatives: int) -> list[list[TokenScore]]:
    """Logprobs of given tokens at temperature 1: each token itself, then the most likely ones.

    Logits: [T, V]; tokens: [T].
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])
    # int32: on CPU, summing booleans is several times faster than in int64.
    ranks = (logprobs > chosen).sum(-1, dtype=torch.int32) + 1
    columns = zip(tokens.tolist(), chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    sampled = [TokenScore(token, logprob, rank) for token, logprob, rank in columns]
    if not num_alternatives:
        return [[score] for score in sampled]

    others = top_scores(logprobs, num_alternatives)
    return [
        [score, *(other for other in row if other.token_id != score.token_id)]
        for score, row in zip(sampled, others, strict=True)
    ]
