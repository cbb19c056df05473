"""Continuous batching: which requests are in the batch, and one step of all of them.

Rows are compact: request ``active[i]`` owns row i of the KV cache, and a row that ends is filled by
the last one. A step decodes one token of every active row and, in the same forward, prefills the
prompts it admits.

A prompt that equals a running one of the same salt, under the same weights, isn't prefilled: its KV
is copied, and it joins the next step by feeding the prompt's last token again.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from prime_rl_embedded.attention import BatchPlan
from prime_rl_embedded.model import ServedModel
from prime_rl_embedded.requests import Request
from prime_rl_embedded.sampling import sample, score_tokens

log = logging.getLogger(__name__)


@dataclass
class Stats:
    """Counters since the start, read by other threads."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens whose KV was copied instead of computed."""
    steps: int = 0
    weight_updates: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""


class Scheduler:
    """The state of the batch. Not thread-safe: one thread owns it (``loop.EngineLoop``)."""

    def __init__(
        self,
        model: ServedModel,
        *,
        num_slots: int,
        max_model_len: int,
        max_prefill_tokens: int | None = None,
        share_prefixes: bool = True,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self.model = model
        self.num_slots, self.max_model_len = num_slots, max_model_len
        on_cpu = model.device.type == "cpu"
        self.max_prefill_tokens = max_prefill_tokens or (1024 if on_cpu else 8192)
        self.share_prefixes = share_prefixes
        self.seed, self.version = seed, version
        self.cache = model.make_cache(num_slots, max_model_len)
        self.active: list[Request] = []
        self.waiting: list[tuple[int, int, Request]] = []
        self.stats = Stats()
        self.arrivals = 0
        self._prefixes: dict[object, Request] = {}

    # -- what arrives ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; lower priority first, then by arrival."""
        seed = request.params.seed
        request.rng = random.Random(f"{self.seed}/{self.arrivals}" if seed is None else seed)
        heapq.heappush(self.waiting, (request.priority, self.arrivals, request))
        self.arrivals += 1

    def abort(self, request: Request) -> None:
        """End a request early, wherever it is. No effect once it has finished."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self.active:
            self._reap()
        else:
            self.waiting = [entry for entry in self.waiting if entry[2] is not request]
            heapq.heapify(self.waiting)
            self._finish(request)

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        requests = self.active + [entry[2] for entry in self.waiting]
        self.active, self.waiting = [], []
        self._fail(requests, reason)

    def swap_weights(self, apply: Callable[[], None], version: int) -> None:
        """Run ``apply`` between two steps. Active rows keep their KV, which nobody may share."""
        apply()
        self.version = version
        self._prefixes.clear()
        self.stats.weight_updates += 1

    @property
    def has_work(self) -> bool:
        return bool(self.active or self.waiting)

    # -- one step -------------------------------------------------------------------

    def step(self) -> None:
        """One token for each active row and admitted prompt. A failure ends its requests."""
        leaders, followers = self._admit()
        try:
            self._generate(leaders, followers)
        except Exception as error:
            log.exception("a step of %d rows failed", len(self.active) + len(leaders))
            # Decoding again is harmless, so running rows survive if what was admitted is to blame.
            blamed = leaders + followers or self.active
            self.active = [r for r in self.active if r not in blamed]
            self._fail(blamed, f"{type(error).__name__}: {error}")
        self._reap()
        self.stats.steps += 1

    def _admit(self) -> tuple[list[Request], list[Request]]:
        """Requests to prefill, in order of length; and those that will copy KV."""
        leaders: list[Request] = []
        followers: list[Request] = []
        budget = self.max_prefill_tokens
        while self.waiting and len(self.active) + len(leaders) + len(followers) < self.num_slots:
            request = self.waiting[0][2]
            if self._may_share(request):
                followers.append(request)
            elif leaders and len(request.prompt) > budget:
                break
            else:
                leaders.append(request)
                budget -= len(request.prompt)
                if self.share_prefixes:
                    self._prefixes[request.prefix_key] = request
            heapq.heappop(self.waiting)
        return sorted(leaders, key=lambda r: len(r.prompt)), followers

    def _may_share(self, request: Request) -> bool:
        """Scoring a prompt needs its hidden states, so such a request prefills itself."""
        wants_scores = request.params.prompt_logprobs is not None
        return self.share_prefixes and not wants_scores and request.prefix_key in self._prefixes

    def _generate(self, leaders: list[Request], followers: list[Request]) -> None:
        sampled = self.active + leaders
        if sampled:
            logits = self._forward(leaders)
            self._emit(sampled, logits[: len(sampled)])
            self._score_prompts(leaders, logits[len(sampled) :])
        self.active = sampled
        for follower in followers:
            self._copy_prefix(follower)
        self._count(leaders + followers)

    def _forward(self, leaders: Sequence[Request]) -> Tensor:
        """Logits of active rows, of each leader's last token, then of prompts to score."""
        decoding = [request.position for request in self.active]
        lengths = [len(request.prompt) for request in leaders]
        device = self.model.device
        plan = BatchPlan.build(self.cache, decoding, lengths, device)
        ids = [request.next_token for request in self.active]
        ids += chain.from_iterable(request.prompt for request in leaders)
        rows = _logit_rows(len(decoding), leaders)
        keep = None if rows is None else torch.tensor(rows, device=device)
        return self.model.forward(torch.tensor(ids, device=device), plan, keep)

    def _emit(self, requests: Sequence[Request], logits: Tensor) -> None:
        drawn = sample(logits, requests)
        finite = math.isfinite(sum(drawn.logprobs))
        for row, request in enumerate(requests):
            logprob = drawn.logprobs[row]
            if not finite and not math.isfinite(logprob):
                self._refuse_nonfinite(row, request)
                continue
            if drawn.alternatives is not None and request.params.top_logprobs:
                request.top_logprobs.append(drawn.alternatives[row][: request.params.top_logprobs])
            request.accept(drawn.tokens[row], logprob, self.version)
            if request.on_token is not None:
                request.on_token(request)
        self.stats.generated_tokens += len(requests)

    def _refuse_nonfinite(self, row: int, request: Request) -> None:
        request.finish_reason = "error"
        request.error = (
            f"the model's logits are not finite at position {row_length(request)} "
            f"under policy version {self.version}"
        )
        self.cache.clear_row(row)

    def _score_prompts(self, leaders: Sequence[Request], logits: Tensor) -> None:
        """Logits: of all prompt positions but the last, of the leaders that asked, in order."""
        start = 0
        for request in leaders:
            alternatives = request.params.prompt_logprobs
            if alternatives is None:
                continue
            end = start + len(request.prompt) - 1
            targets = torch.tensor(request.prompt[1:], dtype=torch.int64, device=logits.device)
            request.prompt_scores = score_tokens(logits[start:end], targets, alternatives)
            start = end

    def _copy_prefix(self, follower: Request) -> None:
        leader = self._prefixes[follower.prefix_key]
        length = len(follower.prompt)
        row = len(self.active)
        if leader.finish_reason == "error":  # its row has been cleared: there is nothing to copy
            follower.finish_reason, follower.error = "error", leader.error
            self.active.append(follower)
            return
        self.cache.reserve(row + 1, length)
        self.cache.copy_row(self.active.index(leader), row, length - 1)
        follower.next_token, follower.position = follower.prompt[-1], length - 1
        follower.cached_tokens = length - 1
        self.stats.shared_tokens += length - 1
        self._prefixes[follower.prefix_key] = follower
        self.active.append(follower)

    def _count(self, admitted: Sequence[Request]) -> None:
        self.stats.prompt_tokens += sum(len(request.prompt) for request in admitted)

    # -- what ends ------------------------------------------------------------------

    def _reap(self) -> None:
        """Take finished requests out of the batch and close the gaps."""
        active, row, ended = self.active, 0, []
        while row < len(active):
            if active[row].finish_reason is None:
                row += 1
                continue
            ended.append(active[row])
            last = active.pop()
            if row < len(active):
                self.cache.copy_row(len(active), row, last.position + 1)
                active[row] = last
        for request in ended:
            self._finish(request)

    def _fail(self, requests: Sequence[Request], reason: str) -> None:
        for request in requests:
            request.finish_reason, request.error = "error", reason
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if self._prefixes.get(request.prefix_key) is request:
            del self._prefixes[request.prefix_key]
        self.stats.finished[str(request.finish_reason)] += 1
        if request.on_finish is not None:
            request.on_finish(request)


def row_length(request: Request) -> int:
    """Tokens of a sequence so far."""
    return len(request.prompt) + len(request.token_ids)


def _logit_rows(num_decode: int, leaders: Sequence[Request]) -> list[int] | None:
    """Which tokens of a flat forward need logits; None for all."""
    if not leaders:
        return None
    rows = list(range(num_decode))
    scored: list[int] = []
    start = num_decode
    for request in leaders:
        end = start + len(request.prompt)
        rows.append(end - 1)
        if request.params.prompt_logprobs is not None:
            scored += range(start, end - 1)
        start = end
    return rows + scored
