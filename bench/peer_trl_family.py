"""TRL's ``GRPOTrainer`` on the task of ``configs/smollm2/family.toml``: the same prompts, batch,
groups, sampling and learning rate.

    python bench/peer_trl_family.py MODEL_DIR THREADS STEPS

Prints one JSON line: {"wall": ..., "cpu": ..., "rewards": [...]}, medians per step without the
first.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time

MODEL, THREADS, STEPS = sys.argv[1], *map(int, sys.argv[2:])
os.environ |= {
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TASK = "family_relationships"
SETTINGS = {"min_family_size": 3, "max_family_size": 3}


def rows(number: int) -> list[dict[str, object]]:
    """Prompts as our taskset makes them, and their answers."""
    from reasoning_gym_tasks.generators import entry
    from reasoning_gym_tasks.generators import rows as places

    def some(seed: int, count: int) -> list[dict[str, str]]:
        return [
            entry(place)
            for place in itertools.islice(
                places(TASK, SETTINGS, level=None, seed=seed, split="train"), count
            )
        ]

    said = [{"role": "system", "content": "Answer with one word."}]
    for solved in some(-1, 2):
        said.append({"role": "user", "content": solved["question"]})
        said.append({"role": "assistant", "content": solved["answer"]})
    return [
        {"prompt": [*said, {"role": "user", "content": each["question"]}], "answer": each["answer"]}
        for each in some(0, number)
    ]


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for the right word alone."""
    return [
        float(said[0]["content"].strip().lower() == wanted)
        for said, wanted in zip(completions, answer, strict=True)
    ]


def main() -> None:
    """Train a few steps and time them."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(THREADS)
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, beta=0.0, max_steps=STEPS,
        per_device_train_batch_size=16, gradient_accumulation_steps=8, num_generations=16,
        max_completion_length=4, learning_rate=2e-5, warmup_steps=2, logging_steps=1, report_to=[],
        save_strategy="no", temperature=1.0, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=right,
        args=config,
        train_dataset=Dataset.from_list(rows(512)),
        processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
    )
    trainer.add_callback(Clock())
    trainer.train()
    pairs = list(itertools.pairwise(marks))
    figures = {
        "wall": statistics.median(b[0] - a[0] for a, b in pairs),
        "cpu": statistics.median(b[1] - a[1] for a, b in pairs),
        "rewards": [each["reward"] for each in trainer.state.log_history if "reward" in each],
    }
    print(json.dumps(figures))


main()
