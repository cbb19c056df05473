"""Random layouts of four ranks over random mixtures of experts: they train what one rank trains on
the same rows, or are refused by all ranks before the first step. Tokens travel by gloo."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ranks_cases
import torch
import warm
from family_models import FAMILIES, Family
from safetensors.torch import load_file
from trainer_fixtures import kernel_of, maker_of

from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_tuning
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.published import published_tensors
from prime_rl.trainer.rank import Rank
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import decode_batch

NUM_RANKS = 4
NUM_DRAWS = 18
NUM_ADAPTED = 12
"""Draws after these, which train adapters."""
EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
MIXTURES = [
    replace(family, settings=family.settings | EIGHT)
    for family in FAMILIES
    if family.name in ("Qwen3-MoE", "Mixtral", "GPT-OSS", "DeepSeek V2", "DeepSeek V3", "GLM-4.5")
]
WITH_BIASES = ("DeepSeek V3", "GLM-4.5")
BIASED = "the routers of {model} rank experts with a bias"
APART = "Leave trainer.context_parallel out, or train a model of another family"
COUNTED = ("router/load", "router/balance", "router/bias")
COMPARED = ("loss/mean", "loss/rl", "entropy/all/mean", "mismatch_kl/all/mean", "optim/grad_norm")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A family and how four ranks train it."""

    number: int
    family: Family
    trainer: dict[str, Any]

    @property
    def name(self) -> str:
        changed = [f"{key}={value}" for key, value in self.trainer.items() if key != "optim"]
        return f"{self.number}: {self.family.name}, {', '.join(changed)}"

    @property
    def refusal(self) -> str:
        """A part of the error that this layout ends with; empty if it trains."""
        model = self.family.architecture
        if self.family.name in WITH_BIASES and self.trainer["balance_loss"]:
            return BIASED.format(model=model)
        # Rows of GPT-OSS are computed document by document, which ranks do not share.
        computes_apart = self.family.name == "GPT-OSS"
        return APART if computes_apart and self.trainer["context_parallel"] > 1 else ""


def drawn(number: int) -> Draw:
    """Every family equally often; the rest by chance. The same number gives the same draw."""
    rng = random.Random(f"rows {number}")
    num_ranks_of_a_row = rng.choice([1, 1, 1, 2, 4])
    trainer = {
        # Adam would magnify the rounding of sums in another order.
        "optim": {"type": "sgd", "lr": 1e-2, "max_norm": 0.5},
        "context_parallel": num_ranks_of_a_row,
        "expert_parallel": rng.choice([False, True, 2, 2]),
        "dp_replicate": rng.choice([1, 1, 2]),
        "minibatches": rng.choice([1, 1, 2]),
        "share_prompts": rng.random() < 0.6,
        "router_replay": rng.random() < 0.3,
        "balance_loss": rng.choice([0.0, 0.0, 0.5]),
        "activation_checkpointing": rng.choice([0, 0, 1]),
        "fused_lm_head": rng.random() < 0.5,
        "expert_load": rng.random() < 0.5,
    }
    family = MIXTURES[number % len(MIXTURES)]
    trainer["balance_bias"] = rng.choice([0.0, 0.01]) if family.name in WITH_BIASES else 0.0
    if number >= NUM_DRAWS:
        # Each family once with frozen experts, and once with an adapter on each.
        of_experts = number // len(MIXTURES) % 2 == 1
        rank = rng.choice([2, 3, 8])
        trainer["lora"] = {"rank": rank, "alpha": 6, "experts": of_experts}
        trainer["expert_parallel"] = rng.choice([True, 2])
        trainer["balance_bias"] = 0.0  # refused: adapters have none
        # The refusals of the other draws.
        if family.name in WITH_BIASES:
            trainer["balance_loss"] = 0.0
        if family.name == "GPT-OSS":
            trainer["context_parallel"] = 1
    return Draw(number=number, family=family, trainer=trainer)


