"""Loading a Hugging Face folder and choosing the forward that serves it.

Whatever forward is chosen has to reproduce the model's own logits at start-up: an architecture
whose attention needs more than the slots offer (sinks, soft caps, latent KV) is refused with the
measured gap instead of sampling from a different distribution.

Shapes: N = tokens of one forward, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from prime_rl import EngineError, WeightsError
from prime_rl_embedded.attention import ATTENTION_NAME, BatchPlan
from prime_rl_embedded.forward import Forward, GeneralForward, WholeForward
from prime_rl_embedded.fused import FusedForward, NotFusable
from prime_rl_embedded.kv import KVCache

log = logging.getLogger(__name__)

# Largest allowed gap between our logits and the model's own, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass
class ServedModel:
    """A model ready to serve."""

    module: Any
    """The transformers module; its parameters are what a weight update writes to."""
    forward: Forward
    device: torch.device
    vocab_size: int
    eos_token_ids: frozenset[int]

    def make_cache(self, max_slots: int, max_len: int) -> KVCache:
        """An empty KV cache of this model's shape."""
        config = self.module.config.get_text_config()
        heads = config.num_attention_heads
        return KVCache(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_slots=max_slots,
            max_len=max_len,
            dtype=self.module.dtype,
            device=self.device,
        )


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises ``EngineError`` for a device that isn't here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EngineError(f"inference.embedded.device is {name!r}: {reason}") from error
    return device


def load_model(
    path: Path, *, max_len: int, dtype: str = "float32", device: str = "auto", fused: bool = True
) -> ServedModel:
    """Load a folder, or an id of the hub.

    Raises ``WeightsError`` if it is damaged, ``EngineError`` if it can't be served faithfully.
    """
    target = pick_device(device)
    disable_progress_bar()
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # the only one that never leaves anything out
            local_files_only=path.is_dir(),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"{path}: can't be loaded: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise WeightsError(f"{path}: tensors missing from the checkpoint: {', '.join(missing[:5])}")
    _check_length(module, max_len)
    module.to(target).eval().requires_grad_(False)
    served = ServedModel(
        module=module,
        forward=WholeForward(module),
        device=target,
        vocab_size=module.get_input_embeddings().num_embeddings,
        eos_token_ids=_eos_token_ids(module),
    )
    _choose_forward(served, max_len, fused)
    return served


def _check_length(module: Any, max_len: int) -> None:
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_len > longest:
        raise EngineError(
            f"max_model_len is {max_len}, but {type(module).__name__} has positions for {longest} "
            "(max_position_embeddings in its config.json): lower inference.max_model_len"
        )


def _choose_forward(served: ServedModel, max_len: int, fused: bool) -> None:
    """The first that fits and agrees: fused, transformers' layers and head, the whole module."""
    ids = _probe_ids(served, max_len)
    with torch.inference_mode():
        expected = served.module(input_ids=ids[None], use_cache=False).logits[0].float()
    served.module.set_attn_implementation(ATTENTION_NAME)
    makers: list[Callable[[], Forward]] = [lambda: GeneralForward(served.module)]
    if fused:
        makers.insert(0, lambda: FusedForward(served.module, max_len))
    for make in makers:
        try:
            forward = make()
            check_forward(served, forward, ids, expected)
            served.forward = forward
            return
        except (NotFusable, EngineError) as error:
            log.info("a more general forward serves this model: %s", error)
    check_forward(served, served.forward, ids, expected)


def _probe_ids(served: ServedModel, max_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(24, max_len)
    return torch.randint(served.vocab_size, (length,), generator=generator).to(served.device)


@torch.inference_mode()
def check_forward(served: ServedModel, forward: Forward, ids: Tensor, expected: Tensor) -> None:
    """Prefill all but the last token, decode that one, and compare. Raises ``EngineError`` on a
    gap.

    Ids: [N]; expected: [N, V], the model's own logits.
    """
    name, length = type(served.module).__name__, len(ids)
    cache = served.make_cache(1, max(length, 1))
    try:
        parts = []
        if length > 1:
            plan = BatchPlan.build(cache, [], [length - 1], served.device)
            parts.append(forward(ids[:-1], plan, None))
        plan = BatchPlan.build(cache, [length - 1], [], served.device)
        parts.append(forward(ids[-1:], plan, None))
        gap = (torch.cat(parts).float() - expected).abs().max().item()
    except (TypeError, RuntimeError, AssertionError, AttributeError) as error:
        raise EngineError(f"{name} can't run over slotted attention: {error}") from error
    limit = _TOLERANCE.get(served.module.dtype, 1e-3) * max(1.0, expected.abs().max().item())
    if not gap <= limit:
        raise EngineError(
            f"{name}: logits over slotted attention differ by {gap:.2g} from the model's own "
            f"(at most {limit:.2g} is allowed); this architecture needs another engine"
        )


def _eos_token_ids(module: Any) -> frozenset[int]:
    """The checkpoint's end-of-sequence tokens: of its generation config, else of its config."""
    for config in (module.generation_config, module.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
