"""A fused forward for Llama-shaped models (Llama, Qwen2, Qwen3, Mistral ...): fewer, larger
operations.

It computes the same function as transformers' modules, from the same storage: the projections of a
layer are concatenated, and the module's parameters become views into that storage, so a weight
update through the module changes both; ``weights_changed`` tells of it. ``model.check_forward``
compares the logits at start-up.

Shapes: N = tokens of one forward, E = hidden size, H = query heads, G = key/value heads, D = head
dimension, I = intermediate size, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl_embedded.attention import BatchPlan, attend
from prime_rl_kernels.products import PackedWeight, pad_rows

# Rotary embeddings that depend on the position only, so one table of cos and sin serves all
# sequences. Other types change with the sequence's length.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class NotFusable(Exception):
    """The model is not shaped like Llama. The message has the reason."""


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer. Projections are [out, in], as in ``nn.Linear``."""

    attention_norm: nn.Module
    qkv: PackedWeight
    """[(H + 2G) * D, E]"""
    qkv_bias: Tensor | None
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    out: PackedWeight
    """[E, H * D]"""
    mlp_norm: nn.Module
    gate_up: PackedWeight
    """[2I, E]"""
    down: PackedWeight
    """[E, I]"""
    scale: float
    window: int | None


class FusedForward:
    """Logits of a Llama-shaped model. Raises ``NotFusable`` if the model has another shape."""

    def __init__(self, model: Any, max_len: int) -> None:
        try:
            self._read(model, max_len)
        except AttributeError as error:
            raise NotFusable(f"not shaped like Llama: {error}") from error

    def _read(self, model: Any, max_len: int) -> None:
        body = model.model
        config = model.config
        _demand(body.rotary_emb.rope_type in _STATIC_ROPE, "rotary embedding depends on the length")
        first = body.layers[0].self_attn
        self.head_dim: int = first.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.embedding = body.embed_tokens
        self.norm = body.norm
        self.head = PackedWeight(model.lm_head.weight)
        self.head_bias = model.lm_head.bias
        self.layers = [_fuse_layer(layer) for layer in body.layers]
        positions = torch.arange(max_len, device=self.embedding.weight.device)[None]
        cos, sin = body.rotary_emb(self.embedding.weight[:1, None], positions)
        half = self.head_dim // 2
        _demand(cos.shape[-1] == self.head_dim, "rotary embedding of a part of the head")
        self.cos = cos[0][:, None]
        # rope(x) = x * cos + (-x2, x1) * sin with x = (x1, x2). Rolling x by half gives (x2, x1);
        # the minus sign is in this table.
        self.sin = torch.cat((-sin[0][:, :half], sin[0][:, half:]), -1)[:, None]

    def weights_changed(self) -> None:
        for layer in self.layers:
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                weight.pack()
        self.head.pack()

    def __call__(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        """Logits [len(rows), V] of the tokens ``rows`` (None: all N). Ids: [N]."""
        return self.logits(self.states(ids, plan, rows))

    def states(self, ids: Tensor, plan: BatchPlan, rows: Tensor | None) -> Tensor:
        """The input of ``logits``: [len(rows), E], before the last norm."""
        hidden = pad_rows(self.embedding(ids))
        cos = self.cos[plan.positions]
        sin = self.sin[plan.positions]
        for i, layer in enumerate(self.layers):
            attended = self._attention(
                i, layer, x=_rms_norm(hidden, layer.attention_norm), cos=cos, sin=sin, plan=plan
            )
            hidden = layer.out(pad_rows(attended), added=hidden)
            hidden = layer.down(_mlp(layer, _rms_norm(hidden, layer.mlp_norm)), added=hidden)

        states: Tensor = hidden[: len(ids)] if rows is None else hidden[rows]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] of states [R, E]."""
        return self.head(_rms_norm(states, self.norm), self.head_bias)

    def _attention(
        self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, plan: BatchPlan
    ) -> Tensor:
        """x: [padded N, E], normalized; cos, sin: [N, 1, D]. Returns [N, H * D]."""
        heads = self.num_heads + self.num_kv_heads
        qkv = layer.qkv(x, layer.qkv_bias)[: len(cos)].view(len(cos), -1, self.head_dim)
        qk = qkv[:, :heads]
        value = qkv[:, heads:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = qk[:, : self.num_heads]
            key = qk[:, self.num_heads :]
            qk = torch.cat((_rms_norm(query, layer.query_norm), _rms_norm(key, layer.key_norm)), 1)

        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        query = qk[:, : self.num_heads]
        key = qk[:, self.num_heads :]
        return attend(
            plan, index, query=query, key=key, value=value, scale=layer.scale, window=layer.window
        )


def _demand(condition: bool, reason: str) -> None:
    if not condition:
        raise NotFusable(reason)


def _fuse_layer(layer: Any) -> _Layer:
    attention = layer.self_attn
    mlp = layer.mlp
    _demand(attention.o_proj.bias is None, "output projection with bias")
    _demand(mlp.gate_proj.bias is None, "MLP with bias")
    windowed = getattr(attention.config, "sliding_window", None) is not None
    _demand(not windowed or hasattr(attention, "sliding_window"), "sliding window kept elsewhere")
    _demand("silu" in type(mlp.act_fn).__name__.lower(), "activation other than SiLU")
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        attention_norm=layer.input_layernorm,
        qkv=PackedWeight(_join(*(p.weight for p in projections))),
        qkv_bias=None if projections[0].bias is None else _join(*(p.bias for p in projections)),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        out=PackedWeight(attention.o_proj.weight.data),
        mlp_norm=layer.post_attention_layernorm,
        gate_up=PackedWeight(_join(mlp.gate_proj.weight, mlp.up_proj.weight)),
        down=PackedWeight(mlp.down_proj.weight.data),
        scale=attention.scaling,
        window=getattr(attention, "sliding_window", None),
    )


def _join(*parameters: nn.Parameter) -> Tensor:
    """Concatenate along the first dimension; the parameters become views into the result."""
    joined = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _mlp(layer: _Layer, x: Tensor) -> Tensor:
    """silu(gate) * up, [N, I]; the caller projects down."""
    gate, up = layer.gate_up(x).chunk(2, -1)
    return F.silu(gate).mul_(up)
