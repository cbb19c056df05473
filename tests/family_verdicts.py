"""Does a model work in the trainer and in the embedded engine? Measured against transformers.

The oracle is transformers alone: one document per forward, its own attention, its own cache. Every
comparison is in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl import PrimeRLError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch
from prime_rl_embedded import model as embedded
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler

ALLOWED = 1e-4
CPU = torch.device("cpu")
LENGTHS = (30, 9, 14, 9)
PROMPT = 5
"""Tokens of each document that train nothing. The second and the last start with the same."""
NEW_TOKENS = 20
HOW = {
    "shared": "works",
    "packed": "works, prompts not shared",
    "apart": "works, documents apart",
}
"""What to say of each ``Packing`` of the trainer."""


def trainer_verdict(folder: Path) -> str:
    """A row of four documents through the trainer: log π and gradients as of each alone."""
    try:
        trainer = _trainer(folder)
    except PrimeRLError as error:
        return _refused(error)
    documents = _documents()
    row = make_row(_pack(documents), CPU, trainer.policy.packing)
    logprobs, *_ = trainer.policy(row)
    trained = logprobs[row.targets]
    (trained * _weights(len(trained))).sum().backward()
    model = _reference(folder)
    # Rows are laid out by length, longest first.
    order = sorted(range(len(documents)), key=lambda index: -len(documents[index]))
    alone = torch.cat([_logprobs(model, documents[index])[PROMPT - 1 :] for index in order])
    (alone * _weights(len(alone))).sum().backward()
    gap = (trained - alone).abs().max().item()
    gradient = _gradient_gap(trainer.model, model)
    assert gap <= ALLOWED, f"log π differs by {gap:.1e}"
    assert gradient <= ALLOWED, f"gradients differ by {gradient:.1e} of the largest one"
    return HOW[trainer.policy.packing.name]


def _trainer(folder: Path) -> Trainer:
    config = TrainerConfig(device="cpu")
    kernel = make_kernel(config, load_plugins(TRAINER_GROUP))
    return Trainer(load_model(folder, config), installed_losses(), config, 1, kernel=kernel)


def _documents() -> list[list[int]]:
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 61, length).tolist() for length in LENGTHS]
    documents[-1][:PROMPT] = documents[1][:PROMPT]
    return documents


def _pack(documents: list[list[int]]) -> MicroBatch:
    mask = np.concatenate([np.arange(len(document)) >= PROMPT for document in documents])
    return MicroBatch(
        token_ids=np.concatenate(documents).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        sequence_lengths=np.array([len(document) for document in documents], np.int32),
        temperatures=np.ones(len(documents), np.float32),
        env_ids=np.zeros(len(documents), np.uint16),
        envs=("a",),
    )


def _weights(count: int) -> Tensor:
    """Another one for each token, of both signs, so that no two tokens can be exchanged."""
    return torch.linspace(-1, 2, count)


def _reference(folder: Path) -> PreTrainedModel:
    """Eager: torch's own attention leaves a cap on scores out."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return cast(PreTrainedModel, model).eval()


def _logprobs(model: Any, document: list[int]) -> Tensor:
    """[T - 1] of the document's second token and those after it."""
    ids = torch.tensor([document])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    chosen: Tensor = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return chosen


def _gradient_gap(ours: Any, reference: Any) -> float:
    """The largest difference, in terms of the largest gradient. A parameter without a gradient
    has one of zeros."""
    found, expected = (
        {name: 0.0 if p.grad is None else p.grad for name, p in model.named_parameters()}
        for model in (ours, reference)
    )
    assert found.keys() == expected.keys()
    gaps = [torch.as_tensor(found[name] - expected[name]).abs().max() for name in found]
    sizes = [torch.as_tensor(each).abs().max() for each in expected.values()]
    return float(torch.stack(gaps).max() / torch.stack(sizes).max())


def engine_verdict(folder: Path) -> str:
    """Greedy answers to three prompts on two slots, as transformers generates them."""
    try:
        served = embedded.load_model(folder, max_len=64)
        scheduler = Scheduler(served, num_slots=2, max_model_len=64)
    except PrimeRLError as error:
        return _refused(error)
    prompts = [list(range(n, n + length)) for n, length in ((1, 3), (20, 9), (10, 30))]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    requests = [Request(prompt, sampling) for prompt in prompts]
    with torch.inference_mode():
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.step()
    model = _reference(folder)
    for request in requests:
        tokens, logprobs = _greedy(model, request.prompt)
        assert request.token_ids == tokens, f"{request.token_ids}, expected {tokens}"
        gap = np.abs(np.subtract(request.logprobs, logprobs)).max()
        assert gap <= ALLOWED, f"logprobs differ by {gap:.1e}"
    return "works"


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    rows = [logits[0].log_softmax(-1) for logits in out.logits]
    return tokens, [row[token].item() for row, token in zip(rows, tokens, strict=True)]


def verdict(judge: Callable[[Path], str], folder: Path) -> str:
    """What ``judge`` says. A model that neither works nor is refused is a defect of ours."""
    try:
        return judge(folder)
    except Exception as error:
        return f"DEFECT: {type(error).__name__}: {error}"


def _refused(error: PrimeRLError) -> str:
    """The part of the message that says what was found."""
    found = re.search(r"(?:can't serve \w+:|Found) (.+?)\. Expected", str(error))
    return f"refused: {found[1] if found else error}"
