"""A mixture of experts in the real vLLM: new weights reach its experts and its router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PYTHON, SETTINGS
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl import EngineCommand, EngineError, EngineLaunch
from prime_rl_devkit.engines import EngineSubject, started
from prime_rl_devkit.engines.broadcast import TrainerRank
from prime_rl_devkit.engines.checkpoints import changed, read
from prime_rl_devkit.engines.models import MAX_MODEL_LEN, VOCAB_SIZE, write_tokenizer
from prime_rl_vllm import Vllm, VllmConfig

pytestmark = pytest.mark.vllm

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": MAX_MODEL_LEN,
}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    with serving(tmp_path_factory.mktemp("mixture"), SIZES) as subject:
        yield subject


class OfRun(Vllm):
    """As a run starts it: new weights will come."""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        return super().command(replace(launch, weights_roots=(launch.model_path,)))


@contextmanager
def serving(
    folder: Path, sizes: dict[str, Any], kind: type[Vllm] = Vllm
) -> Iterator[EngineSubject]:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    engine = kind(VllmConfig.model_validate(SETTINGS))
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    model_folder = folder / "model"
    with started(engine, folder, model_folder=model_folder, python=PYTHON, env=env) as subject:
        subject.meet()
        yield subject


def gap(mixture: EngineSubject, folder: Path) -> float:
    """The largest difference to transformers' logprobs of the prompt's tokens."""
    reply = mixture.reply(PROMPT, max_tokens=1, prompt_logprobs=0)
    expected = mixture.reference(folder).logits(PROMPT).log_softmax(-1)
    pairs = zip(reply.prompt_logprobs, PROMPT[1:], strict=True)
    return max(abs(row[t] - float(expected[i, t])) for i, (row, t) in enumerate(pairs))


def test_experts_of_a_mixture_get_new_weights(mixture: EngineSubject, tmp_path: Path) -> None:
    """By files and from memory, more than once: a reload of packed experts must not spoil the
    next."""
    assert gap(mixture, mixture.model_folder) < 1e-4
    for number in (1, 2):
        folder = changed(mixture.model_folder, tmp_path / str(number), number)
        mixture.update(folder)
        assert gap(mixture, folder) < 1e-4

    folder = changed(mixture.model_folder, tmp_path / "sent", 3)
    mixture.ok(TrainerRank(mixture).broadcast(read(folder)))
    assert gap(mixture, folder) < 1e-4


def test_vllms_own_reload_spoils_the_experts(mixture: EngineSubject, tmp_path: Path) -> None:
    """Otherwise this part of ``worker.repack`` could be deleted."""
    new = changed(mixture.model_folder, tmp_path / "new", 4)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    try:
        mixture.ok(mixture.admin("/collective_rpc", body))
        theirs = gap(mixture, new)
    finally:
        mixture.restore()
    assert theirs > 0.1
    assert gap(mixture, mixture.model_folder) < 1e-4


def test_weights_that_vllm_could_not_load_are_refused_before_it_begins(tmp_path: Path) -> None:
    """On a CPU it pads experts of this size. The server goes on with the weights that it has."""
    with serving(tmp_path, SIZES | {"moe_intermediate_size": 48}) as padded:
        new = changed(padded.model_folder, tmp_path / "new", 1)
        answer = padded.load(new)
        assert answer.status_code >= 400
        assert "the experts have an intermediate size of 48, which vLLM pads" in answer.text
        padded.resume()
        assert gap(padded, padded.model_folder) < 1e-4


def test_the_engine_of_a_run_refuses_such_a_model_at_the_start(tmp_path: Path) -> None:
    sizes = SIZES | {"moe_intermediate_size": 48}
    with (
        pytest.raises(EngineError, match="the server ended with code 1"),
        serving(tmp_path, sizes, OfRun),
    ):
        pass
    # What a run shows of an engine that has failed.
    last = (tmp_path / "engine.log").read_text().splitlines()[-1]
    assert "the experts have an intermediate size of 48, which vLLM pads" in last
