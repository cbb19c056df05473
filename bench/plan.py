"""The memory that ``prime-rl plan`` foresees, beside what was measured.

    python -m bench plan

On CPU: the peak of a real training step in a process of its own, above its level before the model
was made, at three shapes: many weights, many tokens with stored activations, a large vocabulary.
Beside it plan's figure: the same step with few layers on tensors without values, extrapolated.
Freed memory goes back at once (``MALLOC_MMAP_THRESHOLD_``): the peak is that of live tensors.

On GPUs: upstream's published peaks of one H100 and of eight (two rows per step), which we have not
measured ourselves, beside plan's figure for our trainer without what it reserves for CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from bench.records import record
from prime_rl_plan.devices import parse

GIB = 2**30
QWEN3: dict[str, Any] = {"model_type": "qwen3", "max_position_embeddings": 131_072}
SHAPES: dict[str, dict[str, Any]] = {
    "many weights": {
        "model": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12},
        "vocab_size": 4096,
        "seq_len": 128,
        "row_tokens": 256,
    },
    "many tokens": {
        "model": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 10},
        "vocab_size": 512,
        "seq_len": 512,
        "row_tokens": 4096,
    },
    "large vocabulary, recomputed": {
        "model": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8},
        "vocab_size": 32_768,
        "seq_len": 512,
        "row_tokens": 8192,
        "trainer": {"activation_checkpointing": 1},
    },
}
PUBLISHED: dict[str, tuple[str, int, int, dict[str, Any], float]] = {
    "Qwen3-0.6B, 16k": ("Qwen3-0.6B", 1, 16_384, {}, 12.5),
    "Qwen3-0.6B, 64k": ("Qwen3-0.6B", 1, 65_536, {}, 19.6),
    "Qwen3-0.6B LoRA r16, 16k": ("Qwen3-0.6B", 1, 16_384, {"lora": {"rank": 16}}, 5.15),
    "Qwen3-4B, 16k, 8 ranks": ("Qwen3-4B", 8, 16_384, {}, 17.1),
    "Qwen3-30B-A3B, 16k, 8 ranks": ("Qwen3-30B-A3B", 8, 16_384, {}, 74.6),
}
"""Model, ranks, tokens per row, keys of ``[trainer]``, GiB."""


def cpu_request(name: str) -> dict[str, Any]:
    """For ``prime_rl_plan.measure``, of a shape."""
    shape = SHAPES[name]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes = {"vocab_size": shape["vocab_size"], "tie_word_embeddings": True}
    return _request(
        QWEN3 | heads | sizes | shape["model"],
        gpu=False,
        trainer=shape.get("trainer", {}),
        seq_len=shape["seq_len"],
        row_tokens=shape["row_tokens"],
    )


def gpu_request(model: str, ranks: int, tokens: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """One long sequence per row, recomputed."""
    table = json.loads((files("prime_rl_plan") / "models" / f"{model}.json").read_text("utf-8"))
    return _request(
        table | {"max_position_embeddings": 131_072},
        gpu=True,
        memory=parse("1xH100-80").memory,
        ranks=ranks,
        trainer={"activation_checkpointing": 1} | trainer,
        seq_len=tokens,
        row_tokens=tokens,
    )


def _request(model: dict[str, Any], **others: Any) -> dict[str, Any]:
    request = {"ranks": 1, "rows": 2, "component": "rl", "layers": [3, 5], "model": model}
    request |= {"half": others["gpu"], "roofline": {"bfloat16": 1, "float32": 1, "bytes": 1}}
    trainer = {"loss": {"type": "default"}} | others.pop("trainer")
    return request | {"trainer": trainer} | others


def planned(request: dict[str, Any]) -> float:
    """GiB, by ``prime_rl_plan.measure``."""
    command = [sys.executable, "-m", "prime_rl_plan.measure"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # its tensors lie on the CPU
    text = json.dumps(request)
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    peaks = json.loads(done.stdout.splitlines()[-1])["peaks"]
    inside = [peak["total"] for region, peak in peaks.items() if region != "between steps"]
    return float(max(inside)) / GIB


def measured(name: str) -> float:
    """GiB of the real step of a shape, in a process of its own."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.plan", name]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.splitlines()[-1])


def real(name: str) -> float:
    """GiB of the second step of a shape, here: two rows, as plan takes them."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.memory import memory
    from prime_rl.config.trainer import TrainerConfig
    from prime_rl.plugins.hookspecs import TRAINER_GROUP
    from prime_rl.registry.components import Components
    from prime_rl.registry.manager import load_plugins
    from prime_rl.registry.offers import make_kernel
    from prime_rl.trainer.loop import Trainer
    from prime_rl_plan.measure import SHORT, lengths_of, make_row, with_layers

    torch.set_num_threads(1)
    request = cpu_request(name)
    hooks = load_plugins(TRAINER_GROUP)
    config = TrainerConfig(device="cpu", **request["trainer"])
    losses = Components.load(config, hooks)
    warm_up(config, losses, make_kernel(config, hooks))
    before = memory("VmRSS")
    table = request["model"]
    model = AutoModelForCausalLM.from_config(with_layers(table, table["num_hidden_layers"])).eval()
    trainer = Trainer(model, losses, config, 10, kernel=make_kernel(config, hooks))
    full = lengths_of(request["row_tokens"], request["seq_len"])
    short, row = (
        make_row(each, table["vocab_size"], component="rl", streams=()) for each in (SHORT, full)
    )
    trainer.train_step(1, [short])
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # reset the peak
    trainer.train_step(2, [short, row])
    return (memory("VmHWM") - before) / 1024


def warm_up(config: Any, losses: Any, kernel: Any) -> None:
    """Load the libraries that a step needs."""
    from transformers import AutoModelForCausalLM

    from prime_rl.trainer.loop import Trainer
    from prime_rl_plan.measure import SHORT, make_row, with_layers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    tiny = with_layers(QWEN3 | sizes | heads | {"tie_word_embeddings": True}, 2)
    model = AutoModelForCausalLM.from_config(tiny).eval()
    trainer = Trainer(model, losses, config, 10, kernel=kernel)
    trainer.train_step(1, [make_row(SHORT, 512, component="rl", streams=())])


def main() -> None:
    """Print both tables."""
    print(f"{'CPU, GiB':<32}{'measured':>10}{'plan':>8}{'ratio':>8}")
    for name in SHAPES:
        figures = measured(name)
        foreseen = planned(cpu_request(name))
        print(f"{name:<32}{figures:>10.3f}{foreseen:>8.3f}{foreseen / figures:>8.2f}", flush=True)
        key = name.partition(",")[0].replace(" ", "_")
        record(f"plan.{key}.measured", figures, "GiB")
        record(f"plan.{key}.plan", foreseen, "GiB")
    print(f"\n{'GPU, GiB':<32}{'upstream':>10}{'plan':>8}{'ratio':>8}")
    for name, (model, ranks, tokens, trainer, upstream) in PUBLISHED.items():
        foreseen = planned(gpu_request(model, ranks, tokens=tokens, trainer=trainer))
        print(f"{name:<32}{upstream:>10.2f}{foreseen:>8.2f}{foreseen / upstream:>8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(real(sys.argv[1]))
    else:
        main()
