"""Versions appear whole, old ones go, and the exported folder loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl import ConfigError, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.rundir.chat_template import ChatTemplate
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer.model import load_model, model_folder
from prime_rl.trainer.weights import Publisher, export

MakeModel = Callable[..., PreTrainedModel]


def test_a_version_is_written_then_announced(tmp_path: Path, make_model: MakeModel) -> None:
    model, publisher = make_model(), Publisher(tmp_path / "broadcasts", keep=2)
    publisher.write(model, 3)
    assert [path.name for path in publisher.path(3).iterdir()] == ["model.safetensors"]
    publisher.announce(3)
    assert (tmp_path / "broadcasts/step_3/STABLE").stat().st_size == 0
    tensors = load_file(publisher.path(3) / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied
    assert tensors.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], parameter)


def test_published_weights_are_rounded_but_for_a_checkpoint(
    tmp_path: Path, make_qwen3: MakeModel
) -> None:
    model, publisher = make_qwen3(), Publisher(tmp_path, keep=2, dtype="bfloat16")
    publisher.write(model, 1)
    publisher.write(model, 2, exact=True)
    rounded, exact = (load_file(publisher.path(n) / "model.safetensors") for n in (1, 2))
    for name, parameter in model.named_parameters():
        assert exact[name].equal(parameter)
        assert rounded[name].dtype == torch.bfloat16
        assert rounded[name].equal(parameter.bfloat16())
    # Halfway between two bfloat16 numbers: to the one whose last bit is 0, as engines round.
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    with torch.no_grad():
        model.model.norm.weight[:3] = halfway
    publisher.write(model, 3)
    found = load_file(publisher.path(3) / "model.safetensors")["model.norm.weight"][:3]
    assert found.tolist() == [1.0, 1 + 4 * 2**-8, -1.0]
    assert publisher.size(2) > 1.8 * publisher.size(3)


def test_what_engines_keep_in_single_precision_is_not_rounded(
    tmp_path: Path, make_qwen3: MakeModel
) -> None:
    model = make_qwen3()
    model._keep_in_fp32_modules_strict = {"input_layernorm", "mlp.*_proj"}
    model.register_buffer("counts", torch.arange(3))
    publisher = Publisher(tmp_path, keep=1, dtype="bfloat16")
    publisher.write(model, 1)
    found = load_file(publisher.path(1) / "model.safetensors")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    ends = ("input_layernorm", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")
    assert kept == {f"model.layers.{n}.{end}.weight" for n in (0, 1) for end in ends}
    assert found["counts"].tolist() == [0, 1, 2]
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_an_untied_head_is_published(tmp_path: Path, make_model: MakeModel) -> None:
    publisher = Publisher(tmp_path, keep=1)
    publisher.write(make_model(tie_word_embeddings=False), 1)
    assert "lm_head.weight" in load_file(publisher.path(1) / "model.safetensors")


def test_the_last_versions_are_kept(tmp_path: Path, make_model: MakeModel) -> None:
    model, publisher = make_model(), Publisher(tmp_path, keep=2)
    for version in (1, 2, 3):
        publisher.write(model, version)
        assert (publisher.path(version - 1) / "STABLE").exists() or version == 1
        publisher.announce(version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_what_a_dead_trainer_left_is_replaced(tmp_path: Path, make_model: MakeModel) -> None:
    (tmp_path / ".step_1").mkdir()
    (tmp_path / ".step_1/model.safetensors").write_text("half")
    (tmp_path / "step_1").mkdir()
    publisher = Publisher(tmp_path, keep=2)
    publisher.write(make_model(), 1)
    assert load_file(publisher.path(1) / "model.safetensors")


def test_a_refusing_disk_says_what_and_where(tmp_path: Path, make_model: MakeModel) -> None:
    (tmp_path / "broadcasts").touch()  # not a folder
    publisher = Publisher(tmp_path / "broadcasts", keep=2)
    with pytest.raises(WeightsError, match=r"cannot write weights version 1 to .*step_1.*GiB"):
        publisher.write(make_model(), 1)


def test_the_exported_folder_loads_and_has_the_tokenizer(
    tmp_path: Path, model_dir: Path, make_model: MakeModel
) -> None:
    (model_dir / ".ready").touch()
    model = load_model(model_dir, TrainerConfig(device="cpu"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    export(model, model_dir, tmp_path / "weights")
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert ".ready" not in names  # that one is about making the first model
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert loaded.dtype == torch.float32
    ids = torch.tensor([[1, 2, 3]])
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_the_exported_folder_has_the_chat_template_of_the_run(
    tmp_path: Path, model_dir: Path, make_model: MakeModel
) -> None:
    (model_dir / "chat_template.jinja").write_text("the model's own")
    (tmp_path / "configs").mkdir()
    ChatTemplate("the run's", None).write(tmp_path)
    export(make_model(), model_dir, tmp_path / "weights")
    assert (tmp_path / "weights/chat_template.jinja").read_text() == "the run's"
    ChatTemplate(None, None).write(tmp_path)
    export(make_model(), model_dir, tmp_path / "again")
    assert (tmp_path / "again/chat_template.jinja").read_text() == "the model's own"


def make_launch(model_path: str, wait_for_model: bool = False) -> Launch:
    return Launch(
        model_path=model_path,
        wait_for_model=wait_for_model,
        served_model_name="",
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
    )


def test_a_plain_folder_is_not_waited_for(model_dir: Path) -> None:
    assert not (model_dir / ".ready").exists()
    assert model_folder(make_launch(str(model_dir)), Status(None)) == model_dir


def test_a_folder_in_the_making_is_waited_for(tmp_path: Path) -> None:
    status, folder = Status(None), tmp_path / "policy"

    def finish() -> None:
        while status.last.waiting_for != "model folder policy":
            time.sleep(0.005)
        folder.mkdir()
        (folder / ".ready").touch()

    maker = threading.Thread(target=finish)
    maker.start()
    assert model_folder(make_launch(str(folder), wait_for_model=True), status) == folder
    maker.join()


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(WeightsError, match=r"folder nowhere/nothing is not there"):
        model_folder(make_launch("nowhere/nothing"), Status(None))


def test_a_folder_that_lacks_weights_is_refused(model_dir: Path) -> None:
    from safetensors.torch import save_file

    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks 1 of the policy's weights.*model\.norm\.weight"):
        load_model(model_dir, TrainerConfig(device="cpu"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot load the policy from"):
        load_model(tmp_path, TrainerConfig(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        load_model(model_dir, TrainerConfig(device="cuda"))


def test_weights_stay_in_single_precision_whatever_computes(model_dir: Path) -> None:
    model = load_model(model_dir, TrainerConfig(device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
