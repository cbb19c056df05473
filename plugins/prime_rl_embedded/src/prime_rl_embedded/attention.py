"""Attention for one forward that mixes decoding rows and whole prompts.

A forward is flat: N tokens without padding. The first ``num_decode`` are the newest tokens of cache
rows 0, 1, ...; the rest are prompts, one after the other. Each decoding token attends to its row of
the cache, each prompt to itself. A prompt whose first tokens are in its row already is computed
from there on, and attends to them too.

Shapes: N = tokens of one forward, R = decoding rows, H = query heads, G = key/value heads, D = head
dimension of queries and keys, E = head dimension of values (often D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from prime_rl_embedded.decoding import RowRun, attend_run, row_runs
from prime_rl_embedded.kv import KVCache
from prime_rl_kernels.device import to_device

ATTENTION_NAME = "prime_rl_slots"
_UNSUPPORTED = ("softcap", "s_aux")
"""Keyword arguments of transformers for soft caps (Gemma2) and attention sinks (gpt-oss)."""


@dataclass(frozen=True)
class PromptRun:
    """Consecutive prompts of equal length and start, computed as one batch without padding."""

    row: int
    """Cache row of the first one; the others have the rows after it."""
    start: int
    """Tokens before these, which the rows hold."""
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
    runs: Sequence[RowRun] = ()
    """The decoding rows."""
    prompts: Sequence[PromptRun] = ()
    attended: set[nn.Module] = field(default_factory=set)
    """transformers modules that attended with this plan."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        cache: KVCache,
        decode_positions: Sequence[int],
        prompt_lengths: Sequence[int],
        device: torch.device,
        starts: Sequence[int] = (),
        prefixes: Sequence[tuple[int, object]] = (),
    ) -> BatchPlan:
        """Decode one token in rows 0..R-1 and prefill the prompts into the rows after them, which
        hold the first ``starts`` tokens of each already (none by default). ``prefixes``: those of
        rows 0..R-1, as in ``row_runs`` (none by default)."""
        prefixes = prefixes or [(0, None)] * len(decode_positions)
        starts = starts or [0] * len(prompt_lengths)
        num_decode = len(decode_positions)
        rows = list(range(num_decode))
        positions = list(decode_positions)
        longest = max(decode_positions, default=-1) + 1
        for row, (start, end) in enumerate(zip(starts, prompt_lengths, strict=True), num_decode):
            rows += [row] * (end - start)
            positions += range(start, end)

        cache.reserve(num_decode + len(prompt_lengths), max(longest, *prompt_lengths, 0))
        row_ids, position_ids = to_device(np.array([rows, positions]), np.int64, device)
        return cls(
            cache=cache,
            num_decode=num_decode,
            positions=position_ids,
            rows=row_ids,
            runs=row_runs(decode_positions, prefixes, cache.capacity),
            prompts=_runs(num_decode, starts, prompt_lengths),
        )

    @classmethod
    def uncached(cls, prompt_lengths: Sequence[int], device: torch.device) -> BatchPlan:
        """Prompts that are only scored: they take no row and store nothing."""
        places = np.concatenate([np.arange(length) for length in prompt_lengths])
        positions = to_device(places, np.int64, device)
        return cls(
            cache=None,
            num_decode=0,
            positions=positions,
            rows=torch.zeros_like(positions),
            prompts=_runs(0, [0] * len(prompt_lengths), prompt_lengths),
        )

    @property
    def context(self) -> int:
        """Cache positions that decoding reads: the longest row's length, rounded up."""
        return max((run.context for run in self.runs), default=0)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, E] to the cache, if there is one."""
        if self.cache is not None:
            self.cache.write(layer, self.rows, self.positions, keys=key, values=value)

    def stored(
        self, layer: int, rows: slice, length: int, widths: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys and values of these rows, [R, G, length, D or E]. The cache
        pads the narrower of both to a common width."""
        assert self.cache is not None
        keys, values = self.cache.layers[layer][:, rows, :, :length]
        return keys[..., : widths[0]], values[..., : widths[1]]

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


def _runs(row: int, starts: Sequence[int], ends: Sequence[int]) -> list[PromptRun]:
    """``row``: that of the first prompt."""
    runs: list[PromptRun] = []
    for start, end in zip(starts, ends, strict=True):
        same = runs and (runs[-1].start, runs[-1].length) == (start, end - start)
        if same:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(PromptRun(row, start, count=1, length=end - start))
        row += 1

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
    widths = key.shape[-1], value.shape[-1]
    if plan.num_decode:
        cached = plan.stored(layer, slice(0, plan.num_decode), plan.context, widths)
        parts.append(
            _attend_rows(plan, cached, query=query[: plan.num_decode], scale=scale, window=window)
        )

    start = plan.num_decode
    for run in plan.prompts:
        end = start + run.count * run.length
        tokens = slice(start, end)
        if run.start:
            rows = slice(run.row, run.row + run.count)
            keys, values = plan.stored(layer, rows, run.start + run.length, widths)
        else:
            keys, values = (_by_prompt(run, each[tokens]) for each in (key, value))
        parts.append(
            _attend_prompts(
                run, query[tokens], keys=keys, values=values, scale=scale, window=window
            )
        )
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
    head are laid along the query-length dimension, and every query sees the same positions. In
    float32 on CPU by ``attend_run``.
    """
    keys, values = cached
    rows = query.shape[0]
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(rows, num_kv_heads, -1, query.shape[-1])
    mask = plan.decode_mask(window, query.dtype)
    if query.dtype == torch.float32 and query.device.type == "cpu":
        runs = plan.runs if window is None else [RowRun(0, rows, prefix=0, context=plan.context)]
        scaled = grouped * (query.shape[-1] ** -0.5 if scale is None else scale)
        parts = [attend_run(run, scaled, keys=keys, values=values, mask=mask) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, -1)


def _by_prompt(run: PromptRun, x: Tensor) -> Tensor:
    """[count * length, heads, D] to [count, heads, length, D]."""
    return x.reshape(run.count, run.length, *x.shape[1:]).transpose(1, 2)


def _attend_prompts(
    run: PromptRun,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each prompt of a run. Keys, values: [count, G, start + length, D or
    E]."""
    queries = _by_prompt(run, query)
    total = run.start + run.length
    mask = None
    if run.start or (window is not None and window < total):
        here = torch.arange(run.start, total, device=query.device)[:, None]
        there = torch.arange(total, device=query.device)
        mask = there <= here
        if window is not None:
            mask &= there > here - window

    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
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
    unsupported = [name for name in _UNSUPPORTED if extras.get(name) is not None]
    if unsupported:
        raise NotImplementedError(
            f"{type(module).__name__} asks for {', '.join(unsupported)}, which the engine's "
            "attention does not compute"
        )

    plan = _current.get()
    plan.attended.add(module)
    flat_query, flat_key, flat_value = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = attend(
        plan,
        layer,
        query=flat_query,
        key=flat_key,
        value=flat_value,
        scale=scaling,
        window=sliding_window,
    )
    return out.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
