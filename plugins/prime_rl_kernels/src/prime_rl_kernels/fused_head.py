"""LM head, log-softmax and entropy in one, block by block: the logits are never in memory at once.

The forward pass computes a block of logits (some tokens x some of the vocabulary), folds it into
each token's running maximum, sum of exponentials and entropy, and drops it. The backward pass
computes each block once more, now with the normalizer known, and turns it into its share of the
gradients. So memory holds one block, and gradients of the size of their tensors, for a third more
arithmetic in the head: 8 N D V operations instead of 6. A head that is not trained (LoRA) needs no
second pass: the gradient of a hidden state takes only the softmax, summed up in the first one,
4 N D V. With a gradient of the entropy it takes one: summing up in the first pass would need
another product and another [N, D], the same 6 N D V. So it does with several labels per token,
which would need an [N, D] each.

Dtypes: products take their factors in autocast's dtype (bfloat16) where autocast is on, else in the
tensors' own, and sum in float32. Logits, everything after them and the gradient of the weight are
in float32 too.

The running sums over blocks are those of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), Algorithm 3, with the entropy's sum beside them::

    m' = max(m, max z)    shrink = exp(m - m')
    s' = shrink * s + sum exp(z - m')
    u' = shrink * (u + (m - m') * s) + sum exp(z - m') * (z - m')
    log Z = m + log s     entropy = log s - u / s

On a GPU one Triton kernel folds a block of logits into the sums, and one makes its gradient: the
block is read once, not by each operation (``triton_kernels.py``).

Shapes: N = tokens, D = hidden size, V = vocabulary, L = labels of a token, n = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_rl_kernels import gpu_ops
from prime_rl_kernels.products import linear

MIN_TOKENS = 256
MIN_VOCAB = 1024
"""Blocks narrower than this waste the matrix units."""


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor | None,
    labels: Tensor,
    block_logits: int,
    entropy_gradient: bool = False,
    triton: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[label], in the shape of ``labels``, and the entropies [N].
    Entropies have a gradient only with ``entropy_gradient``.

    ``hidden`` [N, D], ``weight`` [V, D], ``bias`` [V], ``temperatures`` [N], ``labels`` [N] or
    [N, L] int64. Both results are in float32, or in float64 if the hidden states are.
    ``block_logits``: the number of logits in a block. ``triton``: use the Triton kernels, which
    compute in float32.
    """
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    second_pass = trained or entropy_gradient or labels.dim() > 1
    frozen = hidden.requires_grad and torch.is_grad_enabled() and not second_pass
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)

    apply: Any = _FusedHead.apply
    logprobs, entropies = apply(
        hidden,
        weight,
        bias,
        temperatures,
        labels[..., None].flatten(1),
        dtype,
        block_logits,
        triton and hidden.dtype != torch.float64,
        frozen,
        entropy_gradient,
    )
    return logprobs.view_as(labels), entropies


