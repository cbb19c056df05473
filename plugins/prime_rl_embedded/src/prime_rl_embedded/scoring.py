"""Score prompts: the logprob of each token of a given sequence, for teachers and references.

    prompts -> one flat forward over all of them -> states -> logits, a few rows at a time

Nothing is decoded afterwards, so prompts take no slot and their KV is not stored. Logprobs are the
model's own, at temperature 1 without truncation, like vLLM's ``prompt_logprobs``. Equal prompts
with the same salt are computed once.

Shapes: N = tokens of one forward, E = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
from torch import Tensor

from prime_rl_embedded.attention import BatchPlan
from prime_rl_embedded.model import ServedModel
from prime_rl_embedded.requests import Request, TokenScore
from prime_rl_embedded.sampling import score_tokens
from prime_rl_kernels.device import to_device

_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
"""Logits computed at a time: on CPU what fits its caches, on CUDA enough to fill the device."""
_FEWEST_ROWS = 32
"""Rows per chunk at least: with fewer, reading the head's weights costs more than using them."""


def score_prompts(model: ServedModel, requests: Sequence[Request], *, share: bool) -> Tensor:
    """Set ``prompt_scores`` of every request. Returns the logits [len(requests), V] at each
    prompt's end. With ``share``, equal prompts are computed once."""
    by_prompt = _by_prompt(requests) if share else {i: [r] for i, r in enumerate(requests)}
    groups = sorted(by_prompt.values(), key=lambda group: len(group[0].prompt))
    prompts = [group[0].prompt for group in groups]
    flat = np.array(list(chain.from_iterable(prompts)))
    ids = to_device(flat, np.int64, model.device)
    states = model.forward.states(
        ids, BatchPlan.uncached(list(map(len, prompts)), model.device), None
    )
    wanted = [max(request.params.prompt_logprobs or 0 for request in group) for group in groups]
    alternatives = [k for k, prompt in zip(wanted, prompts, strict=True) for _ in prompt]
    scores = _score(model, states, ids=ids, alternatives=alternatives)
    ends = list(accumulate(map(len, prompts)))
    row_of: dict[int, int] = {}
    for row, (group, end) in enumerate(zip(groups, ends, strict=True)):
        _set_scores(scores[end - len(group[0].prompt) : end - 1], group)
        row_of |= dict.fromkeys(map(id, group), row)

    last = model.forward.logits(states[[end - 1 for end in ends]])
    return last[[row_of[id(request)] for request in requests]]


def is_scored(request: Request) -> bool:
    """Whether no score is NaN. -inf is a valid score."""
    scores = request.prompt_scores or []
    return not math.isnan(sum(row[0].logprob for row in scores))


def _by_prompt(requests: Sequence[Request]) -> dict[object, list[Request]]:
    """Requests by prompt and salt, in order of arrival."""
    groups: dict[object, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prefix_key, []).append(request)
    return groups


def _score(
    model: ServedModel, states: Tensor, ids: Tensor, alternatives: Sequence[int]
) -> list[list[TokenScore]]:
    """One entry per token, which scores the next token of the flat order. States [N, E], ids [N].

    ``alternatives``: [N], the number that each entry needs at least.
    A prompt's last entry scores the next prompt's first token and is dropped by the caller.
    """
    most = _CHUNK_LOGITS.get(model.device.type, _CHUNK_LOGITS["cuda"])
    rows = max(most // model.vocab_size, _FEWEST_ROWS)
    following = ids.roll(-1)
    scores = []
    for first in range(0, len(ids), rows):
        chunk = slice(first, first + rows)
        logits = model.forward.logits(states[chunk])
        scores += score_tokens(logits, following[chunk], max(alternatives[chunk]))

    return scores


def _set_scores(scores: list[list[TokenScore]], group: Sequence[Request]) -> None:
    """Give each request as many alternatives as it asked for. Only the first one was computed."""
    for request in group:
        wanted = request.params.prompt_logprobs or 0
        request.prompt_scores = [
            [row[0], *(other for other in row[1:] if other.rank <= wanted)] for row in scores
        ]
        if request is not group[0]:
            request.cached_tokens = len(request.prompt)
