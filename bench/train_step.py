"""CPU microseconds per token of one optimizer step: packed documents compared with a padded batch.

Both do the same work: forward, log π of the completions, the policy-gradient loss, backward,
clipping, AdamW. The padded batch is the plain way: one row per document, padded to the longest, and
every position through the LM head and a full log-softmax. Microseconds are per real token, without
padding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.records import record
from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.trainer import AdamWConfig, AdamWMaker
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.optim import build_optimizer, clip_gradients
from prime_rl.wire import MicroBatch
from prime_rl_kernels.kernels import KernelConfig, Mask, Varlen

VOCAB = 512
ROW = 2048
REPEATS = 5
MIXES: dict[str, Callable[[np.random.Generator], Sequence[int]]] = {
    "short, 20-40": lambda rng: rng.integers(20, 41, 256).tolist(),
    "equal, 64 + 64": lambda rng: [128] * 64,
    "mixed, 20-600": lambda rng: rng.integers(20, 601, 26).tolist(),
    "one long, 2048": lambda rng: [2048],
}
Documents = Sequence[Sequence[int]]


class PolicyGradient(Loss):
    """-A * ratio: a minimal loss, so that the bench measures the step."""

    name = "policy_gradient"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        loss = torch.where(inputs.loss_mask, -inputs.advantages * ratio, 0.0).sum()
        return LossOutputs(loss, {})


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
"""0.66M parameters."""


def make_model(attention: str, **sizes: int) -> PreTrainedModel:
    """A random Qwen3 with tied embeddings. ``sizes`` replace ``SIZES``."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES | sizes, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation(attention)
    return model


def pack(documents: Documents) -> list[MicroBatch]:
    """First fit, longest first, into rows of ``ROW`` tokens."""
    rows: list[list[Sequence[int]]] = []
    for document in sorted(documents, key=len, reverse=True):
        fits = (row for row in rows if sum(map(len, row)) + len(document) <= ROW)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    return [micro_batch(row) for row in rows]


def micro_batch(documents: Documents) -> MicroBatch:
    """One row. A document's first half is its prompt."""
    lengths = np.array([len(document) for document in documents], np.int32)
    mask = np.concatenate([np.arange(length) >= length // 2 for length in lengths])
    return MicroBatch(
        token_ids=np.concatenate(documents).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        sequence_lengths=lengths,
        temperatures=np.ones(len(lengths), np.float32),
        env_ids=np.zeros(len(lengths), np.uint16),
        envs=("bench",),
        advantages=mask.astype(np.float32),
    )


def packed_step(kernel: type[Varlen], documents: Documents) -> Callable[[], object]:
    """The trainer's own step."""
    trainer = Trainer(
        make_model("sdpa"),
        installed_losses().with_rl(PolicyGradient(PluginConfig())),
        TrainerConfig(device="cpu"),
        max_steps=100,
        kernel=kernel(KernelConfig()),
    )
    rows = pack(documents)
    return lambda: trainer.train_step(1, rows)


def padded_step(documents: Documents) -> Callable[[], object]:
    """The plain step, in batches of at most ``ROW`` tokens including padding."""
    model = make_model("sdpa")
    optim = TrainerConfig().optim
    optimizer = build_optimizer(
        AdamWMaker(AdamWConfig()), model, lr=optim.lr, weight_decay=optim.weight_decay
    )
    longest = max(map(len, documents))
    size = max(1, ROW // longest)
    total = sum(len(document) - len(document) // 2 for document in documents)

    def step() -> None:
        for start in range(0, len(documents), size):
            torch.autograd.backward(padded_loss(model, documents[start : start + size], total))
        clip_gradients(model.parameters(), optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def padded_loss(model: PreTrainedModel, documents: Documents, total: int) -> torch.Tensor:
    """The loss of a padded batch, with every position through the head."""
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    real = torch.zeros_like(ids)
    sampled = torch.zeros_like(ids, dtype=torch.float32)
    for index, document in enumerate(documents):
        ids[index, : len(document)] = torch.tensor(document)
        real[index, : len(document)] = 1
        sampled[index, len(document) // 2 : len(document)] = 1
    logits = model(ids, attention_mask=real, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    gain: torch.Tensor = ((logprobs + 6.0).exp() * sampled[:, 1:]).sum()
    return -gain / total


def cpu_microseconds(step: Callable[[], object], num_tokens: int) -> float:
    """CPU microseconds per real token, median over the repeats."""
    step()
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    return 1e6 * statistics.median(seconds) / num_tokens


def run() -> dict[str, dict[str, float]]:
    """Measure, print a table, return it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    results = {}
    print(f"train step, CPU us per real token, 0.66M parameters, one thread, median of {REPEATS}")
    print(f"  {'documents':16}{'varlen':>9}{'mask':>9}{'padded HF':>11}{'ratio':>8}")
    for name, lengths in MIXES.items():
        documents = [rng.integers(1, VOCAB, length).tolist() for length in lengths(rng)]
        num_tokens = sum(map(len, documents))
        steps = {
            "varlen": packed_step(Varlen, documents),
            "mask": packed_step(Mask, documents),
            "padded": padded_step(documents),
        }
        row = {kind: cpu_microseconds(step, num_tokens) for kind, step in steps.items()}
        for kind, figure in row.items():
            first_word = name.partition(",")[0].split()[0]
            record(f"train_step.{first_word}.{kind}", figure, "CPU us per token")
        row["padded_over_varlen"] = row["padded"] / row["varlen"]
        results[name] = row
        print(
            f"  {name:16}{row['varlen']:9.0f}{row['mask']:9.0f}{row['padded']:11.0f}"
            f"{row['padded_over_varlen']:7.2f}x"
        )
    torch.set_num_threads(threads)
    return results


if __name__ == "__main__":
    run()
