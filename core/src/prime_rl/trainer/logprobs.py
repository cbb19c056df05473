"""log π of the tokens that train, of others in their place, and the entropy of the distributions.

Only targets of some component go through the LM head. Logits are divided by the temperature that
each token was sampled at, so that π and μ are probabilities of one distribution. A kernel may
compute many logits block by block; of few, keeping the softmax for the backward pass is faster.

Shapes: T = tokens of the row, N = its targets, D = hidden size, V = vocabulary, k = ids per token
of the stream ``top_ids``.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.errors import StreamError
from prime_rl.plugins.trainer import Kernel
from prime_rl.streams import TOP_IDS
from prime_rl.trainer import context
from prime_rl.trainer.device import to_device
from prime_rl.trainer.packed_row import APART, PackedRow
from prime_rl.trainer.packing import Packing

SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Config keys of a factor on the logits (Cohere, Falcon-H1, Granite), and its power. A model with
another meaning of a key fails the self-check."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys of a cap on the logits: c tanh(z / c) (Gemma, RecurrentGemma, xLSTM)."""


def token_logprobs(
    model: PreTrainedModel,
    row: PackedRow,
    packing: Packing = APART,
    kernel: Kernel | None = None,
    entropy_gradient: bool = False,
    hidden: Tensor | None = None,
    top: bool = False,
) -> tuple[Tensor, Tensor]:
    """([T], [T]): log-probabilities within each document, and entropies, which have a gradient only
    with ``entropy_gradient``. With ``top``, and ``top_ids`` in the row: [T, 1 + k], each token's
    own log-probability and those of its ``top_ids``.

    A token that is not a target, such as a document's first, gets log(1/V) and log V, as if drawn
    uniformly. ``packing``: that of the row. ``kernel``: computes the LM head if it can. ``hidden``:
    the row's hidden states, if they are known.
    """
    if hidden is None:
        hidden = packing.hidden_states(model, row.layout)
    labels = row.token_ids[row.targets]
    size = cast(int, model.config.vocab_size)
    if top and row.top_ids is not None:
        labels = torch.cat([labels[:, None], _top_labels(row, size)], 1)

    uniform = math.log(size)
    dtype = _at_least_float32(hidden)
    entropies = hidden.new_full((len(row.token_ids),), uniform, dtype=dtype)
    logprobs = entropies.new_full((len(entropies), *labels.shape[1:]), -uniform)

    head = model.get_output_embeddings()
    scale = 1.0
    for key, power in SCALES.items():
        factor = getattr(model.config, key, None) or 1.0
        scale *= factor**power
    caps = [getattr(model.config, key, None) for key in CAPS]
    cap = next((value for value in caps if value), None)

    if not len(row.targets):  # with a graph: the backward pass has to run on every rank
        zero = 0.0 * head(hidden[:1]).sum()
        return logprobs + zero, entropies + zero if entropy_gradient else entropies

    sources = row.layout.sources
    temperatures = row.temperatures
    part = context.part_of_targets(len(sources), sources.device)
    if part is not None:
        sources = sources[part]
        labels = labels[part]
        temperatures = None if temperatures is None else temperatures[part]

    # Scaled before the LM head: a fused kernel returns no logits that could be scaled.
    hidden = hidden[sources] * scale

    computed = None
    # A head that is not a plain linear layer (one that PEFT trains whole) has to be called.
    if kernel is not None and cap is None and type(head) is nn.Linear:
        # By position: a kernel from elsewhere may give its parameters other names.
        computed = kernel.logprobs(head, hidden, temperatures, labels, entropy_gradient)
    if computed is None:
        apply: Any = LogprobAndEntropy.apply
        logits = _call(head, hidden, cap)
        computed = apply(logits, temperatures, labels, entropy_gradient)

    # With context parallelism each rank has a part of the targets, and the loss needs all.
    chosen, entropy = computed
    chosen = context.gather_parts(chosen, len(row.targets))
    entropy = context.gather_parts(entropy, len(row.targets))

    logprobs = logprobs.index_copy(0, row.targets, chosen)
    return logprobs, entropies.index_copy(0, row.targets, entropy)


