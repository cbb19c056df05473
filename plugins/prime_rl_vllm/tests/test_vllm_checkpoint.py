"""New weights are read and checked as a whole before vLLM gets any of them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl import WeightsError
from prime_rl.trainer.published import Publisher, published_pieces, published_tensors
from prime_rl.weights.tensors import header_of
from prime_rl_engine_kit.model_files import ModelFiles
from prime_rl_vllm.checkpoint import Announced, Staged, check_layout

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.up.weight"


def write(folder, tied=True, **tensors):
    """A folder with a model of two matrices; a tensor of None is left out."""
    folder.mkdir(exist_ok=True)
    made = {EMBEDDING: torch.ones(4, 2), UP: torch.full((3, 2), 2.0)}
    made = {k: v for k, v in (made | tensors).items() if v is not None}
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return folder


@pytest.fixture
def base(tmp_path):
    return ModelFiles(write(tmp_path / "base"))


def refusal(folder, base):
    with pytest.raises(WeightsError) as caught:
        Staged(folder, base)
    return str(caught.value)


def test_a_folder_that_fits_gives_its_tensors(tmp_path, base):
    staged = Staged(write(tmp_path / "new", **{UP: torch.full((3, 2), 5.0)}), base)
    found = dict(staged.tensors())
    assert sorted(found) == [EMBEDDING, UP]
    assert found[UP].tolist() == [[5.0, 5.0]] * 3


def test_the_files_may_be_deleted_before_they_are_loaded(tmp_path, base):
    staged = Staged(write(tmp_path / "new"), base)
    shutil.rmtree(tmp_path / "new")
    assert dict(staged.tensors())[UP].tolist() == [[2.0, 2.0]] * 3


def test_a_mixture_of_experts_is_taken_as_the_trainer_publishes_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    base, publisher = ModelFiles(tmp_path / "base"), Publisher(tmp_path, keep=1)
    publisher.write(model, 1)
    staged = dict(Staged(publisher.path(1), base).tensors())
    down = model.model.layers[0].mlp.experts.down_proj
    assert staged["model.layers.0.mlp.experts.2.down_proj.weight"].equal(down[2])
    tensors = published_tensors(model)
    check_layout(Announced(header_of(tensors, {}, published_pieces(model, tensors))), base)
    with pytest.raises(WeightsError, match="missing"):  # as the model names them
        check_layout(Announced(header_of(tensors, {})), base)


def test_a_missing_tensor_is_named(tmp_path, base):
    assert "'model.up.weight' missing; the model has 2" in refusal(
        write(tmp_path / "new", **{UP: None}), base
    )


def test_an_unknown_tensor_is_named(tmp_path, base):
    assert "'model.down.weight' not in" in refusal(
        write(tmp_path / "new", **{"model.down.weight": torch.ones(1)}), base
    )


def test_another_shape_is_named_with_both(tmp_path, base):
    message = refusal(write(tmp_path / "new", **{UP: torch.ones(2, 3)}), base)
    assert "'model.up.weight' has shape [2, 3], the model's has [3, 2]" in message


def test_integer_tensors_are_refused(tmp_path, base):
    message = refusal(write(tmp_path / "new", **{UP: torch.ones(3, 2, dtype=torch.int32)}), base)
    assert "'model.up.weight' is I32, the model's is F32" in message


def test_another_precision_is_fine(tmp_path, base):
    Staged(write(tmp_path / "new", **{UP: torch.ones(3, 2, dtype=torch.bfloat16)}), base)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, base, value):
    folder = write(tmp_path / "new", **{UP: torch.full((3, 2), value)})
    assert "'model.up.weight' contains values that aren't finite" in refusal(folder, base)
    Staged(folder, base, look_inside=False)


def test_a_truncated_file_is_refused(tmp_path, base):
    folder = write(tmp_path / "new")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "can't be read" in refusal(folder, base)


def test_a_missing_shard_is_refused(tmp_path, base):
    folder = write(tmp_path / "new")
    index = {"weight_map": {EMBEDDING: "model.safetensors", UP: "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in refusal(folder, base)


def test_an_empty_folder_is_refused(tmp_path, base):
    assert "no model*.safetensors" in refusal(tmp_path, base)


def test_a_tied_head_is_accepted_if_it_equals_the_embedding(tmp_path, base):
    same = write(tmp_path / "same", **{HEAD: torch.ones(4, 2)})
    assert sorted(dict(Staged(same, base).tensors())) == [EMBEDDING, UP]
    other = write(tmp_path / "other", **{HEAD: torch.zeros(4, 2)})
    assert "one tied parameter, but differ" in refusal(other, base)


def test_an_untied_head_must_be_there(tmp_path):
    base = ModelFiles(write(tmp_path / "base", tied=False, **{HEAD: torch.ones(4, 2)}))
    assert "'lm_head.weight' missing" in refusal(write(tmp_path / "new", tied=False), base)