DRAWS = [drawn(number) for number in range(NUM_DRAWS + NUM_ADAPTED)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models by family, and of runs by the number of their draw."""
    folder = tmp_path_factory.mktemp("layouts")
    for family in MIXTURES:
        family.write(folder / family.name)
        (folder / family.name / "tokenizer.json").write_text("{}")
    jobs = [
        {
            "run_dir": str(folder / str(draw.number)),
            "model": str(folder / draw.family.name),
            "trainer": draw.trainer,
            "checkpoints": False,
        }
        for draw in DRAWS
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps([(NUM_RANKS, jobs)]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = warm.run([sys.executable, ranks_cases.__file__, path], env=env)
    assert result.returncode == 0, result.stderr
    return folder


def rows_of_all_ranks(config: TrainerConfig, step: int) -> list[MicroBatch]:
    """The rows that the four ranks compute, each once."""
    rows: list[MicroBatch] = []
    for number in range(0, NUM_RANKS, config.context_parallel):
        frames = ranks_cases.Frames(
            step,
            Rank(number, NUM_RANKS),
            ranks_cases.batch,
            config.minibatches,
            ranks_of_a_row=config.context_parallel,
            routed=config.router_replay,
        )
        rows += decode_batch(frames.receive(0.0))[1]
    return rows


def trained_on_one_rank(model_dir: Path, draw: Draw) -> tuple[Trainer, list[dict[str, float]]]:
    """After three steps, and the metrics of each. Of step 3 only one rank has a sample."""
    layout = TrainerConfig.model_validate({"device": "cpu", **draw.trainer})
    config = layout.model_copy(
        update={"context_parallel": 1, "expert_parallel": False, "dp_replicate": 1}
    )
    torch.manual_seed(0)  # as the ranks: an adapter begins with random numbers
    tuning = make_tuning(config.settings, load_plugins(TRAINER_GROUP))
    trainer = Trainer(
        load_model(model_dir, config, tuning),
        installed_losses().with_rl(ranks_cases.Ratio(PluginConfig())),
        config,
        ranks_cases.LAST,
        kernel=kernel_of(config),
        maker=maker_of(config),
    )
    metrics = [trainer.train_step(step, rows_of_all_ranks(layout, step)) for step in (1, 2, 3)]
    return trainer, metrics


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.name)
def test_four_ranks_train_what_one_rank_trains(runs: Path, draw: Draw) -> None:
    run = runs / str(draw.number)
    errors = [path.read_text() for path in run.glob("error_*")]
    if draw.refusal:
        assert len(errors) == NUM_RANKS
        assert all(draw.refusal in error for error in errors)
        return

    assert not errors
    trainer, metrics = trained_on_one_rank(runs / draw.family.name, draw)
    lines = [json.loads(line) for line in (run / "trainer.jsonl").read_text().splitlines()]
    assert len(lines) == ranks_cases.LAST
    for expected, line in zip(metrics, lines[: len(metrics)], strict=True):
        found = line["metrics"]
        counted = [name for name in expected if name.startswith(COUNTED)]
        for key in (*COMPARED, *counted):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key

    if "lora" in draw.trainer:
        check_adapter(run / "broadcasts/step_3/adapter_model.safetensors", trainer)
        return

    shutil.copy(runs / draw.family.name / "config.json", run / "broadcasts/step_3")
    published = load_model(run / "broadcasts/step_3", trainer.config)
    start = dict(load_model(runs / draw.family.name, trainer.config).named_parameters())
    weights = dict(trainer.model.named_parameters())
    for name, parameter in published.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=2e-6, msg=name)
    buffers = dict(trainer.model.named_buffers())
    for name, buffer in published.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=1e-7, msg=name)
    moved = [float((weights[name] - start[name]).abs().max().detach()) for name in start]
    assert max(moved) > 1e-4


def check_adapter(file: Path, trainer: Trainer) -> None:
    """A published adapter is that of a trainer on one rank."""
    found = load_file(file)
    expected = published_tensors(trainer.model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=2e-6, msg=name)
    # B begins at zero.
    moved = [float(each.abs().max()) for name, each in found.items() if "lora_B" in name]
    assert min(moved) > 1e-5


def test_the_draws_cover_what_layouts_differ_in() -> None:
    """Every setting in both states, by more than one family, and refusals beside runs."""
    adapted = [draw for draw in DRAWS if "lora" in draw.trainer]
    assert not any(draw.refusal for draw in adapted)
    for of_experts in (False, True):
        names = {d.family.name for d in adapted if d.trainer["lora"]["experts"] is of_experts}
        assert names == {family.name for family in MIXTURES}

    for key in DRAWS[0].trainer.keys() - {"optim"}:
        for value in {str(draw.trainer[key]) for draw in DRAWS}:
            names = {draw.family.name for draw in DRAWS if str(draw.trainer[key]) == value}
            assert len(names) > 1, (key, value)
        assert len({str(draw.trainer[key]) for draw in DRAWS}) > 1, key
    refusals = [draw.refusal for draw in DRAWS]
    training = [draw for draw in DRAWS if not draw.refusal]
    assert {draw.family.name for draw in training} == {family.name for family in MIXTURES}
    assert APART in refusals and any("bias" in refusal for refusal in refusals)
    assert refusals.count("") > len(DRAWS) / 2
