"""log π of the tokens that train, and the entropy of the distributions they were drawn from.

Only positions that are targets of some component go through the LM head. Logits are divided by the
temperature each token was sampled at, so that π and μ are probabilities of one distribution.

Shapes: T = tokens of the row, N = its targets, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.trainer.row import Row

MAX_LOGITS = 2**26
"""More logits than this (256 MiB in float32) are computed in chunks, and again going backward."""


def token_logprobs(model: PreTrainedModel, row: Row) -> tuple[Tensor, Tensor]:
    """([T], [T]): log-probabilities given one's own document so far, and entropies (no gradient).

    A token that is no target, a document's first token among them, gets log(1/V) and log V, as if
    drawn uniformly.
    """
    hidden = model.base_model(
        input_ids=row.layout.token_ids[None],
        position_ids=row.layout.position_ids[None],
        use_cache=False,
        documents=row.layout.documents,
    ).last_hidden_state[0]
    uniform = math.log(cast(int, model.config.vocab_size))
    logprobs = hidden.new_full((len(row.token_ids),), -uniform, dtype=_at_least_float32(hidden))
    entropies = torch.full_like(logprobs, uniform)
    head = model.get_output_embeddings()
    if not len(row.targets):  # keeps the graph, so that the backward pass runs here as anywhere
        return logprobs + 0.0 * head(hidden[:1]).sum(), entropies
    chosen, entropy = _target_logprobs(
        head, hidden[row.layout.sources], row.temperatures, row.token_ids[row.targets]
    )
    logprobs = logprobs.index_copy(0, row.targets, chosen)
    return logprobs, entropies.index_copy(0, row.targets, entropy)


def _target_logprobs(
    head: Any, hidden: Tensor, temperatures: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states [N, D] -> log-probabilities of the labels [N] and entropies [N]."""
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    if len(labels) <= size:
        return _chunk(head, hidden, temperatures, labels)
    chunks = []
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        scales = None if temperatures is None else temperatures[part]
        arguments = (head, hidden[part], scales, labels[part])
        chunks.append(checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    head: Any, hidden: Tensor, temperatures: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    apply: Any = _LogprobAndEntropy.apply
    result: tuple[Tensor, Tensor] = apply(head(hidden), temperatures, labels)
    return result


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _LogprobAndEntropy(torch.autograd.Function):
    """log softmax(z / temperature)[label] and the entropy, from one pass over the logits.

    d logprob / dz = (onehot(label) - softmax(z / temperature)) / temperature. The softmax, which
    the entropy needs anyhow, is all that is kept; ``cross_entropy`` would keep the logits and
    compute it again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperatures: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(_at_least_float32(logits))
        if temperatures is not None:
            scaled = scaled / temperatures[:, None]
        log_softmax = scaled.log_softmax(-1)
        softmax = log_softmax.exp()
        logprobs = log_softmax.gather(-1, labels[:, None])[:, 0]
        entropies = -torch.linalg.vecdot(softmax, log_softmax)
        ctx.save_for_backward(softmax, temperatures, labels)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        softmax, temperatures, labels = ctx.saved_tensors
        scale = (grad if temperatures is None else grad / temperatures)[:, None]
        logits_grad = (softmax * -scale).scatter_add_(1, labels[:, None], scale)
        return logits_grad.to(ctx.dtype), None, None
