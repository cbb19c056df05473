"""The policy from its folder; its blocks recomputed or compiled give the same numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Gemma3Config, LlamaConfig, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from prime_rl import ConfigError, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.trainer.model import Policy, check_positions, load_model, model_folder
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl_kernels import blocks as module
from prime_rl_kernels.attention import register
from prime_rl_kernels.blocks import check_compiler, prepare_blocks
from prime_rl_kernels.kernels import Auto, KernelConfig

CPU = torch.device("cpu")
MakeModel = Callable[..., PreTrainedModel]
AUTO = Auto(KernelConfig())


@pytest.fixture
def rows(pack: Any, random_documents: Any) -> list[PackedRow]:
    """Of unlike documents, and one with a shared prompt."""
    first, second = random_documents([9, 9, 5]), random_documents([12, 7, 3, 3])
    shared = [[1, 2, 3, 4], [1, 2, 3, 5, 6]]
    batches = [pack(first), pack(second), pack(shared, prompt=3)]
    return [make_row(batch, CPU, AUTO.packings(CPU)[0]) for batch in batches]


@pytest.fixture
def restore_attention() -> Any:
    yield
    register()


def gradients(model: PreTrainedModel, rows: list[PackedRow], **settings: Any) -> list[Tensor]:
    """Summed over the rows."""
    config = TrainerConfig(device="cpu", **settings)
    policy = Policy(model, config, kernel=AUTO)
    prepare_blocks(model, config.activation_checkpointing, config.compile, CPU)
    for row in rows:
        torch.autograd.backward(policy(row)[0].square().sum())
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_gradients_are_the_same_bit_for_bit(
    make_model: MakeModel, rows: list[PackedRow], every: int
) -> None:
    expected = gradients(make_model("varlen", num_hidden_layers=3), rows)
    found = gradients(
        make_model("varlen", num_hidden_layers=3), rows, activation_checkpointing=every
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_under_autocast_too(make_model: MakeModel, rows: list[PackedRow]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(make_model("varlen").float(), rows)
        found = gradients(make_model("varlen").float(), rows, activation_checkpointing=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_recomputed_blocks_keep_their_input_alone(
    make_model: MakeModel, rows: list[PackedRow]
) -> None:
    def saved(every: int) -> int:
        """Bytes that a forward pass keeps, weights included."""
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        model = make_model("varlen", num_hidden_layers=4)
        config = TrainerConfig(device="cpu", activation_checkpointing=every)
        prepare_blocks(model, config.activation_checkpointing, config.compile, CPU)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            Policy(model, config, kernel=AUTO)(rows[0])
        return sum(sizes)

    kept, half, none = saved(0), saved(2), saved(1)
    assert none < 0.4 * kept
    assert half == pytest.approx((kept + none) / 2, rel=0.01)


def test_names_of_weights_stay(make_model: MakeModel) -> None:
    model = make_model("varlen")
    names = list(model.state_dict())
    prepare_blocks(model, 1, False, CPU)
    assert list(model.state_dict()) == names


def test_preparing_twice_does_it_once(make_model: MakeModel, rows: list[PackedRow]) -> None:
    model, calls = make_model("varlen", num_hidden_layers=1), []
    block = model.model.layers[0]
    block.register_forward_pre_hook(lambda *_: calls.append("outer"))
    block.get_submodule("mlp").register_forward_pre_hook(lambda *_: calls.append("inner"))
    for _ in range(2):
        prepare_blocks(model, 1, False, CPU)
    gradients(model, rows[:1], activation_checkpointing=1)
    assert calls == ["outer", "inner", "inner"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.usefixtures("restore_attention")
def test_compiled_blocks_give_the_same_gradients(
    make_model: MakeModel, rows: list[PackedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed, too. For rows of other documents nothing is compiled again."""
    expected = gradients(make_model("varlen", num_hidden_layers=1).float(), rows)
    counting = CompileCounterWithBackend("inductor")
    monkeypatch.setattr(module.torch, "compile", partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    model = make_model("varlen", num_hidden_layers=1).float()
    settings = {"compile": True, "activation_checkpointing": 1}
    gradients(model, rows[:1], **settings)
    num_graphs = counting.frame_count
    found = gradients(model, rows[1:], **settings)
    assert counting.frame_count == num_graphs > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"trainer\.compile needs a C\+\+ compiler on the path"):
        check_compiler(CPU)


def test_no_triton_is_said_before_training(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/c++")
    with pytest.raises(ConfigError, match=r"trainer\.compile needs triton"):
        check_compiler(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"trainer\.compile needs triton"):  # not there yet
        prepare_blocks(make_model("varlen"), 0, True, torch.device("cuda"))
    check_compiler(CPU)


def test_a_model_without_blocks_is_refused(make_model: MakeModel) -> None:
    model = make_model("varlen")
    model._no_split_modules = None
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM does not say which modules"):
        prepare_blocks(model, 1, False, CPU)


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
