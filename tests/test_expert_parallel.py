"""Tokens that travel to experts: a group of four ranks, groups of two, and copies of two train what
one rank trains, and go on from each other's checkpoints. By gloo."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ranks_cases
import torch
import warm
from family_models import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_fixtures import kernel_of
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_optimizer
from prime_rl.trainer import expert_ranks, parallel
from prime_rl.trainer.expert_balance import LOADS
from prime_rl.trainer.expert_ranks import ExpertRanks, Gathering
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import Policy, gathered_bytes, load_model
from prime_rl.trainer.rank import Rank
from prime_rl.trainer.routes import experts_of
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import decode_batch

PLAIN = {"optim": {"type": "sgd", "lr": 2e-2, "max_norm": 0.5}, "expert_load": True}
"""Adam would magnify the rounding of sums in another order."""
OWN = {"expert_parallel": True, **PLAIN}
GROUPS = {"expert_parallel": 2, **PLAIN}
BALANCED = {"expert_parallel": True, "balance_loss": 0.5, "minibatches": 2, **PLAIN}
REPLAY = {"router_replay": True, **PLAIN}
RANK = 3
"""Of adapters. Not the 8 that grouped products are padded to."""
ADAPTER = {"lora": {"rank": RANK, "alpha": 6}, "optim": {"type": "sgd", "lr": 0.5, "max_norm": 0.5}}
OF_EXPERTS = ADAPTER | {"lora": {"rank": RANK, "alpha": 6, "experts": True}}
STILL = OF_EXPERTS | {"optim": {"type": "sgd", "lr": 1e-300}}
"""float32 has no such rate: no weight moves."""
ANCHORED = OF_EXPERTS | {"ema_decay": 0.5}
"""The loss reads logprobs without the adapter, and of its average."""
NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and of runs, by name."""
    folder = tmp_path_factory.mktemp("experts")
    write_narrow(folder / "narrow")
    mixture().save_pretrained(folder / "model")
    (folder / "model/tokenizer.json").write_text("{}")

    def job(
        name: str,
        trainer: dict[str, Any],
        resume: str | None = None,
        model: str = "model",
        loss: str = "",
    ) -> dict[str, Any]:
        made = {
            "run_dir": str(folder / name),
            "model": str(folder / model),
            "trainer": trainer,
            "loss": loss,
        }
        if resume is not None:
            made["resume"] = str(folder / resume / "checkpoints/step_2")
        return made

    sets = [
        (
            1,
            [
                job("one", PLAIN),
                job("one_replay", REPLAY),
                job("one_adapter", ADAPTER),
                job("one_adapter_of_experts", OF_EXPERTS),
                job("one_narrow", OF_EXPERTS, model="narrow"),
                job("one_narrow_frozen", ADAPTER, model="narrow"),
                job("one_anchored", ANCHORED, loss="anchored"),
            ],
        ),
        (
            4,
            [
                job("four", OWN),
                job("four_replay", {**OWN, **REPLAY, "activation_checkpointing": 1}),
                job("four_balanced", BALANCED),
                job("two_by_two", {**OWN, "dp_replicate": 2, "activation_checkpointing": 1}),
                job("four_of_two_rows", {**OWN, "context_parallel": 2}),
                job("rounded", {**OWN, "dp_replicate": 2, "reduce_dtype": "bfloat16"}),
                job("two_groups", GROUPS),
                job("two_groups_kept", {**GROUPS, "reshard_after_forward": False}),
                job(
                    "two_groups_replay",
                    {**GROUPS, **REPLAY, "context_parallel": 2, "activation_checkpointing": 1},
                ),
                job(
                    "two_groups_recomputed",
                    {**GROUPS, "activation_checkpointing": 1, "keep_attention": True},
                ),
                job("rounded_groups", {**GROUPS, "reduce_dtype": "bfloat16"}),
                job("four_half", {**OWN, "dtype": "bfloat16"}),
                job("two_groups_half", {**GROUPS, "dtype": "bfloat16"}),
                job("four_adapter", {**OWN, **ADAPTER}),
                job("four_adapter_of_experts", {**OWN, **OF_EXPERTS}),
                job(
                    "two_by_two_adapter_of_experts",
                    {**OWN, **OF_EXPERTS, "dp_replicate": 2, "activation_checkpointing": 1},
                ),
                job("four_narrow", {**OWN, **OF_EXPERTS}, model="narrow"),
                job("four_narrow_frozen", {**OWN, **ADAPTER}, model="narrow"),
                job("four_anchored", {**OWN, **ANCHORED}, loss="anchored"),
                job("half_gathered", {**OF_EXPERTS, "dtype": "bfloat16"}),
                job("half_own", {**OWN, **OF_EXPERTS, "dtype": "bfloat16"}),
                job(
                    "four_still_from_one",
                    {**OWN, **STILL},
                    resume="one_adapter_of_experts",
                ),
                job("two_groups_adapter", {**GROUPS, **ADAPTER}),
                job("two_groups_adapter_of_experts", {**GROUPS, **OF_EXPERTS}),
                job("two_groups_narrow", {**GROUPS, **OF_EXPERTS}, model="narrow"),
            ],
        ),
        # No equal parts: of 32 rows of B in the file they write 11, 11 and 10.
        (3, [job("three_still_from_one", STILL, resume="one_adapter_of_experts")]),
        (
            8,
            [
                job("two_copies_of_two_groups", {**GROUPS, "dp_replicate": 2}),
                job(
                    "groups_of_four_from_two_groups",
                    {**GROUPS, "expert_parallel": 4},
                    resume="two_groups",
                ),
            ],
        ),
        (
            2,
            [
                job("two_from_four", OWN, resume="four"),
                job("two_gathered_from_two_by_two", PLAIN, resume="two_by_two"),
                job("two_from_two_groups", OWN, resume="two_groups"),
                job(
                    "two_adapter_of_experts_from_four",
                    {**OWN, **OF_EXPERTS},
                    resume="four_adapter_of_experts",
                ),
                job(
                    "two_anchored_from_four",
                    {**OWN, **ANCHORED},
                    resume="four_anchored",
                    loss="anchored",
                ),
                job(
                    "two_gathered_adapter_of_experts_from_two_by_two",
                    OF_EXPERTS,
                    resume="two_by_two_adapter_of_experts",
                ),
            ],
        ),
        (
            1,
            [
                job("one_from_four", PLAIN, resume="four"),
                job("one_from_two_groups", PLAIN, resume="two_groups"),
                job("one_adapter_from_four", ADAPTER, resume="four_adapter"),
            ],
        ),
        (
            4,
            [
                job("two_groups_from_two_by_two", GROUPS, resume="two_by_two"),
                job(
                    "two_groups_adapter_of_experts_from_four",
                    {**GROUPS, **OF_EXPERTS},
                    resume="four_adapter_of_experts",
                ),
            ],
        ),
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(sets))
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = warm.run([sys.executable, ranks_cases.__file__, path], env=env)
    assert result.returncode == 0, result.stderr
    return folder


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(
        vocab_size=ranks_cases.VOCAB,
        max_position_embeddings=256,
        norm_topk_prob=True,
        **sizes | heads | experts,
    )
    return Qwen3MoeForCausalLM(config)


