"""The engine's own types: sampling parameters, and a request from arrival to its last token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from prime_rl_embedded.decoding import prefix_length

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, because dividing the logits by them would overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Validated, with every default filled in."""

    max_tokens: int
    """0: sample nothing. Allowed only if the prompt is scored."""
    temperature: float = 1.0
    """0 is greedy; its logprobs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the completion. The completion includes the stop token."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    seed: int | None = None
    """None: derived from the server's seed and the request's arrival number."""
    top_logprobs: int = 0
    """Number of most likely alternatives to report per token."""
    prompt_logprobs: int | None = None
    """None: do not score the prompt. k: report its own tokens and the k most likely ones."""
    routes_start: int = 0
    """The first position whose routes are reported."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether top-k, min-p or top-p excludes tokens, which needs sorted logits."""
        return not self.greedy and bool(self.top_k or self.min_p or self.top_p < 1.0)


class TokenScore(NamedTuple):
    """A candidate token at a position, and its logprob."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""


@dataclass(eq=False)
class Request:
    """One sequence. The engine's thread owns it from ``submit`` to ``on_finish``."""

    prompt: list[int]
    params: SamplingParams
    request_id: str = ""
    salt: str | None = None
    """Requests share KV only with requests of the same salt."""
    priority: int = 0
    """Lower values go first."""
    on_token: Callable[[Request], None] | None = None
    """Called in the engine's thread after each token."""
    on_finish: Callable[[Request], None] | None = None
    """Called in the engine's thread when ``finish_reason`` is set and the slot is free."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One per sampled token, under the distribution it was sampled from."""
    top_logprobs: list[list[TokenScore]] = field(default_factory=list)
    prompt_scores: list[list[TokenScore]] | None = None
    """For prompt tokens 1, 2, ...: the token itself, then the most likely ones. Always at
    temperature 1."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, index of the first token it sampled), ascending."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended the completion."""
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose result was copied from another request."""
    origin: Request | None = None
    """The request that computed the prompt's keys and values, if not this one."""
    routes: npt.NDArray[Any] | None = None
    """[N, layers, k]: the experts that computed each token. None: they are not recorded."""
    kv_version: int = -1
    """The policy version at admission: that of the first keys and values."""

    next_token: int = -1
    """The next input token: the last sampled one, or the prompt's last if its KV was copied."""
    position: int = -1
    """The position of ``next_token`` in the sequence."""
    rng: random.Random = field(default_factory=random.Random, repr=False)

    @property
    def prefix_key(self) -> tuple[str | None, tuple[int, ...]]:
        """Requests with equal keys have equal prompt KV, under the same weights."""
        return self.salt, tuple(self.prompt)

    @property
    def prefix(self) -> tuple[int, Request]:
        """The positions that decoding reads as a prefix, and who computed them."""
        return prefix_length(len(self.prompt)), self.origin or self

    def accept(self, token: int, logprob: float, version: int) -> None:
        """Append a sampled token. Sets ``finish_reason`` if it is the last."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.token_ids)))
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.next_token = token
        self.position = len(self.prompt) + len(self.token_ids) - 1
        if token in self.params.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token
        elif len(self.token_ids) >= self.params.max_tokens:
            self.finish_reason = "length"

    def refuse_nonfinite(self, version: int) -> None:
        """End it, because its next logits are not finite."""
        self.finish_reason = "error"
        self.error = (
            "the model's logits are not finite at position "
            f"{len(self.prompt) + len(self.token_ids)} under policy version {version}"
        )

    def version_spans(self) -> list[tuple[int, int, int]]:
        """(policy version, start, end) over the completion, without gaps. Empty before a token."""
        if not self.versions:
            return []
        ends = [start for _, start in self.versions[1:]] + [len(self.token_ids)]
        return [
            (version, start, end) for (version, start), end in zip(self.versions, ends, strict=True)
        ]