class _FusedHead(torch.autograd.Function):
    """d logprob / d logits = (onehot(label) - p) / temperature and, with ``entropy_gradient``,
    d entropy H / d logits = -p (log p + H) / temperature, where p = softmax(logits / temperature).

    ``frozen``: only hidden states have a gradient, their token's times
    (weight[label] - softmax @ weight) / temperature, which the forward pass computes.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, ctx.frozen, entropy_gradient = arguments
        head = _Head(*inputs)
        hidden = head.hidden
        slopes = torch.zeros_like(hidden, dtype=head.sum_dtype) if ctx.frozen else None
        with torch.autocast(hidden.device.type, enabled=False):  # we round what should be rounded
            parts = [
                _forward_rows(head, rows, None if slopes is None else slopes[rows])
                for rows in head.row_blocks()
            ]

        logprobs, entropies, log_normalizers = map(torch.cat, zip(*parts, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        if ctx.frozen:
            ctx.save_for_backward(slopes)
            ctx.settings = (hidden.dtype,)
        else:
            kept = entropies if entropy_gradient else None
            ctx.save_for_backward(*inputs[:5], log_normalizers, kept)
            ctx.settings = inputs[5:]

        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.frozen:
            (slopes,) = ctx.saved_tensors
            return ((slopes * grad).to(*ctx.settings), *[None] * 9)

        *tensors, log_normalizers, entropies = ctx.saved_tensors
        head = _Head(*tensors, *ctx.settings)
        gradients = [
            torch.zeros_like(tensor, dtype=head.sum_dtype) if needed else None
            for tensor, needed in zip(tensors[:3], ctx.needs_input_grad[:3], strict=True)
        ]
        entropy = None if entropies is None else (entropies, entropy_grad)
        with torch.autocast(grad.device.type, enabled=False):
            for rows in head.row_blocks():
                _backward_rows(
                    head,
                    rows,
                    grad=grad,
                    entropy=entropy,
                    log_normalizers=log_normalizers,
                    gradients=gradients,
                )

        cast = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, tensors[:3], strict=True)
        ]
        return (*cast, *[None] * 7)


@dataclass(frozen=True, eq=False)
class _Head:
    """Blocks of logits, before they are divided by the temperature."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperatures: Tensor | None
    labels: Tensor
    """[N, L]"""
    dtype: torch.dtype
    """The dtype of the factors of products."""
    block_logits: int
    triton: bool

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def row_blocks(self) -> Iterator[slice]:
        """Blocks of tokens; one block if there are no tokens."""
        rows, _ = block_shape(len(self.hidden), len(self.weight), self.block_logits)
        return _slices(max(len(self.hidden), 1), rows)

    def column_blocks(self) -> Iterator[slice]:
        """Blocks of the vocabulary."""
        _, columns = block_shape(len(self.hidden), len(self.weight), self.block_logits)
        return _slices(len(self.weight), columns)

    def logits(self, hidden: Tensor, columns: Tensor, words: slice) -> Tensor:
        """``hidden`` and ``columns`` are the rows' states and the words' weights, cast."""
        logits = product(hidden, columns.T, self.sum_dtype)
        if self.bias is not None:
            logits += self.bias[words].to(self.sum_dtype)
        return logits

    def row_temperatures(self, rows: slice) -> Tensor | None:
        """[n]"""
        return None if self.temperatures is None else self.temperatures[rows].to(self.sum_dtype)

    def places(self, rows: slice, words: slice) -> tuple[Tensor, Tensor]:
        """([n, L], [n, L] bool): each label's column in the block, and whether it is in there."""
        places = self.labels[rows] - words.start
        inside = (places >= 0) & (places < words.stop - words.start)
        return places.clamp(0, words.stop - words.start - 1), inside