def write_narrow(folder: Path) -> None:
    """A mixture whose routers always take the experts of the first rank: the others are sent
    nothing. It has biases, and its weights are transposed."""
    (family,) = (each for each in FAMILIES if each.name == "GPT-OSS")
    eight = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS}
    replace(family, settings=family.settings | eight).write(folder)
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor[:2] = 1000.0
    save_file(tensors, path, metadata={"format": "pt"})


def curve(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "trainer.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines}


MANY = [
    *("four", "two_by_two", "four_of_two_rows", "four_replay"),
    *("two_groups", "two_groups_replay", "two_groups_recomputed", "two_copies_of_two_groups"),
    "two_groups_kept",
]
RESUMED = [
    *("two_from_four", "two_gathered_from_two_by_two", "one_from_four"),
    *("two_from_two_groups", "one_from_two_groups", "groups_of_four_from_two_groups"),
    "two_groups_from_two_by_two",
]
ADAPTED = ["four_adapter", "four_adapter_of_experts", "two_by_two_adapter_of_experts"]
ADAPTED += ["four_narrow", "four_narrow_frozen"]
ADAPTED += ["two_groups_adapter", "two_groups_adapter_of_experts", "two_groups_narrow"]
ADAPTED += ["four_anchored"]
ADAPTED_RESUMED = [
    "two_adapter_of_experts_from_four",
    "two_gathered_adapter_of_experts_from_two_by_two",
    "one_adapter_from_four",
    "two_groups_adapter_of_experts_from_four",
    "two_anchored_from_four",
]
COMPARED = ("loss/mean", "loss/rl", "entropy/all/mean", "mismatch_kl/all/mean", "optim/grad_norm")


def reference_of(runs: Path, name: str) -> Path:
    kinds = ("narrow_frozen", "narrow", "adapter_of_experts", "adapter", "anchored", "replay")
    kind = next((each for each in kinds if each in name), "")
    return runs / f"one_{kind}".rstrip("_")


@pytest.mark.slow
def test_ranks_replay_the_routes_of_their_own_rows(runs: Path) -> None:
    """Random routes: a choice of two of eight is the router's own by chance only."""
    metrics = curve(runs / "four_replay")[1]
    assert 0.5 < metrics["router/flipped"] < 0.95
    assert metrics["router/mismatch_kl_own"] != metrics["router/mismatch_kl_replayed"]
    plain = curve(runs / "four")[1]["loss/mean"]
    assert abs(plain - curve(runs / "four_replay")[1]["loss/mean"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MANY, *RESUMED, *ADAPTED, *ADAPTED_RESUMED])
def test_loss_and_gradient_are_those_of_one_rank(runs: Path, name: str) -> None:
    """Of step 3 only one rank has a sample, and step 4 trains nothing: the others still answer."""
    expected = curve(reference_of(runs, name))
    found = curve(runs / name)
    is_resumed = name in RESUMED + ADAPTED_RESUMED
    assert list(found) == ([3, 4, 5] if is_resumed else [1, 2, 3, 4, 5])
    for step, metrics in found.items():
        for key in COMPARED:
            if key in expected[step]:
                assert metrics[key] == pytest.approx(expected[step][key], rel=1e-5, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_each_expert_is_chosen_as_often_as_on_one_rank(runs: Path, name: str) -> None:
    """However the samples are packed and their prompts shared, each token but a sample's last,
    which predicts nothing, counts once. Of step 4 none trains."""
    expected = loads(reference_of(runs, name))
    assert list(expected) == [1, 2, 3, 5]
    for step, choices in expected.items():
        samples, _ = ranks_cases.batch(step)
        num_tokens = sum(len(sample) - 1 for sample in samples)
        assert [sum(layer) for layer in choices] == [2 * num_tokens] * 2
    if "replay" not in name:  # there every other sample has random routes, of the order of a frame
        assert loads(runs / name) == expected


def loads(run: Path) -> dict[int, list[list[int]]]:
    """The choices by step, of layers 0 and 1."""
    lines = [json.loads(line) for line in (run / LOADS).read_text().splitlines()]
    assert all(line["layers"] == [0, 1] for line in lines)
    return {line["step"]: line["choices"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MANY, *RESUMED])
def test_every_published_version_has_the_weights_of_one_rank(runs: Path, name: str) -> None:
    start = load_file(runs / "model/model.safetensors")
    for step in (3, 5):
        (ours,) = (runs / name / f"broadcasts/step_{step}").glob("*.safetensors")
        (theirs,) = (reference_of(runs, name) / f"broadcasts/step_{step}").glob("*.safetensors")
        found = load_file(ours)
        expected = load_file(theirs)
        assert found.keys() == expected.keys() == start.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
    experts = [key for key in expected if ".experts." in key]
    assert len(experts) == 2 * NUM_EXPERTS * 3
    assert max(float((expected[key] - start[key]).abs().max()) for key in experts) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ADAPTED, *ADAPTED_RESUMED])
