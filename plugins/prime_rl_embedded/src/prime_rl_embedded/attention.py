"""Attention for one forward that mixes decoding rows and whole prompts.

A forward is flat: N tokens without padding. The first ``num_decode`` are the newest tokens of cache
rows 0, 1, ...; the rest are prompts, one after the other. Each decoding token attends to its row of
the cache, each prompt to itself.

Shapes: N = tokens of one forward, R = decoding rows, H = query heads, G = key/value heads, D = head
dimension of queries and keys, E = head dimension of values (often D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from prime_rl_embedded.kv import KVCache

ATTENTION_NAME = "prime_rl_slots"
# Decoding reads a multiple of 16 cache positions, so that its shapes change every 16 steps only.
_LENGTH_BUCKET = 16
_UNSUPPORTED = ("softcap", "s_aux")
"""Keyword arguments of transformers for soft caps (Gemma2) and attention sinks (gpt-oss)."""


@dataclass(frozen=True)
class PromptRun:
    """Consecutive prompts of equal length, computed as one batch without padding."""

    count: int
    length: int


@dataclass
class BatchPlan:
    """Where the tokens of one forward belong, shared by all its layers."""

    cache: KVCache | None
    """None: these prompts are only scored, so their keys and values are not stored."""
    num_decode: int
    positions: Tensor
    """[N] int64: each token's position in its own sequence."""
    rows: Tensor
    """[N] int64: each token's row of the cache."""
    context: int
    """Cache positions that decoding reads: the longest row's length, rounded up."""
    prompts: Sequence[PromptRun] = ()
    attended: set[nn.Module] = field(default_factory=set)
    """transformers modules that attended with this plan."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _write_indices: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        cache: KVCache,
        decode_positions: Sequence[int],
        prompt_lengths: Sequence[int],
        device: torch.device,
    ) -> BatchPlan:
        """Decode one token in rows 0..R-1 and prefill the prompts into the rows after them."""
        rows = list(range(len(decode_positions)))
        positions = list(decode_positions)
        longest = max(decode_positions, default=-1) + 1
        for row, length in enumerate(prompt_lengths, start=len(decode_positions)):
            rows += [row] * length
            positions += range(length)
        cache.reserve(len(decode_positions) + len(prompt_lengths), max(longest, *prompt_lengths, 0))
        bucketed = -(-longest // _LENGTH_BUCKET) * _LENGTH_BUCKET
        row_ids, position_ids = torch.tensor([rows, positions], device=device)
        return cls(
            cache=cache,
            num_decode=len(decode_positions),
            positions=position_ids,
            rows=row_ids,
            context=min(bucketed, cache.capacity),
            prompts=_runs(prompt_lengths),
        )

    @classmethod
    def uncached(cls, prompt_lengths: Sequence[int], device: torch.device) -> BatchPlan:
        """Prompts that are only scored: they take no row and store nothing."""
        positions = torch.cat([torch.arange(n, device=device) for n in prompt_lengths])
        return cls(
            cache=None,
            num_decode=0,
            positions=positions,
            rows=torch.zeros_like(positions),
            context=0,
            prompts=_runs(prompt_lengths),
        )

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, E] to the cache, if there is one."""
        if self.cache is None:
            return
        heads = key.shape[1]
        if heads not in self._write_indices:
            index = self.cache.write_index(self.rows, self.positions, heads)
            self._write_indices[heads] = index
        self.cache.write(layer, self._write_indices[heads], key, value)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [R, 1, 1, context]: 0 up to the row's position, within the window; else
        -inf."""
        if (window, dtype) not in self._masks:
            here = self.positions[: self.num_decode, None]
            there = torch.arange(self.context, device=here.device)
            hidden = there > here
            if window is not None:
                hidden |= there <= here - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=here.device)
            self._masks[window, dtype] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window, dtype]


def _runs(lengths: Sequence[int]) -> list[PromptRun]:
    runs: list[PromptRun] = []
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = PromptRun(runs[-1].count + 1, length)
        else:
            runs.append(PromptRun(1, length))
    return runs


def attend(
    plan: BatchPlan,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Store keys and values, then attend. Query [N, H, D], key [N, G, D], value [N, G, E]; returns
    [N, H * E]."""
    plan.store(layer, key, value)
    parts = []
    if plan.cache is not None and plan.num_decode:
        keys, values = plan.cache.layers[layer][:, : plan.num_decode, :, : plan.context]
        # The cache pads the narrower of keys and values to a common width.
        cached = keys[..., : key.shape[-1]], values[..., : value.shape[-1]]
        parts.append(_attend_rows(plan, cached, query[: plan.num_decode], scale, window))
    start = plan.num_decode
    for run in plan.prompts:
        end = start + run.count * run.length
        tokens = slice(start, end)
        parts.append(_attend_prompts(run, query[tokens], key[tokens], value[tokens], scale, window))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_rows(
    plan: BatchPlan,
    cached: tuple[Tensor, Tensor],
    query: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Each row's newest token attends to its cache row. Cached: [R, G, context, D or E] each.

    Grouped-query attention without repeating keys: the H / G query heads that share a key/value
    head are laid along the query-length dimension, and every query sees the same positions.
    """
    keys, values = cached
    rows, num_kv_heads = query.shape[0], keys.shape[1]
    grouped = query.reshape(rows, num_kv_heads, -1, query.shape[-1])
    mask = plan.decode_mask(window, query.dtype)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, -1)


def _attend_prompts(
    run: PromptRun,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each prompt of a run."""
    queries, keys, values = (
        x.reshape(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
    )
    mask = None
    if window is not None and window < run.length:
        ones = torch.ones(run.length, run.length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ~ones.tril(-window)
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).reshape(run.count * run.length, -1)


_current: ContextVar[BatchPlan] = ContextVar("plan")


@contextmanager
def planned(plan: BatchPlan) -> Iterator[None]:
    """Make ``slot_attention`` use this plan. It is a context variable because some models
    (StableLM, Nemotron) do not pass keyword arguments on to their attention."""
    token = _current.set(plan)
    try:
        yield
    finally:
        _current.reset(token)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """``attend`` as an ``AttentionInterface`` function: query [1, H, N, D] to [1, N, H, E].

    Raises ``NotImplementedError`` for soft caps and sinks, which would change the scores.
    """
    if unsupported := [name for name in _UNSUPPORTED if extras.get(name) is not None]:
        raise NotImplementedError(
            f"{type(module).__name__} asks for {', '.join(unsupported)}, which the engine's "
            "attention does not compute"
        )
    plan = _current.get()
    plan.attended.add(module)
    flat_query, flat_key, flat_value = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = attend(plan, layer, flat_query, flat_key, flat_value, scaling, sliding_window)
    return out.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
