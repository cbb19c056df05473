"""LoRA in the trainer: the base stays, adapters go out, resume is exact, the export is merged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_training import Frames, PolicyGradient
from transformers import AutoModelForCausalLM

from prime_rl import ConfigError, ConfigWarning, PluginConfig
from prime_rl.config.run import CkptConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_tuning
from prime_rl.rundir.checkpoints import finished, unfinished
from prime_rl.rundir.status import Status
from prime_rl.trainer.checkpoint import Checkpointer, restore
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loop import Trainer, train
from prime_rl.trainer.model import load_model
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.publish import export
from prime_rl.trainer.published import Publisher
from prime_rl.wire import MicroBatch
from prime_rl_engine_kit.adapter import is_adapter, merged_tensors
from prime_rl_engine_kit.model_files import ModelFiles
from prime_rl_lora.model import block_linears
from prime_rl_lora.tuning import Lora, LoraConfig

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def make_trainer(base: Path, adapter: Path | None = None, **lora: Any) -> Trainer:
    config = TrainerConfig.model_validate({"optim": {"lr": 1e-2}, "device": "cpu"})
    tuning = Lora(LoraConfig.model_validate({"rank": 4, "alpha": 8} | lora))
    torch.manual_seed(7)
    model = load_model(base, config, tuning, adapter)
    return Trainer(model, installed_losses().with_rl(PolicyGradient(PluginConfig())), config, 10)


def run(
    trainer: Trainer, run_dir: Path, base: Path, batches: Sequence[MicroBatch], first: int = 1
) -> None:
    """As the process does it, with a checkpoint every five steps."""
    for step in (5, 10):
        if first <= step < first + len(batches):
            unfinished(run_dir, step).orchestrator.mkdir(parents=True)
            unfinished(run_dir, step).progress.write_text("{}")
    checkpointer = Checkpointer(run_dir, CkptConfig(interval=5), base, None)
    trainer.max_steps = first + len(batches) - 1
    frames = Frames(first, [[batch] for batch in batches])
    train(trainer, frames, run_dir, first, Status(None), checkpointer)


def test_only_the_adapter_trains_and_only_it_is_published(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    """Seven linear modules in each of two layers, two matrices each: 28 tensors."""
    trainer = make_trainer(model_dir)
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(trained) == 28 and all(p.shape[0] == 4 or p.shape[1] == 4 for p in trained)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    run(trainer, tmp_path, model_dir, batches[:2])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    folder = tmp_path / "broadcasts" / "step_2"
    assert {path.name for path in folder.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "STABLE")
    }
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 28
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(
        tensors[name], trainer.model.model.layers[1].mlp.down_proj.lora_B.default.weight
    )
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["base"] == ModelFiles(model_dir).fingerprint()
    rounding = Publisher(tmp_path / "rounding", 1, "bfloat16")
    rounding.write(trainer.model, 2)  # engines add it to the base in float32, and round that
    name = "adapter_model.safetensors"
    assert (rounding.path(2) / name).read_bytes() == (folder / name).read_bytes()


def test_the_tensors_of_an_announced_adapter_arrive_after_its_config(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, publisher = make_trainer(model_dir), Publisher(tmp_path, 1)
    publisher.path(1).mkdir()  # as a version that a weight transport keeps in memory
    publisher.announce(1)
    listed, moved, replace = Path.iterdir, [], Path.replace

    def note(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    monkeypatch.setattr(Path, "replace", note)
    publisher.write(trainer.model, 1)
    # Engines load the folder as soon as tensors are in it.
    assert moved == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_is_published_is_the_policy_that_trains(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch], pack: Any
) -> None:
    """Ours merged, and peft's own reading of the folder, give the trainer's logprobs to 1e-5."""
    trainer = make_trainer(model_dir, modules_to_save=["norm"], use_rslora=True)
    run(trainer, tmp_path, model_dir, batches[:3])
    published = tmp_path / "broadcasts" / "step_3"
    documents = [[5, 6, 7, 8, 9, 10]]
    row = make_row(pack(documents), torch.device("cpu"))
    with torch.no_grad():
        ours, _ = token_logprobs(trainer.model, row)
    merged = AutoModelForCausalLM.from_pretrained(model_dir)
    merged.load_state_dict(dict(merged_tensors(model_dir, published)), strict=False)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), published)
    for model in (merged.eval(), theirs.eval()):
        torch.testing.assert_close(ours[1:], logprobs(model, documents[0]), atol=1e-5, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    assert (ours[1:] - logprobs(plain, documents[0])).abs().max() > 0.01


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    chosen: torch.Tensor = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return chosen[:, 0]


def test_a_fresh_adapter_changes_nothing(model_dir: Path, pack: Any) -> None:
    row = make_row(pack([[5, 6, 7, 8, 9, 10]]), torch.device("cpu"))
    plain = load_model(model_dir, TrainerConfig(device="cpu"))
    plain.set_attn_implementation("eager")  # as a trainer without a kernel does
    with torch.no_grad():
        assert torch.equal(
            token_logprobs(make_trainer(model_dir).model, row)[0], token_logprobs(plain, row)[0]
        )


def test_five_steps_and_five_more_after_a_resume_are_ten_bit_for_bit(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    straight = make_trainer(model_dir)
    run(straight, tmp_path / "straight", model_dir, batches)
    run(make_trainer(model_dir), tmp_path / "run", model_dir, batches[:5])
    saved = finished(tmp_path / "run", 5)
    assert is_adapter(saved.weights) and (saved.weights / "tokenizer.json").exists()
    assert not list(saved.directory.rglob("model.safetensors"))
    resumed = make_trainer(model_dir, saved.weights)
    restore(resumed, saved)
    run(resumed, tmp_path / "run", model_dir, batches[5:], first=6)
    expected = dict(straight.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    without = make_trainer(model_dir, saved.weights)  # the optimizer's state makes a difference
    run(without, tmp_path / "without", model_dir, batches[5:], first=6)
    assert any(
        not torch.equal(parameter, expected[name])
        for name, parameter in without.model.named_parameters()
    )


def test_resume_refuses_another_base_or_another_adapter(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    run(make_trainer(model_dir), tmp_path, model_dir, batches[:5])
    saved = finished(tmp_path, 5).weights
    with pytest.raises(ConfigError, match=r"--resume: .*scaling 2, expected 4; 0 tensors"):
        make_trainer(model_dir, saved, alpha=16)
    with pytest.raises(ConfigError, match=r"--resume: .*[0-9]+ tensors of another shape"):
        make_trainer(model_dir, saved, rank=8, alpha=16)
    with pytest.raises(ConfigError, match=r"--resume: .*first 'base_model.*down_proj.lora_A"):
        make_trainer(model_dir, saved, target_modules=["q_proj"])
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"--resume: .*the adapter was trained on the base"):
        make_trainer(model_dir, saved)


def test_the_export_is_a_merged_model_with_the_adapter_beside_it(
    tmp_path: Path, model_dir: Path, batches: list[MicroBatch]
) -> None:
    trainer = make_trainer(model_dir)
    run(trainer, tmp_path, model_dir, batches[:3])
    export(trainer.model, model_dir, tmp_path / "weights")
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "adapter"} <= names
    assert "adapter_config.json" not in names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    theirs = PeftModel.from_pretrained(base, tmp_path / "weights" / "adapter")
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["q_prj"]}, r"no module is called 'q_prj'.*q_proj"),
        ({"target_modules": ["lm_head"]}, r"'lm_head' is a Linear that cannot have an adapter"),
        ({"target_modules": ["embed_tokens"]}, r"'model.embed_tokens' is a Embedding"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]}, r"not in modules_to_save"),
        ({"modules_to_save": ["nrm"]}, r"modules_to_save: no module's name ends with 'nrm'"),
        ({"modules_to_save": ["embed_tokens"]}, r"'embed_tokens' is tied to another matrix"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(
    model_dir: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_trainer(model_dir, **settings)


def test_adapters_go_to_every_linear_module_but_the_head(make_model: Callable[..., Any]) -> None:
    assert block_linears(make_model()) == LINEAR
    assert block_linears(make_model(tie_word_embeddings=False)) == LINEAR
    assert block_linears(make_model(), without=["up_proj"]) == tuple(
        name for name in LINEAR if name != "up_proj"
    )


def test_dropout_is_ignored_with_the_reason() -> None:
    hooks = load_plugins(TRAINER_GROUP)
    with pytest.warns(ConfigWarning, match=r"^trainer.lora.dropout = 0.1 is ignored: .*without"):
        tuning = make_tuning({"lora": {"rank": 3, "dropout": 0.1}}, hooks)
    assert tuning is not None and tuning.config == LoraConfig(rank=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_tuning({"lora": {"dropout": 0.0}}, hooks)  # as a run.json of an earlier version has it