def test_every_published_adapter_has_the_numbers_of_one_rank(runs: Path, name: str) -> None:
    for step in (3, 5):
        found = load_file(runs / name / f"broadcasts/step_{step}/adapter_model.safetensors")
        path = reference_of(runs, name) / f"broadcasts/step_{step}/adapter_model.safetensors"
        expected = load_file(path)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
    # B begins at zero.
    halves = [each for key, each in found.items() if "lora_B" in key]
    assert min(float(each.abs().max()) for each in halves) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four_still_from_one", "three_still_from_one"])
def test_an_adapter_that_does_not_move_is_written_as_it_was_read(runs: Path, name: str) -> None:
    """One rank wrote it. Several ranks read it, each its experts, and write it again."""
    read = runs / "one_adapter_of_experts/checkpoints/step_2/weights/adapter_model.safetensors"
    for step in (3, 5):
        written = runs / name / f"broadcasts/step_{step}/adapter_model.safetensors"
        assert written.read_bytes() == read.read_bytes()


@pytest.mark.slow
def test_in_bfloat16_an_adapter_learns_as_where_experts_are_gathered(runs: Path) -> None:
    """Frozen experts are rounded once, and A and B before each product: at the same places."""
    own = load_file(runs / "half_own/broadcasts/step_5/adapter_model.safetensors")
    path = runs / "half_gathered/broadcasts/step_5/adapter_model.safetensors"
    for name, tensor in load_file(path).items():
        assert own[name].dtype == torch.float32
        # Gradients are sums of rounded numbers in another order, and routers have near ties.
        assert float((own[name] - tensor).norm()) < 0.1 * float(tensor.norm()), name

    # The first loss is of the same weights.
    found = curve(runs / "half_own")[1]["loss/mean"]
    expected = curve(runs / "half_gathered")[1]["loss/mean"]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four_narrow", "two_groups_narrow"])
