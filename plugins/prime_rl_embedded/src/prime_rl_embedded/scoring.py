"""Scoring prompts: how likely each token of a given sequence is, for teachers and references.

    prompts -> one forward over all of them, end to end -> states -> logits, a few rows at a time

Nothing is decoded afterwards, so no KV is stored and no slot is taken; each prompt attends to
itself only. Logits are the model's own, at temperature 1 without any cut, as vLLM's
``prompt_logprobs`` are. Equal prompts of one salt are computed once.

Shapes: N = tokens of one forward, E = hidden size, V = vocabulary, P = different prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from prime_rl_embedded.attention import BatchPlan
from prime_rl_embedded.model import ServedModel
from prime_rl_embedded.requests import Request, TokenScore
from prime_rl_embedded.sampling import score_tokens

_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
"""Logits that exist at a time: on CPU what its caches bear, else what fills the device."""
_FEWEST_ROWS = 32
"""Fewer rows at a time than this, and the head's weights are read more often than they're used."""


def score_prompts(model: ServedModel, requests: Sequence[Request], *, share: bool) -> Tensor:
    """Set ``prompt_scores`` of every request. Returns the logits [len(requests), V] of what follows
    each prompt."""
    leaders = _different(requests) if share else {i: [r] for i, r in enumerate(requests)}
    groups = sorted(leaders.values(), key=lambda group: len(group[0].prompt))
    prompts = [group[0].prompt for group in groups]
    ids = torch.tensor(list(chain.from_iterable(prompts)), device=model.device)
    states = model.forward.states(
        ids, BatchPlan.uncached(list(map(len, prompts)), model.device), None
    )
    alternatives = max(request.params.prompt_logprobs or 0 for request in requests)
    scores = _score(model, states, ids, alternatives)
    ends = list(accumulate(map(len, prompts)))
    row_of: dict[int, int] = {}
    for row, (group, end) in enumerate(zip(groups, ends, strict=True)):
        _hand_out(scores[end - len(group[0].prompt) : end - 1], group)
        row_of |= dict.fromkeys(map(id, group), row)
    last = model.forward.logits(states[[end - 1 for end in ends]])
    return last[[row_of[id(request)] for request in requests]]


def is_scored(request: Request) -> bool:
    """Whether its scores are numbers; -inf is one, NaN isn't."""
    scores = request.prompt_scores or []
    return not math.isnan(sum(row[0].logprob for row in scores))


def _different(requests: Sequence[Request]) -> dict[object, list[Request]]:
    """Requests by prompt and salt, in order of arrival."""
    groups: dict[object, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prefix_key, []).append(request)
    return groups


def _score(
    model: ServedModel, states: Tensor, ids: Tensor, alternatives: int
) -> list[list[TokenScore]]:
    """One entry a token: of its successor in the flat order. States [N, E], ids [N].

    A prompt's last entry is about the next prompt's first token and of no use.
    """
    most = _CHUNK_LOGITS.get(model.device.type, _CHUNK_LOGITS["cuda"])
    rows = max(most // model.vocab_size, _FEWEST_ROWS)
    chunks = zip(torch.split(states, rows), torch.split(ids.roll(-1), rows), strict=True)
    return [
        score
        for part, successors in chunks
        for score in score_tokens(model.forward.logits(part), successors, alternatives)
    ]


def _hand_out(scores: list[list[TokenScore]], group: Sequence[Request]) -> None:
    """Each gets as many alternatives as it asked for; the first one paid for all."""
    for request in group:
        wanted = request.params.prompt_logprobs or 0
        request.prompt_scores = [
            [row[0], *(other for other in row[1:] if other.rank <= wanted)] for row in scores
        ]
        if request is not group[0]:
            request.cached_tokens = len(request.prompt)
