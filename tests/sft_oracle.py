"""The loss curve of TRL's SFTTrainer, recorded: what a run of ``[sft]`` is compared with.

To record it again, in an environment of its own (TRL is in ``requirements-bench.txt``):

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r requirements-bench.txt torch
    /tmp/trl/bin/python tests/sft_oracle.py

Model and data are made from seeds here, so that both sides have the same. TRL tokenizes the
conversations by itself, with a template that marks the assistant's tokens.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

RECORDED = Path(__file__).parent / "data" / "sft_trl.json"

STEPS = 24
BATCH_SIZE = 8
LEARNING_RATE = 3e-3
EXAMPLES = 64
VALIDATION = 16

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations(number: int, seed: int) -> list[dict]:
    """Words and their reverse, in one or two turns, half of them with a system prompt."""
    chance = random.Random(seed)
    rows = []
    for index in range(number):
        messages = []
        if index % 2:
            messages.append({"role": "system", "content": "Reverse the word."})
        for _ in range(1 + index % 3 // 2):
            word = "".join(chance.choice("abcdef") for _ in range(chance.randint(2, 6)))
            messages.append({"role": "user", "content": word})
            messages.append({"role": "assistant", "content": word[::-1]})
        rows.append({"messages": messages})
    return rows


def write_data(folder: Path) -> tuple[Path, Path]:
    """Two JSONL files: to train on, and to measure."""
    paths = (folder / "train.jsonl", folder / "validation.jsonl")
    for path, number, seed in zip(paths, (EXAMPLES, VALIDATION), (0, 1), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in conversations(number, seed)))
    return paths


def write_model(folder: Path) -> Path:
    """A model with random weights and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(SPECIAL + letters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def record() -> None:
    """Train with TRL and write its losses."""
    import torch
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        """Takes the data in its order."""

        def _get_train_sampler(self, *args, **settings):
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        train, validation = (
            Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])
            for path in write_data(folder)
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        config = SFTConfig(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=VALIDATION,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.999,
            max_grad_norm=1.0,
            assistant_only_loss=True,
            max_length=128,
            packing=False,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=8,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            seed=0,
        )
        trainer = InOrder(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=config,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
        )
        trainer.train()
        history = trainer.state.log_history

    found = {
        "trl": trl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "loss": {str(row["step"]): row["loss"] for row in history if "loss" in row},
        "validation": {str(row["step"]): row["eval_loss"] for row in history if "eval_loss" in row},
    }
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(found, indent=2) + "\n")
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    record()
