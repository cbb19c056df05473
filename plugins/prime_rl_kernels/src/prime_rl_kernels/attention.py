"""Attention that keeps the documents of a packed row apart.

Registered with transformers' ``AttentionInterface``, for every model that takes its attention from
there. The row's ``Documents`` pass through the model's forward as a keyword argument.

``varlen`` calls the kernel once for each run of documents of equal length, folded into a batch: no
mask, no padding. The trainer sorts rows by length for that. Measured on CPU it is as fast as a
padded batch of equal lengths, and padding unequal lengths to share a call gains nothing.
On a GPU in half precision one varlen kernel computes the whole row: torch's own, or with ``flash3``
FlashAttention 3. Prefixes that several sequences
share are computed once, and their continuations attend to them by index (``prefix_sharing.py``).
``mask`` builds a dense block mask: the reference, and the fallback for models that need what the
kernels lack.

Shapes: T = tokens of the row, H = heads, D = head size, n = documents of a run, L = their length,
C = tokens of a continuation, K = the tokens it attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention as torch_attention

from prime_rl import ConfigError
from prime_rl.trainer import context
from prime_rl.trainer.device import to_device

logger = logging.getLogger("prime_rl.trainer.attention")
"""The trainer's logger: only rank 0 shows its lines."""

Attention = Literal["flash3", "varlen", "mask", "sdpa"]
NAMES: dict[Attention, str] = {
    name: f"prime_rl_{name}" for name in ("flash3", "varlen", "mask", "sdpa")
}
"""The name of each in transformers."""
FLASH_3 = "FA3"
"""The name of FlashAttention 3 in torch."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Sequences of equal shape that continue shared prefixes. Their tokens follow all documents of
    the row, run after run."""

    num: int
    """n"""
    num_queries: int
    """C: tokens of each."""
    num_keys: int
    """K: tokens of its prefix and its own."""
    key_index: Tensor
    """[n * K] int64: positions in the row of each one's keys and values."""


@dataclass(frozen=True)
class Documents:
    """Where the documents of one packed row begin and end."""

    lengths: tuple[int, ...]
    device: torch.device
    continuations: tuple[Continuation, ...] = ()
    """Continuations of shared prefixes (``prefix_sharing.py``)."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared prefix included."""
        return max((*self.lengths, *(run.num_keys for run in self.continuations)))

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(n, L) of each run of neighbors of equal length."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    @cached_property
    def offsets(self) -> Tensor:
        """[documents + 1] int32: where each begins, and where the last one ends."""
        return to_device(np.cumsum((0, *self.lengths)), np.int32, self.device)

    @cached_property
    def document_index(self) -> Tensor:
        """[T] int32: the document of each token."""
        index = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return to_device(index, np.int32, self.device)

    @cached_property
    def continued_keys(self) -> Tensor:
        """[sum of n * K] int64: ``key_index`` of all continuations, run after run."""
        return torch.cat([run.key_index for run in self.continuations])

    @property
    def boundaries(self) -> dict[str, Tensor]:
        """Under the names that transformers hands to kernels of recurrent and convolution layers
        (fla, mamba-ssm, causal-conv1d). Its own code in torch ignores them."""
        if self.continuations:
            return {}
        return {"seq_idx": self.document_index[None], "cu_seq_lens_q": self.offsets.long()}

    def block_mask(self, window: int | None = None) -> Tensor:
        """[T, T] bool: query sees key: same document, not later, less than ``window`` back."""
        document = self.document_index
        position = torch.arange(len(document), device=self.device)
        distance = position[:, None] - position[None]
        allowed = (document[:, None] == document[None]) & (distance >= 0)
        return allowed if window is None else allowed & (distance < window)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of one layer's attention."""

    query: Tensor
    """[1, H, T, D]"""
    key: Tensor
    """The same, with as many or fewer heads."""
    value: Tensor
    scaling: float | None
    window: int | None
    documents: Documents


def register(wrapper: Callable[[Any], Any] = lambda function: function) -> None:
    """Register ours with transformers; ``wrapper`` is applied to each."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAMES["flash3"], wrapper(_for_transformers(_flash3)))
    AttentionInterface.register(NAMES["varlen"], wrapper(_for_transformers(_varlen)))
    AttentionInterface.register(NAMES["mask"], wrapper(_for_transformers(_mask)))
    AttentionInterface.register(NAMES["sdpa"], _sdpa)
    AttentionMaskInterface.register(NAMES["sdpa"], sdpa_mask)


def has_flash_attention_3(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper, torch knows FlashAttention 3, and the package
    ``flash_attn_interface`` is installed."""
    known: list[str] = getattr(torch_attention, "list_flash_attention_impls", list)()
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and FLASH_3 in known and find_spec("flash_attn_interface") is not None


