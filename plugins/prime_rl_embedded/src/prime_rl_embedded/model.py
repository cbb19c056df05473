"""Load a Hugging Face folder and choose the forward that serves it.

The chosen forward must reproduce the model's own logits at start-up. An architecture that slot
attention cannot compute (sinks, soft caps, custom attention, recurrent state) is refused with the
reason, because it would sample from a different distribution.

Shapes: N = tokens of one forward, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from prime_rl import EngineError, WeightsError
from prime_rl_embedded.attention import ATTENTION_NAME, BatchPlan
from prime_rl_embedded.forward import Forward, GeneralForward, WholeForward
from prime_rl_embedded.fused import FusedForward, NotFusable
from prime_rl_embedded.kv import KVCache
from prime_rl_kernels.routes import Mixture, observe_routers

log = logging.getLogger(__name__)

# Largest allowed difference from the model's own logits, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass
class ServedModel:
    """A model ready to serve."""

    module: Any
    """The transformers module. A weight update writes to its parameters."""
    forward: Forward
    device: torch.device
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Key/value heads and head dimension by layer, as the forward stored them at start-up."""
    mixtures: list[Mixture] = field(default_factory=list)
    """Whose routes are recorded; none if nothing is."""

    def make_cache(self, max_slots: int, max_len: int) -> KVCache:
        """An empty KV cache of this model's shape."""
        return KVCache(
            self.kv_shapes,
            max_slots=max_slots,
            max_len=max_len,
            dtype=self.module.dtype,
            device=self.device,
            routes=(len(self.mixtures), self.mixtures[0].top_k) if self.mixtures else None,
        )


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA if available. Raises ``EngineError`` if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EngineError(f"inference.embedded.device is {name!r}: {reason}") from error

    return device


def weights_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """In transformers' terms: ``auto`` is the dtype of the model's folder."""
    if dtype == "auto":
        return "auto" if device.type == "cuda" else torch.float32
    named: torch.dtype = getattr(torch, dtype)
    return named


def load_model(
    path: Path,
    *,
    max_len: int,
    dtype: str = "float32",
    device: str = "auto",
    fused: bool = True,
    records_routes: bool = False,
) -> ServedModel:
    """Load a folder, or a model id of the Hugging Face hub. ``records_routes``: of each token, the
    experts that compute it.

    Raises ``WeightsError`` if it is damaged, ``EngineError`` if its logits cannot be reproduced or
    it has no experts to record.
    """
    target = pick_device(device)
    disable_progress_bar()
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=weights_dtype(dtype, target),
            attn_implementation="eager",  # the only one that omits nothing (soft caps, sinks)
            local_files_only=path.is_dir(),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"{path}: can't be loaded: {error}") from error

    missing = sorted(info["missing_keys"])
    if missing:
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
    _check_beyond_probe(served, max_len)
    _choose_forward(served, max_len, fused)
    if records_routes:
        served.mixtures = observe_routers(module)
        if not served.mixtures:
            raise EngineError(
                f"trainer.router_replay is true, and {type(module).__name__} has no mixture of "
                "experts whose routers could be recorded. Set it to false."
            )
    return served


def _check_length(module: Any, max_len: int) -> None:
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_len > longest:
        raise EngineError(
            f"max_model_len is {max_len}, but {type(module).__name__} has positions for {longest} "
            "(max_position_embeddings in its config.json): lower inference.max_model_len"
        )


def _check_beyond_probe(served: ServedModel, max_len: int) -> None:
    """Refuse models that differ only at positions beyond the start-up probe's 24 tokens. Raises
    ``EngineError``."""
    config = served.module.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise _refusal(served, "it attends within chunks of tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # the longest sequence changes the whole batch
        length = rope["original_max_position_embeddings"]
        if max_len > length:
            raise _refusal(
                served,
                f"its rotary embedding changes beyond {length} tokens, and max_model_len is "
                f"{max_len}. Lower inference.max_model_len to {length} to serve it here",
            )


def _choose_forward(served: ServedModel, max_len: int, fused: bool) -> None:
    """The first one whose logits agree: fused, transformers' layers and head, the whole module."""
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
            check_forward(served, forward, ids=ids, expected=expected)
            served.forward = forward
            return
        except (NotFusable, EngineError) as error:
            log.info("a more general forward serves this model: %s", error)

    check_forward(served, served.forward, ids=ids, expected=expected)


def _probe_ids(served: ServedModel, max_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(24, max_len)
    return torch.randint(served.vocab_size, (length,), generator=generator).to(served.device)


@torch.inference_mode()
def check_forward(served: ServedModel, forward: Forward, ids: Tensor, expected: Tensor) -> None:
    """Prefill all but the last token, decode the last one, and compare the logits. The cache then
    has the shapes of the model's keys and values, which ``kv_shapes`` keeps.

    Ids: [N]; expected: [N, V], the model's own logits. Raises ``EngineError`` if the forward fails
    or its logits differ.
    """
    cache = served.make_cache(1, len(ids))
    probes = [([], [len(ids) - 1], ids[:-1]), ([len(ids) - 1], [], ids[-1:])]
    parts = []
    try:
        for decoding, prompts, tokens in probes if len(ids) > 1 else probes[1:]:
            plan = BatchPlan.build(cache, decoding, prompt_lengths=prompts, device=served.device)
            parts.append(forward(tokens, plan, None))
    except torch.OutOfMemoryError:
        raise
    except NotImplementedError as error:  # from ``slot_attention``
        raise _refusal(served, str(error)) from error
    except Exception as error:  # model code, called in a way that it may not support
        raise _refusal(served, f"its forward fails: {type(error).__name__}: {error}") from error

    if not isinstance(forward, FusedForward):  # it calls ``attend`` itself, for every layer
        _check_attended(served, plan.attended)
    gap = (torch.cat(parts).float() - expected).abs().max().item()
    limit = _TOLERANCE.get(served.module.dtype, 1e-3) * max(1.0, expected.abs().max().item())
    if not gap <= limit:
        raise _refusal(
            served,
            f"over slotted attention, its logits differ by {gap:.2g} from the model's own "
            f"(at most {limit:.2g} is allowed)",
        )

    served.kv_shapes = cache.shapes


def _check_attended(served: ServedModel, attended: set[nn.Module]) -> None:
    """Raises ``EngineError`` if a layer keeps state outside our cache. transformers modules with
    per-layer state have a ``layer_idx``, so each such module must have attended with our plan."""
    indexed = [each for each in served.module.modules() if hasattr(each, "layer_idx")]
    others = {
        type(module).__name__
        for module in indexed
        if module not in attended
        and not any(hasattr(part, "layer_idx") for part in module.modules() if part is not module)
    }
    num_layers = served.module.config.get_text_config().num_hidden_layers
    partly = served.module._is_stateful and len(attended) < num_layers
    if others or partly or not attended:
        which = "part of its layers" if attended else "every layer"
        names = ", ".join(sorted(others)) or which
        raise _refusal(served, f"{names} has a state or an attention of its own")


def _refusal(served: ServedModel, found: str) -> EngineError:
    return EngineError(
        f"the embedded engine can't serve {type(served.module).__name__}: {found}. Expected: all "
        "layers attend to keys and values through transformers' AttentionInterface. Use another "
        "engine (inference.engine = 'vllm', say) or another model."
    )


def _eos_token_ids(module: Any) -> frozenset[int]:
    """The checkpoint's end-of-sequence tokens: from its generation config, else its config."""
    for config in (module.generation_config, module.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
