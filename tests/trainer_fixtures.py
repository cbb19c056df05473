"""A tiny Qwen3 with random weights, and micro batches to feed it.

Tests are imported without a package, so what they share comes as fixtures that are functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prime_rl import Kernel, Loss, LossInputs, LossOutputs, OptimizerMaker
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel, make_optimizer
from prime_rl.wire import MicroBatch

VOCAB = 61


def kernel_of(config: TrainerConfig) -> Kernel:
    """The installed kernel that a run with this config has."""
    return make_kernel(config, load_plugins(TRAINER_GROUP))


def maker_of(config: TrainerConfig) -> OptimizerMaker:
    """What makes the optimizer of a run with this config."""
    return make_optimizer(config.optim, load_plugins(TRAINER_GROUP))


class Ratio(Loss):
    """-A * exp(t - i)"""

    name = "ratio"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Two layers of 32, with weights large enough that context matters."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def make_qwen3() -> Callable[..., Qwen3ForCausalLM]:
    """The tiny model as Hugging Face has it, seeded."""
    return tiny_qwen3


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """The tiny model in double precision for exact comparisons."""

    def make(attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
        tiny = tiny_qwen3(**changes).double()
        tiny.set_attn_implementation(attention)
        return tiny

    return make


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The tiny model as a complete folder."""
    directory = tmp_path / "model"
    tiny_qwen3().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def pack_documents(
    documents: Sequence[Sequence[int]],
    *,
    prompt: int = 1,
    temperatures: Sequence[float] | None = None,
    envs: Sequence[str] = ("a",),
    env_ids: Sequence[int] | None = None,
    **streams: Any,
) -> MicroBatch:
    """Documents end to end; each one's tokens after its first ``prompt`` were sampled."""
    lengths = np.array([len(document) for document in documents], np.int32)
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    given = {name: np.asarray(column, np.float32) for name, column in streams.items()}
    return MicroBatch(
        token_ids=np.concatenate([np.asarray(d, np.int32) for d in documents]),
        loss_mask=mask,
        inference_logprobs=given.pop("inference_logprobs", np.where(mask, -1.5, 0).astype("f4")),
        sequence_lengths=lengths,
        temperatures=np.asarray(temperatures or [1.0] * len(documents), np.float32),
        env_ids=np.asarray(env_ids or [0] * len(documents), np.uint16),
        envs=tuple(envs),
        **({"advantages": mask.astype(np.float32)} | given),
    )


def random_documents_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


@pytest.fixture
def pack() -> Callable[..., MicroBatch]:
    """Documents to a micro batch."""
    return pack_documents


@pytest.fixture
def random_documents() -> Callable[..., list[list[int]]]:
    """Lengths to documents of random tokens."""
    return random_documents_of


@pytest.fixture
def batches() -> list[MicroBatch]:
    """Ten micro batches, unlike each other."""
    return [pack_documents(random_documents_of([9, 5], seed=seed)) for seed in range(10)]