def use_flash(name: str | None) -> None:
    """Have torch's flash kernel be that of ``name``; None: its own."""
    current: Callable[[], str | None] = getattr(
        torch_attention, "current_flash_attention_impl", lambda: None
    )
    if current() == name:
        return
    if name is None:
        torch_attention.restore_flash_attention_impl()
    else:
        torch_attention.activate_flash_attention_impl(name)
        logger.info("attention: torch's flash kernel is %s", name)


def _for_transformers(compute: Callable[[Inputs], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """``compute``, which returns [1, T, H, D], with the signature that transformers calls."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        *,
        documents: Documents | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        documents = _check(module, documents)
        _refuse_what_kernels_lack(module, others)
        if torch.is_autocast_enabled(query.device.type):
            # Norms of queries and keys (Qwen3's) leave them in float32, and kernels outside of
            # autocast's lists would run in that.
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)

        is_split = context.num_parts() > 1
        if is_split:
            query, key, value = _all_tokens(module, query, key=key, value=value)
        inputs = Inputs(
            query, key, value=value, scaling=scaling, window=sliding_window, documents=documents
        )
        output = compute(inputs)
        return context.tokens_for_heads(output) if is_split else output, None

    return attention


def _all_tokens(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads, for all tokens of the row. Raises ``ConfigError`` if the ranks of a row
    cannot have equally many heads."""
    parts = context.num_parts()
    num_heads = query.shape[1]
    num_pairs = key.shape[1]
    if num_heads % parts:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"trainer.context_parallel is {parts}, which does not divide the {num_heads} attention "
            f"heads of {type(module).__name__}. Set it to one of {fitting}."
        )
    if num_pairs % parts:
        # Fewer keys than ranks: neighbors hold the same. In any other case each head gets its own.
        copies = parts // num_pairs if parts % num_pairs == 0 else num_heads // num_pairs
        key = key.repeat_interleave(copies, dim=1)
        value = value.repeat_interleave(copies, dim=1)
    query, key, value = (context.heads_for_tokens(each) for each in (query, key, value))
    return query, key, value


def _sdpa(module: nn.Module, *columns: Any, **others: Any) -> tuple[Tensor, None]:
    """That of transformers, for batches of whole documents, where it leaves nothing out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _refuse_what_kernels_lack(module, others)
    output: tuple[Tensor, None] = sdpa_attention_forward(module, *columns, **others)
    return output


def _mask(inputs: Inputs) -> Tensor:
    _log_mask()
    mask = inputs.documents.block_mask(inputs.window)
    return _attend(
        inputs.query, inputs.key, value=inputs.value, mask=mask, scaling=inputs.scaling
    ).transpose(1, 2)


def _flash3(inputs: Inputs) -> Tensor:
    use_flash(FLASH_3)
    return _by_document(inputs)


def _varlen(inputs: Inputs) -> Tensor:
    use_flash(None)
    return _by_document(inputs)


def _by_document(inputs: Inputs) -> Tensor:
    query = inputs.query
    key = inputs.key
    value = inputs.value
    documents = inputs.documents
    window = inputs.window
    if window is not None and window >= documents.longest:
        window = None
    reason = _why_no_kernel(query)
    if not reason and value.shape[-1] > key.shape[-1]:
        reason = "the kernel takes no values that are larger than their keys"
    _log_choice(reason, query.is_cuda)
    if not reason:
        return _varlen_kernel(inputs, window)
    # Each run's part by one split, not by a slice a run: the gradient of a slice is a tensor of the
    # whole row, so that the backward pass would be quadratic in the number of runs.
    continued = documents.continuations
    shapes = [
        *((num, length, length) for num, length in documents.runs),
        *((run.num, run.num_queries, run.num_keys) for run in continued),
    ]
    sizes = [num * num_queries for num, num_queries, _ in shapes]
    queries = query.squeeze(0).split_with_sizes(sizes, 1)
    keys = list(key.squeeze(0).split_with_sizes(sizes, 1))
    values = list(value.squeeze(0).split_with_sizes(sizes, 1))
    if continued:  # keys of the shared prefix and the continuation, side by side
        num_alone = len(documents.runs)
        num_read = [run.num * run.num_keys for run in continued]
        for parts, column in ((keys, key), (values, value)):
            read = column.squeeze(0).index_select(1, documents.continued_keys)
            parts[num_alone:] = read.split_with_sizes(num_read, 1)

    outputs = []
    for (num, num_queries, num_keys), *columns in zip(shapes, queries, keys, values, strict=True):
        q, k, v = (_fold(column, num) for column in columns)
        band = None
        if num_keys > num_queries or window is not None:
            band = _band(num_queries, num_keys, window=window or num_keys, device=query.device)
        output = _attend(q, k, value=v, mask=band, scaling=inputs.scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [n, H, L, D] -> [n * L, H, D]

    return torch.cat(outputs)[None]


def _fold(part: Tensor, num: int) -> Tensor:
    """[H, n * L, D] -> [n, H, L, D]: a view."""
    heads, tokens, size = part.shape
    return part.view(heads, num, tokens // num, size).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _band(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """[C, K] bool: the queries are the last C of K tokens; causal, less than ``window`` back."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    before = num_keys - num_queries
    return ones.tril(before) & ~ones.tril(before - window)


def _why_no_kernel(query: Tensor) -> str:
    """Why the flash kernel does not take these heads; empty if it does."""
    if not query.is_cuda:
        return f"the kernel needs a GPU, and the tensors are on {query.device.type}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel needs half precision, and the heads are in {query.dtype}"
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"the kernel takes heads of 8, 16, ... or 256, and these are of {query.shape[-1]}"
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the kernel needs a GPU of the Ampere generation or later"
    if not _varlen_parameters() >= {"window_size", "scale"}:
        return f"torch {torch.__version__} has no such kernel with windows: install torch 2.11 on"
    return ""


@cache
def _varlen_parameters() -> frozenset[str]:
    """The parameters of torch's varlen attention; none where torch lacks it."""
    varlen_attn = _torch_varlen()
    return frozenset(signature(varlen_attn).parameters if varlen_attn else ())


def _torch_varlen() -> Callable[..., Any] | None:
    """torch's varlen attention, which 2.9 lacks."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return cast(Callable[..., Any], varlen_attn)


@cache
def _log_mask() -> None:
    logger.info("attention: a dense mask of the row, which the kernel 'mask' asks for")


@cache
def _log_choice(reason: str, on_gpu: bool) -> None:
    """Once for each reason: which attention computes rows. A GPU is expected to have the kernel."""
    if reason:
        logger.log(
            logging.WARNING if on_gpu else logging.INFO,
            "attention: a call for each run of documents of equal length, because %s",
            reason,
        )
    else:
        logger.info("attention: torch's varlen kernel, a call for each row")


def _varlen_kernel(inputs: Inputs, window: int | None) -> Tensor:
    varlen_attn = _torch_varlen()
    assert varlen_attn is not None  # otherwise `_why_no_kernel` has a reason
    missing = inputs.key.shape[-1] - inputs.value.shape[-1]
    value = inputs.value
    if missing:
        # The kernel takes heads of one size. Values of latent attention (DeepSeek) are smaller than
        # keys: zeros behind them become zeros of the output. Other models are not copied for it.
        value = nn.functional.pad(value, (0, missing))
    columns = (inputs.query, inputs.key, value)
    # The gradient of `squeeze` is a view; that of `column[0]` would be a copy in another layout.
    q, k, v = (column.squeeze(0).transpose(0, 1).contiguous() for column in columns)  # [T, H, D]
    offsets = inputs.documents.offsets
    longest = inputs.documents.longest
    # Before torch 2.12 the function has no such parameter and takes grouped heads as they are.
    grouped: dict[str, Any] = {}
    if "enable_gqa" in _varlen_parameters():
        grouped["enable_gqa"] = inputs.query.shape[1] != inputs.key.shape[1]
    output = varlen_attn(
        q,
        k,
        v,
        cu_seq_q=offsets,
        cu_seq_k=offsets,
        max_q=longest,
        max_k=longest,
        scale=inputs.scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(output, Tensor)
    return output[None, ..., : inputs.value.shape[-1]] if missing else output[None]


def _check(module: nn.Module, documents: Documents | None) -> Documents:
    """The documents. Raises ``ConfigError`` if the model withholds them, or attends within chunks:
    the row of the self-check is too short to show that."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[getattr(module, "layer_idx", 0)] == "chunked_attention":
        raise ConfigError(
            f"model: {type(module).__name__} attends within chunks, which the trainer's attention "
            "does not compute. Train a model without them."
        )

    if documents is None:
        raise ConfigError(
            f"model: {type(module).__name__} does not pass on where the documents of a row begin, "
            "which the trainer's attention needs. Train a model that does."
        )

    return documents


def _refuse_what_kernels_lack(module: nn.Module, others: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise ConfigError(
                f"model: {type(module).__name__} asks its attention for {name!r}, which the "
                "trainer's attention does not compute. Train a model without it."
            )
