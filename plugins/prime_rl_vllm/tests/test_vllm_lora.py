"""vLLM with ``enable_lora`` serves the trainer's adapter beside the base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, SETTINGS

from prime_rl import WeightsError
from prime_rl_devkit.engines import EngineSubject, checkpoints, started
from prime_rl_devkit.engines.weights import gap_to
from prime_rl_vllm import Vllm, VllmConfig
from prime_rl_vllm.lora import check_native

GAP = 1e-3
"""Of a logprob from that of the merged weights in transformers."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    settings = SETTINGS | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    engine = Vllm(VllmConfig.model_validate(settings))
    with started(engine, tmp_path_factory.mktemp("lora"), python=PYTHON) as subject:
        subject.meet()
        yield subject


def adapter(server: EngineSubject, name: str, seed: int) -> tuple[Path, Path]:
    """An adapter, and the model with it merged in."""
    folder, whole = server.new_folder(name), server.new_folder(f"{name}-merged")
    checkpoints.write_adapter(server.model_folder, folder, seed=seed)
    return folder, checkpoints.merged(server.model_folder, folder, whole)


@pytest.mark.vllm
def test_the_adapter_gives_the_logprobs_of_the_merged_weights(server: EngineSubject) -> None:
    """One after the other, in place: neither adds to the one before, nor stays in a cache."""
    assert gap_to(server, server.model_folder, 0) < GAP  # without an adapter: the base
    for number, seed in enumerate((2, 3, 2)):
        folder, whole = adapter(server, f"adapter{number}", seed)
        server.update(folder)
        shutil.rmtree(folder)  # the trainer deletes old versions
        assert gap_to(server, whole, number) < GAP
        assert gap_to(server, server.model_folder, number) > 10 * GAP


@pytest.mark.vllm
def test_text_routes_use_the_adapter(server: EngineSubject) -> None:
    folder, whole = adapter(server, "text", 5)
    server.update(folder)
    prompt = list(range(20, 60))
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    body |= {"temperature": 0.0, "logprobs": 1}
    answer = server.ok(server.http.post("/v1/completions", json=body, headers=server.headers()))
    (found,) = answer["choices"][0]["logprobs"]["token_logprobs"]
    logits = server.reference(whole).logits([*prompt, 0])
    assert abs(found - float(torch.log_softmax(logits[len(prompt) - 1], -1).max())) < GAP


@pytest.mark.vllm
def test_a_whole_model_and_a_broken_adapter_are_refused(server: EngineSubject) -> None:
    folder, whole = adapter(server, "kept", 4)
    server.update(folder)
    before = server.version
    answer = server.load(whole)
    assert answer.status_code == 400 and "Leave enable_lora out" in answer.text
    wrong = checkpoints.write_adapter(server.model_folder, server.new_folder("wrong"), rank=5)
    assert server.load(wrong).status_code == 400 and server.version == before
    assert gap_to(server, whole, 9) < GAP


def test_what_vllm_cannot_serve_as_an_adapter_is_refused_with_the_way_out(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"r": 32}))
    with pytest.raises(WeightsError, match=r"rank 32, .* 16 at most.*max_lora_rank = 32"):
        check_native(tmp_path, 16)
    check_native(tmp_path, 32)
    config.write_text(json.dumps({"r": 8, "modules_to_save": ["norm"]}))
    with pytest.raises(WeightsError, match=r"trains norm whole.*enable_lora out"):
        check_native(tmp_path, 16)
    config.write_text(json.dumps({"r": 8, "target_parameters": ["experts.down_proj"]}))
    with pytest.raises(WeightsError, match=r"has adapters of experts.*enable_lora out"):
        check_native(tmp_path, 16)
