"""An adapter on each expert of a mixture: the same policy and gradients as with merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from small_training import Frames, PolicyGradient
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl import ConfigError, PluginConfig, WeightsError
from prime_rl.config.run import CkptConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.checkpoints import finished, unfinished
from prime_rl.rundir.status import Status
from prime_rl.trainer.checkpoint import Checkpointer, restore
from prime_rl.trainer.loop import Trainer, train
from prime_rl.trainer.model import load_model
from prime_rl.trainer.publish import export
from prime_rl.trainer.published import Publisher
from prime_rl.wire import MicroBatch
from prime_rl_embedded.weights import apply_weights, read_weights
from prime_rl_engine_kit.adapter import STACKS, merged_tensors
from prime_rl_lora.experts import for_file
from prime_rl_lora.model import add_lora
from prime_rl_lora.tuning import Lora, LoraConfig

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 5]])
FAMILIES = {each.name: each for each in family_models.FAMILIES}
STACKED = ["Qwen3-MoE", "Mixtral", "DeepSeek V3", "GPT-OSS", "Qwen3-Next"]
"""Names of their own in files, a shared expert, and [E, I, O] with biases and a clamped gate."""

RENAMED = ["DeepSeek V3", "Qwen3-Next"]


def adapted(base: Path, seed: int = 3, adapter: Path | None = None, **lora: Any) -> PreTrainedModel:
    """With an adapter that changes the policy much."""
    tuning = Lora(LoraConfig.model_validate({"rank": 3, "alpha": 6, "experts": True} | lora))
    model = load_model(base, TrainerConfig(device="cpu"), tuning, adapter)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and adapter is None:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def logprobs(model: Any) -> Tensor:
    """[T, V] of ``TOKENS``."""
    found: Tensor = model(input_ids=TOKENS, use_cache=False).logits[0].float().log_softmax(-1)
    return found


def halves(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor, ParamWrapper]]:
    """A, B and their wrapper by the parameter's name in a model without adapters."""
    return {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}": (
            module.lora_A["default"].weight, module.lora_B["default"].weight, module,
        )
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }  # fmt: skip