def _forward_rows(
    head: _Head, rows: slice, slopes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """([n, L], [n], [n]): log-probabilities, entropies and log-normalizers of a block of tokens.

    ``slopes`` [n, D], zeros, become d logprob / d hidden.
    """
    hidden = head.hidden[rows].to(head.dtype)
    sums = _Sums.of_none(head, rows)
    for words in head.column_blocks():
        columns = head.weight[words].to(head.dtype)
        logits = head.logits(hidden, columns, words)
        before = sums.peak
        fold = sums.fold_on_gpu if head.triton else sums.fold
        weights = fold(head, logits, rows=rows, words=words, keeps=slopes is not None)
        if slopes is not None and weights is not None:
            shrink = (before - sums.peak).exp()
            add_product(slopes.mul_(shrink[:, None]), weights, columns)

    if slopes is not None:  # softmax @ weight, not yet divided by its normalizer
        chosen_weights = head.weight[head.labels[rows, 0]].to(head.dtype)
        slopes.div_(-sums.total[:, None]).add_(chosen_weights)
        if head.temperatures is not None:
            slopes.div_(head.temperatures[rows, None])

    log_total = sums.total.log()
    log_normalizer = sums.peak + log_total
    entropies = log_total - sums.moment / sums.total
    return sums.chosen - log_normalizer[:, None], entropies, log_normalizer


@dataclass
class _Sums:
    """What the blocks of a row have been folded into, in the letters of the formulas above."""

    peak: Tensor
    """[n] m"""
    total: Tensor
    """[n] s"""
    moment: Tensor
    """[n] u"""
    chosen: Tensor
    """[n, L] logits of the labels."""

    @classmethod
    def of_none(cls, head: _Head, rows: slice) -> _Sums:
        """Before the first block."""
        chosen = torch.zeros_like(head.labels[rows], dtype=head.sum_dtype)
        lowest = torch.finfo(head.sum_dtype).min
        peak = torch.full_like(chosen[:, 0], lowest)
        return cls(peak, torch.zeros_like(peak), moment=torch.zeros_like(peak), chosen=chosen)

    def fold(
        self, head: _Head, logits: Tensor, rows: slice, words: slice, keeps: bool
    ) -> Tensor | None:
        """Fold in a block of logits, which is overwritten. ``keeps``: returns exp(z - m')."""
        temperatures = head.row_temperatures(rows)
        if temperatures is not None:
            logits /= temperatures[:, None]
        places, inside = head.places(rows, words)
        self.chosen += torch.where(inside, logits.gather(1, places), 0.0)

        higher = torch.maximum(self.peak, logits.amax(1))
        shrink = (self.peak - higher).exp()
        shifted = logits.sub_(higher[:, None])
        weights = shifted.exp()
        moment = torch.linalg.vecdot(weights, shifted)
        self.moment = shrink * (self.moment + (self.peak - higher) * self.total) + moment
        self.total = shrink * self.total + weights.sum(1)
        self.peak = higher
        return weights.to(head.dtype) if keeps else None

    def fold_on_gpu(
        self, head: _Head, logits: Tensor, rows: slice, words: slice, keeps: bool
    ) -> Tensor | None:
        """The same by one kernel, which leaves the logits as they are."""
        self.peak = self.peak.clone()  # the kernel writes it, and the caller has the earlier one
        weights = gpu_ops.fold_logits(
            logits,
            head.row_temperatures(rows),
            head.labels[rows].contiguous(),
            words.start,
            self.peak,
            self.total,
            self.moment,
            self.chosen,
            head.dtype if keeps else None,
        )
        return weights if keeps else None


def _backward_rows(
    head: _Head,
    rows: slice,
    grad: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    log_normalizers: Tensor,
    gradients: list[Tensor | None],
) -> None:
    """Add the rows' share to the gradients of hidden states, weight and bias. ``grad``: [N, L].
    ``entropy``: the entropies and their gradient, [N] each."""
    of_hidden, of_weight, of_bias = gradients
    hidden = head.hidden[rows].to(head.dtype)
    slopes = None if entropy is None else (entropy[0][rows], entropy[1][rows])
    make = _gradients_on_gpu if head.triton else _logit_gradients
    for words in head.column_blocks():
        columns = head.weight[words].to(head.dtype)
        logits = head.logits(hidden, columns, words)
        of_logits = make(
            head,
            logits,
            rows=rows,
            words=words,
            grad=grad[rows],
            entropy=slopes,
            log_normalizers=log_normalizers[rows],
            dtype=head.dtype if of_bias is None else head.sum_dtype,
        )
        if of_bias is not None:
            of_bias[words] += of_logits.sum(0)
        of_logits = of_logits.to(head.dtype)
        if of_hidden is not None:
            add_product(of_hidden[rows], of_logits, columns)
        if of_weight is not None:
            add_product(of_weight[words], of_logits.T, hidden)


def _logit_gradients(
    head: _Head,
    logits: Tensor,
    rows: slice,
    words: slice,
    grad: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    log_normalizers: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient in ``dtype`` of a block of logits, which is overwritten."""
    temperatures = head.row_temperatures(rows)
    divisor: Tensor | float = 1.0
    scale = grad
    if temperatures is not None:
        divisor = temperatures[:, None]
        scale = grad / divisor
        logits /= divisor
    total = scale.sum(1, keepdim=True)
    log_softmax = logits.sub_(log_normalizers[:, None])
    factor = -total
    if entropy is not None:
        entropies, slopes = (each[:, None] for each in entropy)
        factor = (log_softmax + entropies).mul_(slopes / -divisor).sub_(total)

    of_logits = log_softmax.exp_().mul_(factor)
    places, inside = head.places(rows, words)
    of_logits.scatter_add_(1, places, torch.where(inside, scale, 0.0))
    return of_logits.to(dtype)


def _gradients_on_gpu(
    head: _Head,
    logits: Tensor,
    rows: slice,
    words: slice,
    grad: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    log_normalizers: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The same by one kernel."""
    entropies, slopes = entropy or (None, None)
    of_logits: Tensor = gpu_ops.logit_gradients(
        logits,
        head.row_temperatures(rows),
        head.labels[rows].contiguous(),
        words.start,
        log_normalizers,
        grad.contiguous(),
        entropies,
        None if slopes is None else slopes.contiguous(),
        dtype,
    )
    return of_logits


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product of two tensors of one dtype, summed and returned in ``dtype``."""
    if left.dtype == dtype:
        return linear(left, right.T)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    # A product in bfloat16 on CPU would round the sums too.
    return linear(left.to(dtype), right.to(dtype).T)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in the dtype of ``total``."""
    if left.dtype == total.dtype and left.is_cuda:
        total.addmm_(left, right)
    else:
        total += product(left, right, total.dtype)


def block_shape(num_tokens: int, num_words: int, block_logits: int) -> tuple[int, int]:
    """Tokens and words of a block. As many tokens as leave ``MIN_VOCAB`` words: the weight is read,
    and its gradient written, once per block of tokens."""
    rows = min(max(num_tokens, 1), max(block_logits // MIN_VOCAB, MIN_TOKENS))
    return rows, min(num_words, max(block_logits // rows, 1))


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
