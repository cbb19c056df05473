"""TRL's ``GRPOTrainer`` on CPU: a step of COMPLETIONS with exactly NEW new tokens each.

    python bench/peer_trl.py MODEL_DIR THREADS COMPLETIONS GROUP LETTERS NEW

Prints one JSON line: {"wall": ..., "cpu": ...}, medians per step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time

MODEL = sys.argv[1]
THREADS, COMPLETIONS, GROUP, LETTERS, NEW = map(int, sys.argv[2:])
os.environ |= {
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
STEPS, SKIP = (24, 6) if COMPLETIONS * NEW < 2000 else (8, 2)


def main() -> None:
    """Train a few steps and time them."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=LETTERS)) for _ in range(2048)]
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, beta=0.0, max_steps=STEPS,
        per_device_train_batch_size=COMPLETIONS, num_generations=GROUP, max_completion_length=NEW,
        learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no", temperature=1.0,
        gradient_checkpointing=False, disable_tqdm=True, generation_kwargs={"min_new_tokens": NEW},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [c.count("e") / max(1, len(c)) for c in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer.add_callback(Clock())
    trainer.train()
    pairs = list(zip(marks[SKIP:], marks[SKIP + 1 :], strict=False))
    print(
        json.dumps(
            {
                "wall": statistics.median(b[0] - a[0] for a, b in pairs),
                "cpu": statistics.median(b[1] - a[1] for a, b in pairs),
            }
        )
    )


main()
