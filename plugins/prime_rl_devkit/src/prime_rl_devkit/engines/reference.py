"""The reference for an engine's numbers: transformers' own forward pass, and the distribution that
sampling parameters make of its logits.

Shapes: T = tokens of a sequence, V = vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EDGE = 1e-4
"""Within this distance of top_p or min_p a token may be kept or cut, because of rounding."""


class Reference:
    """The model of a folder, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def module(self) -> Any:
        """transformers' model."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, local_files_only=True
        )
        return model.eval().requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        """Number of valid token ids."""
        size: int = self.module.get_input_embeddings().num_embeddings
        return size

    @property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end a completion, by the generation config or the config of the folder."""
        for config in (self.module.generation_config, self.module.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return {eos} if isinstance(eos, int) else set(eos)
        return set()

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V]: row i is for the token after token i."""
        import torch

        with torch.no_grad():
            out = self.module(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        logits: Tensor = out.logits[0].float()
        return logits

    def logits_after(self, other: Reference, token_ids: Sequence[int], kept: int) -> Tensor:
        """[T - kept, V] under these weights, over the KV of the first ``kept`` tokens under
        ``other``'s: the values for a request that was running during an update."""
        import torch

        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            before = other.module(input_ids=ids[:, :kept], use_cache=True)
            # transformers 5.24 has renamed what is kept.
            taken = inspect.signature(self.module.forward).parameters
            name = "cache" if "cache" in taken else "past_key_values"
            kept_values = {name: getattr(before, name)}
            out = self.module(input_ids=ids[:, kept:], use_cache=True, **kept_values)
        logits: Tensor = out.logits[0].float()
        return logits

    def gap(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        found: Sequence[float],
        **sampling: Any,
    ) -> float:
        """The largest difference of given log-probabilities of a completion from the right ones."""
        rows = self.logits([*prompt, *token_ids])[len(prompt) - 1 : -1]
        return largest_gap(rows, token_ids, found, **sampling)


def largest_gap(
    logits: Tensor, token_ids: Sequence[int], found: Sequence[float], **sampling: Any
) -> float:
    """Largest distance of the log-probabilities ``found`` [T] from those that logits [T, V]
    give."""
    import torch

    index = torch.tensor(list(token_ids))[:, None]
    values = torch.tensor(list(found))
    gaps = [
        (distribution(logits, near).gather(-1, index)[:, 0] - values).abs()
        for near in _near(sampling)
    ]
    return float(torch.stack(gaps).min(0).values.max())


def _near(sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters, and the same with each cut slightly lower and higher."""
    cuts = [key for key in ("top_p", "min_p") if sampling.get(key) not in (None, 0.0, 1.0)]
    if not cuts:
        return [dict(sampling)]
    moved = [{key: sampling[key] + by for key in cuts} for by in (0.0, EDGE, -EDGE)]
    return [dict(sampling) | each for each in moved]


def distribution(logits: Tensor, sampling: Mapping[str, Any]) -> Tensor:
    """Log of the sampling distribution, [T, V]: temperature, then top-k, min-p, and top-p over what
    they leave, renormalized. Greedy: temperature 1, nothing cut."""
    import torch

    temperature = sampling.get("temperature", 1.0)
    if temperature < 1e-5:
        return logits.log_softmax(-1)
    logprobs = (logits / temperature).log_softmax(-1)
    size = logits.shape[-1]
    ordered, order = logprobs.sort(-1, descending=True)
    top_k = sampling.get("top_k") or 0
    kept = torch.arange(size) < (top_k if top_k > 0 else size)
    kept = kept & (ordered.exp() >= sampling.get("min_p", 0.0) * ordered[:, :1].exp())
    left = ordered.masked_fill(~kept, float("-inf")).softmax(-1)
    top_p = sampling.get("top_p", 1.0)
    if top_p < 1.0:
        kept = kept & (left.cumsum(-1) - left < top_p)
    cut = torch.full_like(logprobs, float("-inf"))
    cut.scatter_(-1, order, ordered.masked_fill(~kept, float("-inf")))
    return cut.log_softmax(-1)
