"""The policy from its folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from disks import SharedDisk
from transformers import Gemma3Config, LlamaConfig, Phi3Config, Phi3ForCausalLM

from prime_rl import ConfigError, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer import model
from prime_rl.trainer.model import check_positions, load_model, model_folder


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


def test_a_folder_that_the_disk_refuses_to_show_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ready").touch()
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing() as answer:
        monkeypatch.setattr(model.time, "sleep", lambda seconds: answer())
        launch = make_launch(str(tmp_path), wait_for_model=True)
        assert model_folder(launch, Status(None)) == tmp_path
    assert disk.refused


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(WeightsError, match=r"folder nowhere/nothing is not there"):
        model_folder(make_launch("nowhere/nothing"), Status(None))


def test_a_folder_that_lacks_weights_is_refused(model_dir: Path) -> None:
    from safetensors.torch import load_file, save_file

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


def test_weights_stay_in_single_precision_under_autocast(model_dir: Path) -> None:
    model = load_model(model_dir, TrainerConfig(device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -- positions ------------------------------------------------------------------------------------

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
PHI = SHAPE | {"intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_frequencies_of_longrope_change_with_the_longest_document_of_a_call():
    """The reason for the refusal below."""
    config = Phi3Config(
        **PHI, original_max_position_embeddings=8, rope_parameters=LONG, initializer_range=0.5
    )
    model = Phi3ForCausalLM(config).eval()
    tokens, positions = torch.arange(12)[None], torch.tensor([[*range(3), *range(9)]])
    with torch.no_grad():
        alone = model(tokens[:, :3], position_ids=positions[:, :3]).logits[0]
        beside = model(tokens, position_ids=positions).logits[0, :3]
    assert float((alone - beside).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Phi3Config(**PHI, original_max_position_embeddings=8, rope_parameters=LONG), 8),
        (LlamaConfig(**PHI, rope_parameters=DYNAMIC), 64),
    ],
)
def test_samples_beyond_the_length_where_rotary_positions_change_are_refused(config, limit):
    check_positions(config, limit)
    with pytest.raises(ConfigError, match=rf"seq_len: {limit + 1} tokens.*Set seq_len to {limit} "):
        check_positions(config, limit + 1)


def test_other_rotary_positions_have_no_limit():
    check_positions(Phi3Config(**PHI), 1_000_000)
    check_positions(Gemma3Config(), 1_000_000)  # a text config inside, one rope per type of layer