def test_ranks_that_are_sent_nothing_train_experts_that_do_not_move(runs: Path, name: str) -> None:
    """Their B stays zero, and that of the two experts that all tokens choose does not."""
    path = runs / name / "broadcasts/step_5/adapter_model.safetensors"
    stacked = {key: each for key, each in load_file(path).items() if "experts" in key}
    halves = [each for key, each in stacked.items() if "lora_B" in key]
    assert len(halves) == 4
    for half in halves:
        by_expert = half.view(len(half), RANK, NUM_EXPERTS).abs().amax((0, 1))
        assert (by_expert > 1e-5).tolist() == [True] * 2 + [False] * 6
        assert not by_expert[2:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four_adapter_of_experts", "two_by_two_adapter_of_experts"])
def test_the_merged_weights_are_each_experts_own_sum(runs: Path, name: str) -> None:
    """W + 2 B A in double precision, expert by expert: alpha / rank = 6 / 3."""
    base = load_file(runs / "model/model.safetensors")
    merged = load_file(runs / name / "weights/model.safetensors")
    adapter = load_file(runs / name / "broadcasts/step_5/adapter_model.safetensors")
    assert merged.keys() == base.keys()
    changed = 0
    for key, weight in base.items():
        expected = weight.double() + 2 * product_of(adapter, key)
        torch.testing.assert_close(merged[key].double(), expected, rtol=0, atol=1e-6)
        changed += float((merged[key] - weight).abs().max()) > 1e-5
    # Three matrices of each expert, and four of attention, in both layers.
    assert changed == 2 * (3 * NUM_EXPERTS + 4)


def product_of(adapter: dict[str, torch.Tensor], name: str) -> torch.Tensor | float:
    """B A in double precision for a tensor of the model's folder, from a file in PEFT's format."""
    module = "base_model.model." + name.removesuffix(".weight")
    if ".experts." not in name:
        if f"{module}.lora_A.weight" not in adapter:
            return 0.0
        a = adapter[f"{module}.lora_A.weight"]
        b = adapter[f"{module}.lora_B.weight"]
        return b.double() @ a.double()

    stack, number, matrix = module.rsplit(".", 2)
    # PEFT wraps the layer's module once for each of its two products.
    inputs = 16 if matrix == "down_proj" else 32
    pairs = [
        (adapter[f"{stack}.{inner}lora_A.weight"], adapter[f"{stack}.{inner}lora_B.weight"])
        for inner in ("", "base_layer.")
    ]
    ((a, b),) = ((a, b) for a, b in pairs if a.shape[1] == inputs)
    expert = int(number)
    a = a[RANK * expert : RANK * (expert + 1)]
    b = b[:, expert::NUM_EXPERTS]
    rows = {"gate_proj": slice(0, 16), "up_proj": slice(16, 32), "down_proj": slice(0, 32)}
    return b[rows[matrix]].double() @ a.double()


def trained_alone(runs: Path, settings: dict[str, Any]) -> tuple[Trainer, dict[str, float]]:
    """After step 1 on one rank, over the rows of all four."""
    config = TrainerConfig.model_validate({"device": "cpu", **settings})
    losses = installed_losses().with_rl(ranks_cases.Ratio(PluginConfig()))
    model = load_model(runs / "model", config)
    trainer = Trainer(
        model,
        losses,
        config,
        10,
        kernel=kernel_of(config),
        maker=make_optimizer(config.optim, load_plugins(TRAINER_GROUP)),
    )
    rows: list[MicroBatch] = []
    for rank in range(4):
        frames = ranks_cases.Frames(1, Rank(rank, 4), ranks_cases.batch, config.minibatches)
        rows += decode_batch(frames.receive(0.0))[1]
    return trainer, trainer.train_step(1, rows)


@pytest.mark.slow
def test_the_balance_of_ranks_and_minibatches_is_that_of_their_rows_on_one_rank(
    runs: Path,
) -> None:
    """The second minibatch is of weights that the first one's balance has moved."""
    found = curve(runs / "four_balanced")[1]
    alone, expected = trained_alone(runs, BALANCED)
    names = ("router/balance", "router/load/max", "router/load/min", "optim/grad_norm", "loss/mean")
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    without, _ = trained_alone(runs, {**BALANCED, "balance_loss": 0.0})
    weights = dict(alone.model.named_parameters())
    unmoved = dict(without.model.named_parameters())
    (file,) = (runs / "four_balanced/broadcasts/step_1").glob("*.safetensors")
    published = load_file(file)
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        torch.testing.assert_close(published[name], weights[name].detach(), rtol=0, atol=1e-6)
        moved = (weights[name] - unmoved[name]).detach().abs().max()
        assert float(moved) > 1e-5  # ten times the tolerance above


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounded", "rounded_groups"])
def test_gradients_summed_in_bfloat16_differ_by_its_rounding(runs: Path, name: str) -> None:
    """The first loss is of the same weights. Each share and each sum is rounded to 8 bits: the norm
    of many weights is off by far less than one rounding, and not by nothing."""
    exact = curve(runs / "one")[1]
    rounded = curve(runs / name)[1]
    assert rounded["loss/mean"] == pytest.approx(exact["loss/mean"], rel=1e-5, abs=1e-6)
    # Choices of all ranks: a mean of 1 is equal, and no expert has more than all.
    assert 1 < rounded["router/load/max"] < NUM_EXPERTS
    assert 0 <= rounded["router/load/min"] < 1 < rounded["router/balance"] < NUM_EXPERTS
    error = abs(rounded["optim/grad_norm"] / exact["optim/grad_norm"] - 1)
    assert 1e-6 < error < 2**-8
    (ours,) = (runs / name / "broadcasts/step_3").glob("*.safetensors")
    (theirs,) = (runs / "one/broadcasts/step_3").glob("*.safetensors")
    expected = load_file(theirs)
    start = load_file(runs / "model/model.safetensors")
    for key, tensor in load_file(ours).items():
        assert tensor.dtype == torch.float32
        moved = float((expected[key] - start[key]).norm())
        assert float((tensor - expected[key]).norm()) < 0.02 * moved + 1e-6, key


@pytest.mark.slow
def test_groups_compute_in_bfloat16_what_one_group_computes(runs: Path) -> None:
    """Weights travel rounded, and each expert meets the same tokens: only sums are in another
    order. The weights that move are not rounded."""
    expected = curve(runs / "four_half")
    found = curve(runs / "two_groups_half")
    exact = curve(runs / "one")
    for step in (1, 2, 3, 5):
        for key in ("loss/mean", "optim/grad_norm"):
            assert found[step][key] == pytest.approx(expected[step][key], rel=2**-7), (step, key)
    assert found[1]["loss/mean"] == pytest.approx(exact[1]["loss/mean"], rel=0.05)
    assert found[1]["loss/mean"] != exact[1]["loss/mean"]

    (file,) = (runs / "two_groups_half/broadcasts/step_5").glob("*.safetensors")
    weights = load_file(file)
    experts = [tensor for name, tensor in weights.items() if ".experts." in name]
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in experts)


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "expected"),
    [(4, 1, None), (4, 2, None), (6, 1, r"dp_replicate to one of \[3, 6\]"), (3, 3, None)],
)
def test_ranks_with_different_numbers_of_experts_are_refused_with_those_that_fit(
    num_ranks: int, replicas: int, expected: str | None
) -> None:
    config = TrainerConfig(dp_replicate=replicas)
    if expected is None:
        config.check_experts(NUM_EXPERTS, num_ranks)
        return
    with pytest.raises(ConfigError, match=expected) as caught:
        config.check_experts(NUM_EXPERTS, num_ranks)
    assert "num_ranks to dp_replicate times one of [1, 2, 4, 8]" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "ranks_of_group"), [(False, 1), (0, 1), (1, 1), (True, 8), (2, 2), (8, 8)]
)
def test_a_group_is_of_as_many_ranks_as_the_key_says(size: bool | int, ranks_of_group: int) -> None:
    config = TrainerConfig.model_validate_json(
        json.dumps({"expert_parallel": size, "dp_replicate": 2, "num_ranks": 16})
    )
    assert type(config.expert_parallel) is type(size)  # 1 is not true
    assert config.expert_ranks(16) == ranks_of_group
    assert config.sends_tokens == (ranks_of_group > 1)


