"""Continuous batching: admit requests to the batch, and run one step for all of them.

    add -> waiting  -> _admit -> leaders   -> prefilled in the forward of this step
                              -> followers -> KV copied from a leader, decoded from the next step
        -> unscored -> _score -> finished, or back to ``waiting``

Rows are compact: request ``active[i]`` owns row i of the KV cache, and the last row moves into the
row of a request that ends. A step decodes one token for every active row and prefills the admitted
prompts in the same forward.

A leader's prompt is computed from the end of what the prefix cache has of it (``prefixes.py``).
A follower's prompt equals that of a running request with the same salt under the same weights. It
copies the KV of all prompt tokens but the last. Feeding the last token again gives it logits of its
own in the next step.

Requests whose prompt is scored wait in a separate queue. Each step ends with one batch of them
(``scoring.py``), which takes no row. Those that want more than one token then queue to generate.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from torch import Tensor

from prime_rl_embedded.attention import BatchPlan
from prime_rl_embedded.model import ServedModel
from prime_rl_embedded.prefixes import BLOCK, Node, PrefixCache, restore
from prime_rl_embedded.requests import Request
from prime_rl_embedded.sampling import sample
from prime_rl_embedded.scoring import is_scored, score_prompts
from prime_rl_embedded.sleep import Offloaded, release_cached
from prime_rl_engine_kit.routes import narrowed
from prime_rl_kernels.device import to_device
from prime_rl_kernels.routes import Recorder, choosing

log = logging.getLogger(__name__)

Leaders = dict[Request, list[Node]]
"""Requests to prefill, each with the part of its prompt that is in the prefix cache."""


@dataclass
class Stats:
    """Counters since the start. Other threads read them."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens whose KV was copied instead of computed: from a sibling or the prefix cache."""
    steps: int = 0
    weight_updates: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    ended: int = 0
    """Their sum."""


