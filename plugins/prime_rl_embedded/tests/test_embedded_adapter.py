"""LoRA adapters in a weight update: base plus adapter, never added twice, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_rl import WeightsError
from prime_rl_embedded.testing import Served, write_model
from prime_rl_embedded.weights import read_weights
from prime_rl_engine_kit.model_files import ModelFiles

PROMPT = [11, 22, 33, 44]
LENGTH = 12
FILE = "adapter_model.safetensors"


def write_adapter(base: Path, folder: Path, seed: int) -> Path:
    """A random adapter, large enough to change the sampled tokens."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    path = folder / FILE
    save_file(load_file(path), path, metadata={"base": ModelFiles(base).fingerprint()})
    return folder


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(model_folder, folder / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def back_to_the_first_weights(server: Served, model_folder: Path) -> Iterator[None]:
    yield
    assert server.update_weights(model_folder, version=0).status_code == 200


def sampled(server: Served) -> tuple[list[int], list[float], str]:
    """Greedy tokens, their logprobs, and the version that sampled them."""
    choice = server.generate(PROMPT, temperature=0, max_tokens=LENGTH, logprobs=0)["choices"][0]
    (span,) = choice["weight_versions"]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], found, span["version"]


@torch.no_grad()
def check(server: Served, model: Any, version: str) -> list[int]:
    """The server samples the model's tokens, with logprobs equal to 1e-5."""
    tokens, found, served = sampled(server)
    logits = model(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert served == version
    # Greedy logprobs are those of the distribution at temperature 1.
    assert tokens == expected.argmax(-1).tolist()
    assert found == pytest.approx(expected.max(-1).values.tolist(), abs=1e-5)
    return tokens


def with_adapter(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def test_an_adapter_gives_the_tokens_of_peft_and_a_second_one_replaces_it(
    server: Served, model_folder: Path, adapters: list[Path], reference: Any
) -> None:
    seen = [check(server, reference, "0")]
    for version, adapter in ((1, adapters[0]), (2, adapters[1]), (3, adapters[1])):
        assert server.update_weights(adapter, version=version).status_code == 200
        seen.append(check(server, with_adapter(model_folder, adapter), str(version)))
    assert seen[2] == seen[3]
    assert seen[0] != seen[1] != seen[2]
    assert server.metric("prime_rl:policy_version") == 3


def test_after_a_whole_model_an_adapter_is_still_added_to_the_base(
    server: Served, model_folder: Path, adapters: list[Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1, tie_word_embeddings=True)
    assert server.update_weights(other, version=1).status_code == 200
    assert server.update_weights(adapters[0], version=2).status_code == 200
    check(server, with_adapter(model_folder, adapters[0]), "2")


def cut_off(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-1])


def missing_half(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    save_file(tensors, folder / FILE)


def of_another_base(folder: Path) -> None:
    save_file(load_file(folder / FILE), folder / FILE, metadata={"base": "0123456789abcdef"})


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_off, "adapter_model.safetensors: can't be read"),
        (missing_half, "down_proj.lora_A.weight is missing"),
        (of_another_base, "the adapter was trained on the base 0123456789abcdef"),
        (without_config, "adapter_config.json: can't be read"),
    ],
)
def test_a_bad_adapter_is_refused_and_the_previous_one_stays(
    server: Served,
    model_folder: Path,
    adapters: list[Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    assert server.update_weights(adapters[0], version=1).status_code == 200
    before = sampled(server)
    damage(write_adapter(model_folder, tmp_path / "bad", 5))
    answer = server.update_weights(tmp_path / "bad", version=2)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert reason in message and "still serving version 1" in message
    assert sampled(server) == before


def test_an_adapter_whose_base_is_not_a_folder_is_refused(
    adapters: list[Path], reference: Any
) -> None:
    class Hub:
        name_or_path = "somebody/some-model"

    with pytest.raises(WeightsError, match=r"its base 'somebody/some-model' is not a folder"):
        read_weights(adapters[0], Hub())