def test_expert_parallel_is_off_by_default() -> None:
    assert TrainerConfig().expert_parallel is False


@pytest.mark.parametrize("given", [1, "1", 1.0])
def test_the_number_one_gathers_and_is_not_true(given: Any) -> None:
    config = TrainerConfig.model_validate({"expert_parallel": given})
    assert config.expert_parallel is not True and not config.sends_tokens


@given(ranks=st.integers(1, 24), experts=st.integers(1, 24), size=st.integers(2, 24))
def test_the_layouts_that_a_refusal_names_are_accepted(ranks: int, experts: int, size: int) -> None:
    def refused(**trainer: Any) -> str:
        config = TrainerConfig.model_validate(trainer)
        try:
            config.check_layout("m", num_ranks=ranks, num_heads=4, num_experts=experts)
        except ConfigError as error:
            return str(error)
        return ""

    said = refused(expert_parallel=size)
    copies = re.search(r"dp_replicate (?:to|as) one of \[(.*?)\]", said)
    value = True if "to true with dp_replicate" in said else size
    for number in copies[1].split(", ") if copies and copies[1] else ():
        assert not refused(expert_parallel=value, dp_replicate=int(number)), said
    sizes = re.search(r"does not divide the \d+ ranks.* Set it to one of \[(.*?)\]", said)
    for number in sizes[1].split(", ") if sizes and experts % ranks == 0 else ():
        assert not refused(expert_parallel=int(number)), said