def _top_labels(row: PackedRow, size: int) -> Tensor:
    """[N, k] ``top_ids`` of the targets; 0 in sequences without. Raises ``StreamError`` for values
    that are no ids of a vocabulary of this size."""
    ids = row.top_ids
    assert ids is not None
    if ids.ndim != 2 or ids.dtype != np.int32:
        problem = (
            f"torch.{ids.dtype} of shape [T{', k' * (ids.ndim - 1)}], expected int32 of [T, k]"
        )
    else:
        absent = ids == np.iinfo(np.int32).min
        # The absent value is the lowest int32, so clip() below turns it into id 0.
        wrong = ids[(ids >= size) | (ids < 0) & ~absent]
        if not len(wrong):
            return to_device(ids.clip(min=0), np.int64, row.token_ids.device)
        problem = f"id {int(wrong[0])}, expected 0 to {size - 1}, the policy's vocabulary"

    raise StreamError(
        f"micro batch (envs: {', '.join(row.envs)}): the stream {TOP_IDS!r} has {problem}. Fix the "
        "algorithm that assigns it, or use a reference with the policy's tokenizer."
    )


def _call(head: Any, hidden: Tensor, cap: float | None) -> Tensor:
    """[N, V] by the head itself, in float32 even under autocast. A head that is no plain linear
    layer computes in the precision of its weights."""
    dtype = _at_least_float32(hidden)
    weight_dtype = next(head.parameters()).dtype
    with torch.autocast(hidden.device.type, enabled=False):
        if type(head) is nn.Linear and weight_dtype != dtype:
            bias = None if head.bias is None else head.bias.to(dtype)
            logits = nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)
        else:
            logits = head(hidden.to(weight_dtype)).to(dtype)

        if cap is None:
            return logits
        return cap * (logits / cap).tanh()


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class LogprobAndEntropy(torch.autograd.Function):
    """log softmax(z / temperature)[label], in the shape of the labels, [N] or [N, L], and the
    entropy, from one pass over the logits.

    d logprob / dz = (onehot(label) - p) / temperature and, if asked for, d entropy H / dz =
    -p (log p + H) / temperature, where p = softmax(z / temperature). Only p is kept;
    ``cross_entropy`` would keep the logits and compute it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        temperatures: Tensor | None,
        labels: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(_at_least_float32(logits))
        if temperatures is not None:
            scaled = scaled / temperatures[:, None]
        log_softmax = scaled.log_softmax(-1)
        softmax = log_softmax.exp()
        places = labels[..., None].flatten(1)  # [N, L]
        logprobs = log_softmax.gather(-1, places).view_as(labels)
        entropies = -torch.linalg.vecdot(softmax, log_softmax)

        kept = entropies if entropy_gradient else None
        ctx.save_for_backward(softmax, temperatures, places, kept)
        ctx.dtype = logits.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, temperatures, places, entropies = ctx.saved_tensors

        divisor = 1.0 if temperatures is None else temperatures[:, None]
        scale = grad.reshape(places.shape) / divisor
        # Each label adds -p * scale to the gradient of every logit, so their sum is enough.
        total = scale.sum(1, keepdim=True)

        if entropies is None:
            logits_grad = softmax * -total
        else:
            slope = entropy_grad[:, None] / divisor
            # dH/dz = -p (log p + H) / temperature, in place: [N, V] is the largest tensor here.
            logits_grad = torch.xlogy(softmax, softmax).mul_(-slope)  # 0 where p underflows
            logits_grad.addcmul_(softmax, total + slope * entropies[:, None], value=-1)

        logits_grad.scatter_add_(1, places, scale)
        return logits_grad.to(ctx.dtype), None, None, None
