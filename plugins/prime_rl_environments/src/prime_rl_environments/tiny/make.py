"""Create the tiny policy: weights, warm-up, folder. Imports torch; runs in a separate process.

The supervised sequences have exactly the tokens that the Qwen3 renderer gives them in a rollout:

    <|im_start|> user\\n  w o r d  <|im_end|> \\n <|im_start|> assistant\\n | d r o w <|im_end|>
    --------------------------- prompt ---------------------------------- | --- trained ---

Shapes: B = words of a batch, T = tokens of the longest sequence, A = answer tokens of the batch, V
= vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from prime_rl import RunError
from prime_rl_environments.tiny import Recipe, TinyReverseConfig
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_environments.words import words

Progress = Callable[[str, float], None]
IGNORE = -100
"""Label of a position that is not trained."""
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""The renderer's text after the generation prompt when thinking is disabled."""
WINDOW = 6
"""Batches over which the share of exact answers is averaged: 384 unseen words."""


def make_model(
    config: TinyReverseConfig, recipe: Recipe, directory: Path, *, seed: int, progress: Progress
) -> None:
    """Build, warm up and save; ``directory`` is complete once ``.ready`` is in it."""
    progress("building the model", 0.0)
    torch.set_num_threads(1)  # two spinning threads are slower than one at this size
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer, seed)
    report = warm_up(model, tokenizer, config=config, recipe=recipe, seed=seed, progress=progress)
    save(model, tokenizer, directory=directory, report=report)
    progress("ready", 1.0)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A float32 Qwen3 with random weights. The head is not tied, which makes the warm-up faster."""
    torch.manual_seed(seed)
    architecture = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    architecture._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(architecture)


def encode_pair(
    tokenizer: PreTrainedTokenizerFast, word: str, thinking: bool = True
) -> tuple[list[int], list[int]]:
    """``(prompt, answer)`` in token ids, as in a rollout on this word.

    ``thinking`` is the renderer's ``enable_thinking``: if off, the prompt ends in an empty thought.
    """
    prompt = f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n"
    prompt += "" if thinking else NO_THOUGHT
    answer = f"{word[::-1]}<|im_end|>"
    ids: list[list[int]] = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    return ids[0], ids[1]


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, batch: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``labels``, each [B, T - 1]: right-padded, labels shifted, prompts ignored.

    Thinking is off in every second prompt, so that the policy knows the prompts of both settings of
    the renderer. With a setting that it has not seen it scores 0.03 instead of 0.5.
    """
    pairs = [encode_pair(tokenizer, word, row % 2 == 0) for row, word in enumerate(batch)]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(batch), longest), int(tokenizer.pad_token_id or 0))
    labels = torch.full((len(batch), longest), IGNORE)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)

    return ids[:, :-1], labels[:, :-1]


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: TinyReverseConfig,
    recipe: Recipe,
    *,
    seed: int,
    progress: Progress,
) -> dict[str, float]:
    """Supervised steps until ``warmup_exact`` of the words of the last ``WINDOW`` batches are
    exactly right. Raises ``RunError`` after ``Recipe.warmup_max_steps``.

    Every batch has new words, so its accuracy before the update is an evaluation at no cost.
    """
    optimizer = build_optimizer(model, recipe)
    shares: deque[float] = deque(maxlen=WINDOW)
    stream = words(seed, "train", min_letters=config.min_letters, max_letters=config.max_letters)
    for step in range(1, recipe.warmup_max_steps + 1):
        set_learning_rate(optimizer, recipe, step)
        batch = list(islice(stream, recipe.warmup_batch_size))
        right = supervised_step(model, optimizer, *encode_batch(tokenizer, batch))
        shares.append(float(right.float().mean()))
        exact = sum(shares) / len(shares)
        progress("warming up the model", share_done(step / 65, exact, config.warmup_exact))
        if len(shares) == WINDOW and exact >= config.warmup_exact:
            return {"steps": step, "exact": exact}

    raise RunError(
        f"tiny-reverse: after {recipe.warmup_max_steps} supervised steps {exact:.2f} of the words "
        f"are right; expected {config.warmup_exact:.2f}. Lower "
        "model.warmup_exact."
    )


def build_optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=recipe.warmup_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """A linear ramp to ``warmup_lr``, then flat."""
    for group in optimizer.param_groups:
        group["lr"] = recipe.warmup_lr * min(1.0, step / max(1, recipe.warmup_ramp_steps))


def share_done(steps: float, exact: float, target: float) -> float:
    """Progress for display: half from the usual number of steps, half from the accuracy."""
    return min(0.99, 0.5 * min(1.0, steps) + 0.5 * min(1.0, exact / max(target, 1e-6)))


def supervised_step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """One update. Returns whether each row is exactly right: [B]."""
    right = backward(model, ids, labels)
    update(model, optimizer)
    return right


def backward(
    model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor, weight: float = 1.0
) -> torch.Tensor:
    """Add ``weight`` times the gradient of the mean cross-entropy over trained tokens.

    Returns whether every trained token of a row is the argmax, as in greedy decoding: [B].
    """
    selected = labels != IGNORE  # [B, T]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[selected])  # [A, V]: prompts need no logits
    loss = F.cross_entropy(logits, labels[selected]) * weight
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    right = ~selected
    right[selected] = logits.argmax(-1) == labels[selected]
    return right.all(dim=1)


def update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Step with the accumulated gradient, clipped to norm 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    report: Mapping[str, object],
) -> None:
    """Write to a temporary folder, move the files to ``directory``, and add ``.ready`` last."""
    disable_progress_bar()
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "warmup.json").write_text(json.dumps(report), "utf-8")
    directory.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        file.replace(directory / file.name)
    staging.rmdir()
    (directory / ".ready").touch()
