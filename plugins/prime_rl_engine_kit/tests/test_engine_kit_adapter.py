"""Merging an adapter into its base equals PEFT's merge; a bad adapter is refused at once."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prime_rl import WeightsError
from prime_rl_engine_kit.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    is_adapter,
    merge,
    merged_tensors,
)
from prime_rl_engine_kit.model_files import ModelFiles

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def write_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).save_pretrained(folder)
    return folder


def write_adapter(base: Path, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A random adapter saved by peft; the tensors of peft's own merge."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tied modules
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            LoraConfig(**(settings | changes)),
        )
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
        merged = model.merge_and_unload()
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    write_adapter(base, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_sum_is_w_plus_alpha_over_r_times_b_a() -> None:
    """[1 2; 3 4] + 6/2 * [1; 2] [10 1]: B A = [10 1; 20 2]."""
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    merged = merge(w, torch.tensor([[10.0, 1.0]]), torch.tensor([[1.0], [2.0]]), 6 / 2)
    assert merged.tolist() == [[31.0, 5.0], [63.0, 10.0]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear", "r": 7},
        {"modules_to_save": ["norm", "up_proj"]},
        {"target_modules": r"model\.layers\.1\..*_proj"},
        {"layers_to_transform": [1]},
    ],
)
def test_merged_tensors_are_those_of_pefts_own_merge(
    tmp_path: Path, base: Path, changes: dict[str, Any]
) -> None:
    expected = write_adapter(base, tmp_path / "adapter", **changes)
    found = dict(merged_tensors(base, tmp_path / "adapter"))
    assert found.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    before = load_file(base / "model.safetensors")
    assert any(not torch.equal(found[name], before[name]) for name in found)


def test_products_are_computed_where_the_engine_wants_them(base: Path, adapter: Path) -> None:
    """``meta`` stands in for the GPU: a tensor on it was computed there."""
    found = dict(merged_tensors(base, adapter, torch.device("meta")))
    changed = {name for name, tensor in found.items() if tensor.is_meta}
    before = load_file(base / "model.safetensors")
    merged = dict(merged_tensors(base, adapter))
    assert changed == {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed and changed != before.keys()


def test_an_untied_head_may_be_replaced_and_a_tied_one_not(tmp_path: Path, base: Path) -> None:
    untied = write_base(tmp_path / "untied", tie_word_embeddings=False)
    expected = write_adapter(untied, tmp_path / "a", modules_to_save=["lm_head"])
    found = dict(merged_tensors(untied, tmp_path / "a"))
    assert torch.equal(found["lm_head.weight"], expected["lm_head.weight"])
    write_adapter(base, tmp_path / "b", modules_to_save=["lm_head"])
    with pytest.raises(WeightsError, match=r"'lm_head.weight', which the base .* does not have"):
        merged_tensors(base, tmp_path / "b")
    write_adapter(base, tmp_path / "c", modules_to_save=["embed_tokens"])
    with pytest.raises(WeightsError, match=r"'model.embed_tokens.weight'.*tie_word_embeddings"):
        merged_tensors(base, tmp_path / "c")


def test_a_base_in_halves_is_added_to_in_single_precision(tmp_path: Path, adapter: Path) -> None:
    half = write_base(tmp_path / "half", dtype="bfloat16")
    tensors = {n: t.bfloat16() for n, t in load_file(half / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    found = dict(merged_tensors(half, adapter))
    name = "model.layers.0.self_attn.q_proj.weight"
    parts = load_file(adapter / ADAPTER_WEIGHTS)
    a, b = (parts[f"{Q_PROJ}.lora_{half}.weight"] for half in "AB")
    torch.testing.assert_close(found[name], tensors[name].float() + 3 * (b @ a))
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_a_base_in_shards_merges_to_the_same_and_is_the_same_base(
    tmp_path: Path, base: Path, adapter: Path
) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert ModelFiles(sharded).fingerprint() == ModelFiles(base).fingerprint()
    whole = dict(merged_tensors(base, adapter))
    found = dict(merged_tensors(sharded, adapter))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in found)
    next(sharded.glob("*00002*.safetensors")).unlink()
    with pytest.raises(WeightsError, match=r"00002-of.*can't be read"):
        merged_tensors(sharded, adapter)


def marked(adapter: Path, base: Path) -> None:
    """Have the adapter say which base it is of."""
    path = adapter / ADAPTER_WEIGHTS
    save_file(load_file(path), path, metadata={"base": ModelFiles(base).fingerprint()})


def test_an_adapter_is_never_added_twice(tmp_path: Path, base: Path, adapter: Path) -> None:
    marked(adapter, base)
    merged = dict(merged_tensors(base, adapter))
    folder = tmp_path / "merged"
    folder.mkdir()
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"trained on the base [0-9a-f]{16}, and .*merged is"):
        merged_tensors(folder, adapter)


def test_one_changed_weight_makes_another_base(tmp_path: Path, base: Path) -> None:
    before = ModelFiles(base).fingerprint()
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert ModelFiles(base).fingerprint() != before


def test_a_folder_of_weights_is_a_model_or_an_adapter(base: Path, adapter: Path) -> None:
    assert is_adapter(adapter) and not is_adapter(base)


Tensors = dict[str, torch.Tensor]


def dropped(tensors: Tensors) -> None:
    del tensors[f"{Q_PROJ}.lora_A.weight"]


def dropped_module(tensors: Tensors) -> None:
    for half in "AB":
        del tensors[f"{Q_PROJ}.lora_{half}.weight"]


def unknown(tensors: Tensors) -> None:
    for half in "AB":
        name = f"{Q_PROJ}.lora_{half}.weight"
        tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()


def strange(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.lora_magnitude_vector"] = torch.ones(32)


def wrong_rank(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.lora_A.weight"] = torch.ones(5, 32)


def wrong_shape(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.lora_A.weight"] = torch.ones(4, 33)


def not_finite(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.lora_B.weight"][0, 0] = torch.nan


def emptied(tensors: Tensors) -> None:
    tensors.clear()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (dropped, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is missing"),
        (dropped_module, r"no adapter for 1 of the 4 modules .*'model\.layers\.0\.self_attn\.q_pr"),
        (unknown, r"'model\.layers\.7\.self_attn\.q_proj\.weight', which the base .* does not hav"),
        (strange, r"'base_model.*magnitude_vector' is not a tensor of a LoRA adapter"),
        (wrong_rank, r"lora_A\.weight has shape \[5, 32\], expected rank 4"),
        (wrong_shape, r"q_proj\.weight' \[32, 33\], in the base .* it is \[32, 32\]"),
        (not_finite, r"q_proj\.lora_B\.weight' holds values that aren't finite"),
        (emptied, "there is no tensor in it"),
    ],
)
def test_a_damaged_adapter_is_refused_before_the_first_tensor(
    base: Path, adapter: Path, damage: Callable[[Tensors], None], reason: str
) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    damage(tensors)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    with pytest.raises(WeightsError, match=reason):
        merged_tensors(base, adapter)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which merging .* does not support"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1"),
        ({"r": 0}, "r is 0, expected a positive number"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a positive number"),
        ({"modules_to_save": ["norm"]}, r"no tensor of modules_to_save \['norm'\]"),
    ],
)
def test_an_adapter_of_a_kind_that_cannot_be_merged_is_refused(
    base: Path, adapter: Path, change: dict[str, Any], reason: str
) -> None:
    path = adapter / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightsError, match=reason):
        merged_tensors(base, adapter)


def test_half_an_adapter_is_refused(base: Path, adapter: Path) -> None:
    whole = (adapter / ADAPTER_WEIGHTS).read_bytes()
    (adapter / ADAPTER_WEIGHTS).write_bytes(whole[:-9])
    with pytest.raises(WeightsError, match=r"adapter_model.safetensors: can't be read"):
        merged_tensors(base, adapter)
    (adapter / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(WeightsError, match=r"adapter_config.json: can't be read"):
        merged_tensors(base, adapter)
    (adapter / ADAPTER_CONFIG).unlink()
    assert is_adapter(adapter)
    with pytest.raises(WeightsError, match=r"adapter_config.json: can't be read"):
        merged_tensors(base, adapter)


def test_importing_it_brings_in_neither_torch_nor_safetensors() -> None:
    code = (
        "import sys, prime_rl_engine_kit.adapter; "
        "print({'torch', 'safetensors'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_safetensors_reads_the_offsets_that_we_do(base: Path) -> None:
    """The fingerprint's own reading of the format, against the library's."""
    files = ModelFiles(base)
    with safe_open(base / "model.safetensors", framework="pt") as file:
        for name, entry in files.tensors.items():
            raw = entry.path.read_bytes()[entry.start : entry.end]
            tensor = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(entry.shape)
            assert torch.equal(tensor, file.get_tensor(name))