class Scheduler:
    """The state of the batch. Not thread-safe: the thread of ``loop.EngineLoop`` owns it."""

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
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        on_cpu = model.device.type == "cpu"
        self.max_prefill_tokens = max_prefill_tokens or (1024 if on_cpu else 8192)
        self.share_prefixes = share_prefixes
        self.seed = seed
        self.version = version
        self.cache = model.make_cache(num_slots, max_model_len)
        self.active: list[Request] = []
        self.waiting: list[tuple[int, int, Request]] = []
        self.unscored: list[tuple[int, int, Request]] = []
        """Requests that wait for prompt scores. Entries of both queues: (priority, arrival number,
        request)."""
        self._num_aborted = 0
        """Entries of both queues that were aborted: they are skipped later."""
        self.stats = Stats()
        self.arrivals = 0
        self._prefixes: dict[object, Request] = {}
        """The request whose row to copy, by prompt and salt."""
        self.kept = PrefixCache(max_bytes=0)
        self.asleep = False
        """Whether weights and KV are on the host. Nothing may touch them then."""
        self._offloaded = Offloaded()
        self._on_waking: list[Callable[[], None]] = []

    # -- arrivals -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request: lower priority values first, then by arrival."""
        seed = request.params.seed
        request.rng = random.Random(f"{self.seed}/{self.arrivals}" if seed is None else seed)
        queue = self.waiting if request.params.prompt_logprobs is None else self.unscored
        heapq.heappush(queue, (request.priority, self.arrivals, request))
        self.arrivals += 1

    def abort(self, request: Request) -> None:
        """End a request early, running or waiting. No effect if it has finished."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self.active:
            if not self.asleep:
                self._reap()
        else:
            self._num_aborted += 1
            if 2 * self._num_aborted > len(self.waiting) + len(self.unscored):
                self._drop_aborted()
            self._finish(request)

    def _drop_aborted(self) -> None:
        for queue in (self.waiting, self.unscored):
            queue[:] = [entry for entry in queue if entry[2].finish_reason is None]
            heapq.heapify(queue)
        self._num_aborted = 0

    def _first(self, queue: list[tuple[int, int, Request]]) -> Request | None:
        """The next request of a queue, which stays in it. None: it is empty."""
        while queue and queue[0][2].finish_reason is not None:
            heapq.heappop(queue)
            self._num_aborted -= 1
        return queue[0][2] if queue else None

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        self._drop_aborted()
        requests = self.active + [entry[2] for entry in self.waiting + self.unscored]
        self.active = []
        self.waiting = []
        self.unscored = []
        self._fail(requests, reason)

    def swap_weights(self, apply: Callable[[], None], version: int) -> None:
        """Run ``apply`` between two steps, or on waking. Active rows keep their KV, but new
        requests cannot share it: it comes from the old weights."""
        if self.asleep:
            self._on_waking.append(apply)
        else:
            apply()
        self.version = version
        self._prefixes.clear()
        self.kept.clear()
        self.stats.weight_updates += 1

    # -- sleep ----------------------------------------------------------------------

    def sleep(self) -> None:
        """Move weights and KV to the host; an idle engine drops the KV. On CPU nothing moves."""
        if self.asleep:
            return
        self.asleep = True
        device = self.model.device
        self.kept.clear()
        if device.type != "cpu":
            self._offloaded.offload(self.model.module.state_dict().values())
            self._offloaded.offload(self.cache.tensors, keep=bool(self.active))
            release_cached(device)

    def wake(self) -> None:
        """Restore weights and KV, apply the updates that arrived during sleep, and remove the
        requests that were aborted."""
        if not self.asleep:
            return
        self._offloaded.restore()
        self.asleep = False
        while self._on_waking:
            self._on_waking.pop(0)()
        self._reap()

    @property
    def has_work(self) -> bool:
        return bool(self.active or self.waiting or self.unscored)

    @property
    def num_waiting(self) -> int:
        """Requests in both queues."""
        return len(self.waiting) + len(self.unscored) - self._num_aborted

    # -- one step -------------------------------------------------------------------

    def step(self) -> None:
        """One token for each active row and admitted prompt, then one batch of prompts to score.
        A failure ends the requests it concerns."""
        if self.active or self.waiting:
            self._decode()
        if self.unscored:
            self._score()
        self.stats.steps += 1

    def _decode(self) -> None:
        leaders, followers = self._admit()
        try:
            self._generate(leaders, followers)
        except Exception as error:
            log.exception("a step of %d rows failed", len(self.active) + len(leaders))
            # Running rows decode the same token again in the next step, so they survive a failure
            # of a step that admitted requests: blame those. Otherwise all rows are to blame.
            blamed = [*leaders, *followers] or self.active
            self.active = [r for r in self.active if r not in blamed]
            self._fail(blamed, f"{type(error).__name__}: {error}")

        self._reap()

    def _admit(self) -> tuple[Leaders, list[Request]]:
        """Requests to prefill, and requests that copy KV. A prompt longer than the whole budget is
        admitted alone. Leaders are sorted, so that equal shapes attend as one batch."""
        leaders = Leaders()
        followers = list[Request]()
        budget = self.max_prefill_tokens
        while len(self.active) + len(leaders) + len(followers) < self.num_slots:
            request = self._first(self.waiting)
            if request is None:
                break
            if self.share_prefixes and request.prefix_key in self._prefixes:
                followers.append(request)
            else:
                known = self.kept.find(request.salt, request.prompt)
                cost = len(request.prompt) - len(known) * BLOCK
                if leaders and cost > budget:
                    break
                budget -= cost
                leaders[request] = known
                if self.share_prefixes:
                    self._prefixes[request.prefix_key] = request

            heapq.heappop(self.waiting)
            request.kv_version = self.version

        leaders = dict(sorted(leaders.items(), key=lambda x: (len(x[1]), len(x[0].prompt))))
        return leaders, followers

    def _generate(self, leaders: Leaders, followers: list[Request]) -> None:
        sampled = [*self.active, *leaders]
        if sampled:
            logits = self._forward(leaders)
            for row in self._emit(sampled, logits):
                self.cache.clear_row(row)  # another request will use the row
            for row in range(len(self.active), len(sampled)):
                self._keep(row, sampled[row], len(sampled[row].prompt))

        self.active = sampled
        for follower in followers:
            self._copy_prefix(follower)
        self.stats.prompt_tokens += sum(len(request.prompt) for request in (*leaders, *followers))

    def _forward(self, leaders: Leaders) -> Tensor:
        """Logits of the active rows, then of each leader's last token."""
        decoding = [request.position for request in self.active]
        prefixes = [request.prefix for request in self.active]
        lengths = [len(request.prompt) for request in leaders]
        starts = [len(known) * BLOCK for known in leaders.values()]
        device = self.model.device
        plan = BatchPlan.build(
            self.cache,
            decoding,
            prompt_lengths=lengths,
            device=device,
            starts=starts,
            prefixes=prefixes,
        )
        ids = [request.next_token for request in self.active]
        for row, (request, known) in enumerate(leaders.items(), len(decoding)):
            restore(self.cache, row, known)
            request.cached_tokens = len(known) * BLOCK
            ids += request.prompt[request.cached_tokens :]

        self.stats.shared_tokens += sum(starts)
        computed = (length - start for length, start in zip(lengths, starts, strict=True))
        rows = [*range(len(decoding)), *(len(decoding) + end - 1 for end in accumulate(computed))]
        keep = to_device(np.array(rows), np.int64, device) if leaders else None
        tokens = to_device(np.array(ids), np.int64, device)
        if not self.model.mixtures:
            return self.model.forward(tokens, plan, keep)

        recorder = Recorder(self.model.mixtures)
        with choosing(recorder):
            logits = self.model.forward(tokens, plan, keep)
        self.cache.write_routes(plan.rows, plan.positions, recorder.routes)
        return logits

    def _keep(self, row: int, request: Request, length: int) -> None:
        """Remember the row's first tokens, unless an error or older weights had a part in them."""
        sound = request.finish_reason not in ("error", "abort")
        if self.kept.max_bytes and sound and request.kv_version == self.version:
            tokens = (request.prompt + request.token_ids)[:length]
            self.kept.store(self.cache, row, request.salt, tokens)

    def _emit(self, requests: Sequence[Request], logits: Tensor) -> list[int]:
        """Sample one token per row. Returns the rows whose logits are not finite."""
        refused = []
        drawn = sample(logits, requests)
        finite = math.isfinite(sum(drawn.logprobs))  # one check instead of one per row
        for row, request in enumerate(requests):
            logprob = drawn.logprobs[row]
            if not finite and not math.isfinite(logprob):
                request.refuse_nonfinite(self.version)
                refused.append(row)
                continue

            if drawn.alternatives is not None and request.params.top_logprobs:
                request.top_logprobs.append(drawn.alternatives[row][: request.params.top_logprobs])
            request.accept(drawn.tokens[row], logprob, self.version)
            if request.on_token is not None:
                request.on_token(request)

        self.stats.generated_tokens += len(requests)
        return refused

    def _copy_prefix(self, follower: Request) -> None:
        leader = self._prefixes[follower.prefix_key]
        row = len(self.active)
        length = len(follower.prompt)
        if leader.finish_reason == "error":  # its row was cleared, so there is nothing to copy
            follower.finish_reason = "error"
            follower.error = leader.error
            self.active.append(follower)
            return

        self.cache.reserve(row + 1, length)
        self.cache.copy_row(self.active.index(leader), row, length - 1)
        follower.next_token = follower.prompt[-1]
        follower.position = length - 1
        follower.cached_tokens = length - 1
        self.stats.shared_tokens += length - 1
        follower.origin = leader.origin or leader
        self._prefixes[follower.prefix_key] = follower
        self.active.append(follower)

    # -- scoring --------------------------------------------------------------------

    def _score(self) -> None:
        """Score a batch of prompts. Requests that need more tokens then queue to generate."""
        batch = self._next_unscored()
        requests = [request for _, _, request in batch]
        if not requests:  # all were aborted
            return
        try:
            self._score_batch(requests)
        except Exception as error:
            log.exception("scoring %d prompts failed", len(requests))
            self._fail(requests, f"{type(error).__name__}: {error}")
            return

        for entry in batch:
            if entry[2].finish_reason is None:
                heapq.heappush(self.waiting, entry)
            else:
                self.stats.prompt_tokens += len(entry[2].prompt)
                self._finish(entry[2])

    def _next_unscored(self) -> list[tuple[int, int, Request]]:
        """As many as fit the prefill budget, at least one. Equal prompts count once."""
        batch: list[tuple[int, int, Request]] = []
        prompts: set[object] = set()
        budget = self.max_prefill_tokens
        while (request := self._first(self.unscored)) is not None:
            if not (self.share_prefixes and request.prefix_key in prompts):
                if batch and len(request.prompt) > budget:
                    break
                budget -= len(request.prompt)
                prompts.add(request.prefix_key)
            batch.append(heapq.heappop(self.unscored))

        return batch

    def _score_batch(self, requests: Sequence[Request]) -> None:
        """Set the scores, and finish requests with ``max_tokens`` 0 or 1: their only token is
        sampled from the logits at the prompt's end."""
        last = score_prompts(self.model, requests, share=self.share_prefixes)
        self.stats.shared_tokens += sum(request.cached_tokens for request in requests)
        for request in requests:
            if not is_scored(request):
                request.refuse_nonfinite(self.version)
            elif request.params.max_tokens == 0:
                request.versions.append((self.version, 0))
                request.finish_reason = "length"

        wanting = [
            i
            for i, request in enumerate(requests)
            if request.finish_reason is None and request.params.max_tokens == 1
        ]
        if wanting:
            self._emit([requests[i] for i in wanting], last[wanting])

    # -- endings --------------------------------------------------------------------

    def _reap(self) -> None:
        """Remove finished requests from the batch and close the gaps with the last rows."""
        active = self.active
        row = 0
        ended = []
        while row < len(active):
            if active[row].finish_reason is None:
                row += 1
                continue
            ended.append(active[row])
            if self.model.mixtures and active[row].token_ids:
                routes = self.cache.read_routes(row, active[row].position).numpy()
                active[row].routes = narrowed(routes, self.model.mixtures[0].num_experts)
            self._keep(row, active[row], active[row].position)
            last = active.pop()
            if row < len(active):
                self.cache.copy_row(len(active), row, last.position + 1)
                active[row] = last

        for request in ended:
            self._finish(request)

    def _fail(self, requests: Sequence[Request], reason: str) -> None:
        for request in requests:
            request.finish_reason = "error"
            request.error = reason
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if self._prefixes.get(request.prefix_key) is request:
            del self._prefixes[request.prefix_key]
        self.stats.finished[str(request.finish_reason)] += 1
        self.stats.ended += 1
        if request.on_finish is not None:
            request.on_finish(request)
