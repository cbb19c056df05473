"""Peak memory and speed of one optimizer step at a vocabulary of 32,768: ours, the plain Hugging
Face forward with ``log_softmax``, and TRL.

    python -m bench memory

Each variant trains the same 16 documents of 64 + 64 tokens with the same small Qwen3 (9.5M
parameters, 8.4M of them its tied embedding) in a separate process with one thread: forward, log π
and entropy of the completions, the policy-gradient loss, backward, clipping, AdamW. ``memory`` is
the peak above the level before the first step (weights, libraries). It includes gradients and
AdamW's moments, together 109 MiB. TRL's step is its own loss on given completions, without
generation.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.records import record
from bench.train_step import Documents, PolicyGradient, make_model, micro_batch
from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.trainer import AdamWConfig, AdamWMaker
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.optim import build_optimizer, clip_gradients

VOCAB = 32_768
DOCUMENTS = 16
HALF = 64
REPEATS = 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
Step = Callable[[], object]


def documents() -> Documents:
    """Random tokens. A document's first half is its prompt."""
    rng = np.random.default_rng(0)
    drawn: Documents = rng.integers(1, VOCAB, (DOCUMENTS, 2 * HALF)).tolist()
    return drawn


def ours(**settings: Any) -> Step:
    """The trainer's own step."""
    config = TrainerConfig(device="cpu", **settings)
    model = make_model("sdpa", **SIZES)
    losses = installed_losses()
    losses = losses.with_rl(PolicyGradient(PluginConfig()))
    trainer = Trainer(
        model, losses, config, 100, kernel=make_kernel(config, load_plugins(TRAINER_GROUP))
    )
    row = micro_batch(documents())
    return lambda: trainer.train_step(1, [row])


def plain() -> Step:
    """Logits of every position, their full log-softmax, and its entropy."""
    model = make_model("sdpa", **SIZES)
    optim = TrainerConfig().optim
    optimizer = build_optimizer(
        AdamWMaker(AdamWConfig()), model, lr=optim.lr, weight_decay=optim.weight_decay
    )
    ids = torch.tensor(documents())

    def step() -> None:
        log_softmax = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        logprobs = log_softmax.gather(-1, ids[:, 1:, None])[..., 0][:, HALF - 1 :]
        with torch.no_grad():
            -(log_softmax.exp() * log_softmax).sum(-1)
        loss = -(logprobs + 6.0).exp().mean()
        torch.autograd.backward(loss)
        clip_gradients(model.parameters(), optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trl_step() -> Step:
    """The loss of TRL's ``GRPOTrainer`` with its own model settings, and the same optimizer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from prime_rl_environments.tiny.tokenizer import build_tokenizer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, beta=0.0, report_to=[],
        per_device_train_batch_size=DOCUMENTS, num_generations=8, max_completion_length=HALF,
        gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=make_model("sdpa", **SIZES),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * DOCUMENTS}),
        processing_class=build_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    optim = TrainerConfig().optim
    optimizer = build_optimizer(
        AdamWMaker(AdamWConfig()), model, lr=optim.lr, weight_decay=optim.weight_decay
    )
    ids = torch.tensor(documents())
    ones = torch.ones(DOCUMENTS, HALF, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :HALF],
        "prompt_mask": ones,
        "completion_ids": ids[:, HALF:],
        "completion_mask": ones,
        "advantages": torch.ones(DOCUMENTS),
        "old_per_token_logps": torch.full((DOCUMENTS, HALF), -6.0),
        "num_items_in_batch": torch.tensor(DOCUMENTS * HALF),
    }

    def step() -> None:
        torch.autograd.backward(trainer.compute_loss(model, inputs))
        clip_gradients(model.parameters(), optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


VARIANTS: dict[str, Callable[[], Step]] = {
    "ours": ours,
    "ours, recomputed": lambda: ours(activation_checkpointing=1),
    "ours, logits kept": lambda: ours(fused_lm_head=False),
    "plain Hugging Face": plain,
    "TRL": trl_step,
}


def measure(step: Step) -> dict[str, float]:
    """Peak MiB above the current level, and tokens per CPU second."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # reset the peak
    step()
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    tokens = DOCUMENTS * 2 * HALF
    return {
        "memory": memory("VmHWM") - before,
        "tokens": tokens / statistics.median(seconds),
    }


def memory(key: str) -> float:
    """A memory figure of this process, in MiB (Linux)."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.split(f"{key}:")[1].split()[0]) / 1024


def child(name: str) -> None:
    """Measure one variant in this process. Prints JSON."""
    torch.set_num_threads(1)
    print(json.dumps(measure(VARIANTS[name]())))


def run() -> dict[str, dict[str, float]]:
    """Measure every variant. A failed one is skipped, with its last line on stderr."""
    figures = {}
    for name in VARIANTS:
        command = [sys.executable, "-m", "bench.memory", name]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            last = result.stderr.strip().splitlines()[-1:]
            print(f"bench: {name} did not run: {last}", file=sys.stderr)
            continue
        figures[name] = json.loads(result.stdout.splitlines()[-1])
        print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    return figures


def report(figures: dict[str, dict[str, float]]) -> list[str]:
    """Lines to print, with ratios to ours."""
    ours = figures["ours"]
    lines = [f"{'step':<20}{'peak MiB':>10}{'tokens/CPU s':>14}{'memory':>9}{'speed':>8}"]
    for name, values in figures.items():
        memory_ratio = values["memory"] / ours["memory"]
        speed = values["tokens"] / ours["tokens"]
        lines.append(
            f"{name:<20}{values['memory']:>10.0f}{values['tokens']:>14.0f}"
            f"{memory_ratio:>8.2f}x{speed:>7.2f}x"
        )
    return lines


if __name__ == "__main__":
    if sys.argv[1:]:
        child(sys.argv[1])
    else:
        measured = run()
        print("\n".join(report(measured)))
        for name, found in measured.items():
            key = name.replace(",", "").replace(" ", "_").lower()
            record(f"memory.{key}.peak", found["memory"], "MiB")
            record(f"memory.{key}.tokens", found["tokens"], "tokens per CPU second")