@pytest.mark.parametrize("family", STACKED)
def test_logprobs_and_gradients_are_those_of_weights_merged_in_the_graph(
    tmp_path: Path, family: str
) -> None:
    """W_e + 2 B_e A_e, expert by expert, in transformers' own forward: alpha / r = 6 / 3."""
    FAMILIES[family].write(tmp_path)
    model = adapted(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain.set_experts_implementation("eager")
    # Of linear modules the adapter is not tested here: without it.
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name and "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    merged, leaves = {}, {}
    for name, (a, b, _) in halves(model).items():
        own = (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
        weight, leaves[name] = plain.get_parameter(name).detach(), own
        layers = []
        for e in range(4):  # A's rows are expert after expert
            product = own[1][e] @ own[0][3 * e : 3 * e + 3]
            layers.append(product.T if family == "GPT-OSS" else product)
        merged[name] = weight + 2 * torch.stack(layers)
    assert len(merged) >= 2 and all(each.shape[0] == 4 for each in merged.values())
    expected = functional_call(plain, merged, (TOKENS,), {"use_cache": False})
    expected = expected.logits[0].float().log_softmax(-1)
    found = logprobs(model)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - logprobs(plain)).abs().max() > 0.1

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, (a, b, _) in halves(model).items():
        for half, leaf in zip((a, b), leaves[name], strict=True):
            assert leaf.grad is not None and half.grad is not None and leaf.grad.abs().max() > 0
            scale = float(leaf.grad.abs().max())
            torch.testing.assert_close(half.grad, leaf.grad, atol=1e-4 * scale, rtol=0)
    assert not [n for n, p in model.named_parameters() if p.grad is not None and ".lora_" not in n]


class Shapes(TorchDispatchMode):
    """Of all floating-point results of operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        viewed = func.is_view or any(r.alias_info is not None for r in func._schema.returns)
        if isinstance(result, Tensor) and result.is_floating_point() and not viewed:
            self.found.add(tuple(result.shape))
        return result


def test_no_step_makes_a_tensor_as_large_as_the_experts_together(tmp_path: Path) -> None:
    """PEFT's own forward does, for the sum and for its gradient."""
    FAMILIES["Qwen3-MoE"].write(tmp_path)
    model = adapted(tmp_path)
    whole = {(4, 32, 32), (4, 32, 16), (4, 16, 32)}  # gate_up_proj, down_proj, and it transposed
    with Shapes() as ours:
        logprobs(model).sum().backward()
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper
            half = module.lora_B["default"]
            half.weight = torch.nn.Parameter(for_file(half.weight))
    with Shapes() as theirs:
        logprobs(model).sum().backward()
    assert not whole & ours.found
    assert len(whole & theirs.found) >= 2


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, {"target_modules": ["o_proj"], "use_rslora": True}) for family in STACKED),
        # PEFT's own reader cannot: it takes a shared expert's gate_proj for that of each expert.
        *((family, {"experts": experts}) for family in RENAMED for experts in (True, False)),
    ],
)
def test_peft_and_our_engines_read_the_published_adapter_as_this_policy(
    tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    FAMILIES[family].write(tmp_path / "base")
    model = adapted(tmp_path / "base", **lora)
    assert bool(halves(model)) == lora.get("experts", True)
    with torch.no_grad():
        expected = logprobs(model)
        publisher = Publisher(tmp_path, 1)
        publisher.write(model, 1)
        folder = publisher.path(1)
        merged = dict(merged_tensors(tmp_path / "base", folder))
        (tmp_path / "base" / "tokenizer.json").write_text("{}")
        export(model, tmp_path / "base", tmp_path / "weights")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
        torch.testing.assert_close(logprobs(exported), expected, atol=1e-5, rtol=0)
        written = load_file(tmp_path / "weights" / "model.safetensors")
        assert merged.keys() == written.keys()
        assert all(merged[name].equal(written[name]) for name in merged)
        if "target_modules" not in lora:
            assert any(".gate_proj.lora_A" in name for name, _ in model.named_parameters())
            return
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        theirs = PeftModel.from_pretrained(base, folder).eval()
        torch.testing.assert_close(logprobs(theirs), expected, atol=1e-5, rtol=0)
        served: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        apply_weights(read_weights(folder, served), served)
        torch.testing.assert_close(logprobs(served), expected, atol=1e-5, rtol=0)


def test_five_steps_and_five_more_after_a_resume_are_ten_bit_for_bit(
    tmp_path: Path, batches: list[MicroBatch]
) -> None:
    base = tmp_path / "base"
    FAMILIES["Qwen3-MoE"].write(base)
    (base / "tokenizer.json").write_text("{}")

    def trainer(adapter: Path | None = None) -> Trainer:
        config = TrainerConfig.model_validate({"optim": {"lr": 1e-2}, "device": "cpu"})
        model = adapted(base, adapter=adapter)
        losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
        return Trainer(model, losses, config, 10)

    def run(made: Trainer, run_dir: Path, given: Sequence[MicroBatch], first: int = 1) -> None:
        for step in (5, 10):
            if first <= step < first + len(given):
                unfinished(run_dir, step).orchestrator.mkdir(parents=True)
                unfinished(run_dir, step).progress.write_text("{}")
        checkpointer = Checkpointer(run_dir, CkptConfig(interval=5), base, None)
        made.max_steps = first + len(given) - 1
        train(made, Frames(first, [[b] for b in given]), run_dir, first, Status(None), checkpointer)

    straight = trainer()
    before = {n: p.detach().clone() for n, p in straight.model.named_parameters()}
    run(straight, tmp_path / "straight", batches)
    run(trainer(), tmp_path / "run", batches[:5])
    resumed = trainer(finished(tmp_path / "run", 5).weights)
    restore(resumed, finished(tmp_path / "run", 5))
    run(resumed, tmp_path / "run", batches[5:], first=6)
    expected = dict(straight.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert torch.equal(parameter, before[name]) == (".lora_" not in name), name
    with pytest.raises(ConfigError, match=r"--resume: .*tensors of another shape or missing"):
        adapted(base, adapter=finished(tmp_path / "run", 5).weights, experts=False)


def test_random_numbers_of_a_new_adapter_survive_weights_that_are_still_in_files(
    tmp_path: Path,
) -> None:
    FAMILIES["Qwen3-MoE"].write(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weight = model.model.layers[0].mlp.experts.down_proj
    add_lora(model, LoraConfig(rank=4, experts=True))
    found = halves(model)
    assert len(found) == 4  # two layers
    for a, b, wrapper in found.values():
        assert a.device.type == "cpu" and a.abs().max() > 0 and not b.any()
        assert wrapper.get_param().is_meta and not wrapper.get_param().requires_grad
    assert found["model.layers.0.mlp.experts.down_proj"][2].get_param() is weight


def test_a_model_without_such_experts_is_refused(model_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.lora\.experts: Qwen3ForCausalLM has no experts"
    ):
        adapted(model_dir)


@pytest.mark.parametrize("saved", ["mlp", "experts"])
def test_experts_that_train_whole_are_refused_where_a_folder_has_each_of_them(
    tmp_path: Path, saved: str
) -> None:
    """Qwen3-MoE's folder has a tensor per matrix and expert, GPT-OSS's has the stacks."""
    FAMILIES["Qwen3-MoE"].write(tmp_path / "apart")
    with pytest.raises(ConfigError, match=rf"modules_to_save: '{saved}' has .*in parts"):
        adapted(tmp_path / "apart", experts=False, modules_to_save=[saved])
    adapted(tmp_path / "apart", experts=False, modules_to_save=["mlp.gate"])
    FAMILIES["GPT-OSS"].write(tmp_path / "stacked")
    adapted(tmp_path / "stacked", experts=False, modules_to_save=[saved])


def drop(metadata: dict[str, str]) -> None:
    del metadata[STACKS]


def shift(metadata: dict[str, str]) -> None:
    """The rows of another expert, past the last."""
    layouts = json.loads(metadata[STACKS])
    for layout in layouts.values():
        for place in layout["tensors"].values():
            place[0] += 10_000
    metadata[STACKS] = json.dumps(layouts)


def shrink(metadata: dict[str, str]) -> None:
    layouts = json.loads(metadata[STACKS])
    next(iter(layouts.values()))["num"] = 2
    metadata[STACKS] = json.dumps(layouts)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            drop,
            r"target_parameters is \['experts.down_proj', 'experts.gate_up_proj'\], and the met",
        ),
        (shift, r"has 4 experts, and 'model.layers.0.mlp.experts.0.*' is of another"),
        (shrink, r"lora_A.weight has shape \[12, 16\], expected rank 6"),
        (lambda m: m.update({STACKS: "[]"}), "is missing or damaged"),
    ],
)
def test_an_adapter_that_does_not_say_which_tensors_its_experts_are_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, str]], None], reason: str
) -> None:
    FAMILIES["Qwen3-MoE"].write(tmp_path / "base")
    publisher = Publisher(tmp_path, 1)
    model = adapted(tmp_path / "base")
    publisher.write(model, 1)
    path = publisher.path(1) / "adapter_model.safetensors"
    metadata = model.prime_rl_tuning.metadata()
    damage(metadata)
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(WeightsError, match=reason):
        merged_tensors(tmp_path / "base", publisher.path(1))
