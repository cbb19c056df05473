"""Versions as files and by a transport, and the exported folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from waiting import Clock

from prime_rl import Header, RunError, TensorInfo, WeightSender, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.model import ChatTemplate
from prime_rl.rundir.chat_template import write_chat_template
from prime_rl.rundir.status import Status
from prime_rl.trainer import publish, published
from prime_rl.trainer.model import load_model
from prime_rl.trainer.publish import Broadcaster, export
from prime_rl.trainer.published import Publisher
from prime_rl.weights.versions import FILES_WANTED, MEMORY, has_files, newest_version

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
    write_chat_template(tmp_path, ChatTemplate("the run's", None))
    export(make_model(), model_dir, tmp_path / "weights")
    assert (tmp_path / "weights/chat_template.jinja").read_text() == "the run's"
    write_chat_template(tmp_path, ChatTemplate(None, None))
    export(make_model(), model_dir, tmp_path / "again")
    assert (tmp_path / "again/chat_template.jinja").read_text() == "the model's own"


class Sender(WeightSender):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}
        self.header: Header = []
        self.fails = False

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        return None if files_wanted() else {"to": directory.name}

    def send(self, order: object, header: Header, tensors: Iterator[torch.Tensor]) -> None:
        if self.fails:
            raise WeightsError("an engine did not come")
        names = [info.name for info in header]
        self.header = header
        self.received = {"order": order, **dict(zip(names, tensors, strict=True))}


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def broadcaster(tmp_path: Path, sender: Sender) -> Broadcaster:
    model: Any = torch.nn.Linear(2, 3)
    return Broadcaster(model, Publisher(tmp_path, keep=2), sender, Status(None))


def test_a_version_is_sent_and_not_written(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    broadcaster.prepare(1, exact=False, last=False)
    assert (tmp_path / "step_1" / MEMORY).exists()
    assert broadcaster.size(1) == (6 + 3) * 4 / 2**20
    broadcaster.pass_on()
    assert sender.header == [TensorInfo("weight", "F32", [3, 2]), TensorInfo("bias", "F32", [3])]
    assert sender.received["order"] == {"to": "step_1"}
    model: Any = broadcaster._model
    assert torch.equal(sender.received["weight"], model.weight)
    assert not has_files(tmp_path / "step_1")


@pytest.mark.parametrize("kept", [{"exact": True, "last": False}, {"exact": False, "last": True}])
def test_a_version_that_is_kept_is_written_and_not_sent(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path, kept: dict[str, bool]
) -> None:
    broadcaster.prepare(1, **kept)
    assert broadcaster.pass_on() == 0.0
    assert has_files(tmp_path / "step_1") and not sender.received


def test_files_are_written_if_an_engine_wants_them(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    broadcaster.prepare(1, exact=False, last=False)
    (tmp_path / FILES_WANTED).touch()
    broadcaster.pass_on()
    assert has_files(tmp_path / "step_1") and not (tmp_path / FILES_WANTED).exists()
    assert not sender.received


def test_files_follow_a_version_that_was_not_delivered(
    broadcaster: Broadcaster, sender: Sender, tmp_path: Path
) -> None:
    sender.fails = True
    broadcaster.prepare(1, exact=False, last=False)
    broadcaster.pass_on()
    assert has_files(tmp_path / "step_1")


def test_a_trainer_that_waits_for_engines_gives_signs_of_life(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may compile for longer than ``recovery.hang_timeout``."""
    clock, beats = Clock(), list[float]()
    monkeypatch.setattr(publish, "time", clock)
    status = Status(tmp_path / "trainer.json")
    monkeypatch.setattr(status, "beat", lambda: beats.append(clock.now))

    def wait(directory: Path, files_wanted: Callable[[], bool]) -> object:
        for _ in range(16):
            assert not files_wanted()
            clock.now += 0.25
        return {"to": directory.name}

    monkeypatch.setattr(sender, "wait", wait)
    model: Any = torch.nn.Linear(2, 3)
    broadcaster = Broadcaster(model, Publisher(tmp_path, keep=2), sender, status)
    broadcaster.prepare(1, exact=False, last=False)
    broadcaster.pass_on()
    assert beats == [1000.0, 1001.0, 1002.0, 1003.0]


def test_a_full_disk_delays_a_version_that_waits_in_memory(
    broadcaster: Broadcaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, touch = [OSError(28, "No space left on device")], Path.touch

    def refuse_once(path: Path) -> None:
        if refusals:
            raise refusals.pop()
        touch(path)

    monkeypatch.setattr(published, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(Path, "touch", refuse_once)
    broadcaster.prepare(1, exact=False, last=False)
    assert (tmp_path / "step_1" / MEMORY).exists() and not refusals


def test_where_no_engine_reads_them_files_are_written_for_checkpoints_and_on_request(
    tmp_path: Path,
) -> None:
    model: Any = torch.nn.Linear(2, 3)
    publisher = Publisher(tmp_path, keep=9)
    broadcaster = Broadcaster(model, publisher, None, Status(None), is_read=False)
    for version, kept in enumerate(({}, {"exact": True}, {"last": True}, {}), start=1):
        broadcaster.prepare(version, **({"exact": False, "last": False} | kept))
        broadcaster.announce(last=False)
        assert newest_version(tmp_path) == version  # the orchestrator goes on
        assert has_files(tmp_path / f"step_{version}") == bool(kept)
        assert (broadcaster.size(version) > 0) == bool(kept)

    assert broadcaster.all_have(True)
    (tmp_path / FILES_WANTED).touch()  # the run is stopped here
    broadcaster.all_have(True)
    assert has_files(tmp_path / "step_4")


def test_weights_that_are_not_finite_are_not_sent(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model()
    sender: Any = object()  # asked for nothing before the weights have been checked
    broadcaster = Broadcaster(model, Publisher(tmp_path, keep=2), sender, Status(None))
    broadcaster.prepare(1, exact=False, last=False)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(RunError, match="weights version 2 hold values that are not finite"):
        broadcaster.prepare(2, exact=False, last=False)