@pytest.mark.parametrize(
    ("trainer", "num_experts", "said"),
    [
        ({"expert_parallel": 3}, 6, r"3, which does not divide the 4 ranks.* one of \[1, 2, 4\]"),
        ({"expert_parallel": 16}, 64, r"16, which does not divide the 4 ranks"),
        ({"expert_parallel": 4}, 6, r"4, which does not divide the 6 .* to 1,.* one of \[4\]"),
        ({"expert_parallel": 2}, 6, r"6 experts.* 4 ranks share.* dp_replicate to one of \[4\]"),
        ({"expert_parallel": 2}, 8, ""),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_those_that_do(
    trainer: dict[str, int], num_experts: int, said: str
) -> None:
    """Eight ranks, two copies of the model."""
    config = TrainerConfig.model_validate({"dp_replicate": 2, **trainer})
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        config.check_layout("m", num_ranks=8, num_heads=4, num_experts=num_experts)


def test_a_group_that_does_not_divide_the_ranks_is_refused_where_a_config_has_them() -> None:
    with pytest.raises(ValidationError, match=r"one of \[1, 2, 4\]"):
        TrainerConfig(num_ranks=8, dp_replicate=2, expert_parallel=3)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        TrainerConfig(expert_parallel=-1)


def test_an_expert_has_its_place_at_the_rank_of_the_group_that_computes_it() -> None:
    """Two groups of two ranks. Rank 0 of each computes experts 0, 1, 4 and 5, in this order, and
    rank 1 the others: ranks 0 to 3 hold two each."""
    groups = ExpertRanks(
        num_ranks=2, num_shards=2, travel=None, sharing=None, reduces_in=torch.float32
    )
    by_place = [0, 1, 4, 5, 2, 3, 6, 7]
    places = groups.places(torch.tensor([by_place, by_place[::-1]]), num_experts=8)
    assert places.tolist() == [[*range(8)], [*reversed(range(8))]]


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_a_backward_pass_sums_trained_weights_alone_and_unused_ones_as_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share experts, and both have the same numbers: a sum is twice a rank's own. A
    weight that a rank did not use takes part, as the other rank waits for it."""
    done = SimpleNamespace(wait=lambda: None)
    summed = []

    def all_gather(whole: Tensor, part: Tensor, **_: Any) -> Any:
        whole.copy_(torch.cat([part, part]))
        return done

    def reduce_scatter(part: Tensor, whole: Tensor, **_: Any) -> Any:
        summed.append(tuple(whole.shape))
        part.copy_(2 * whole[: len(part)])
        return done

    groups = ExpertRanks(
        num_ranks=1, num_shards=2, travel=None, sharing=None, reduces_in=torch.float32
    )
    monkeypatch.setattr(expert_ranks, "_ranks", groups)
    monkeypatch.setattr(parallel, "all_gather", all_gather)
    monkeypatch.setattr(parallel, "reduce_scatter", reduce_scatter)
    frozen = torch.ones(2, 64, 64)
    used = torch.ones(2, 3, requires_grad=True)
    unused = torch.ones(2, 5, requires_grad=True)
    weights = [SimpleNamespace(to_local=lambda part=part: part) for part in (frozen, used, unused)]

    here = Gathering(cast(Any, weights), dtype=torch.bfloat16).wait()
    inputs = torch.ones(4, 1, 64, dtype=torch.bfloat16)
    products = (inputs @ here.all[0]).sum(dim=(1, 2))  # 64 * 64 each
    loss = (products * here.all[1].sum(dim=1)).sum()
    with Largest() as largest:
        of_used, of_unused = torch.autograd.grad(loss, (used, unused))

    torch.testing.assert_close(of_used, torch.full((2, 3), 2.0 * 64 * 64))
    torch.testing.assert_close(of_unused, torch.zeros(2, 5))
    assert summed == [(4, 3), (4, 5)]
    assert largest.size < 4 * 64 * 64  # of the frozen experts that were gathered


def test_experts_to_which_tokens_travel_are_not_among_the_weights_that_stay_gathered() -> None:
    """Two layers, in bfloat16. Embeddings, LM head, and the last norm; queries, keys, values and
    output, the norms of heads and block, and the router; gate, up and down of eight experts."""
    policy = Policy(mixture(), TrainerConfig(device="cpu"))
    attention = 32 * 8 * (4 + 2 + 2) + 4 * 8 * 32 + 2 * 8 + 2 * 32
    others = 2 * ranks_cases.VOCAB * 32 + 32 + 2 * (attention + NUM_EXPERTS * 32)
    assert gathered_bytes(policy, half=True) == 2 * (others + 2 * NUM_EXPERTS * 3 * 32 * 16)
    policy.resident_experts = [*experts_of(policy.model)]
    assert gathered_bytes(policy, half=True) == 2 * others
    assert gathered_bytes(policy, half=False) == 4 * others
