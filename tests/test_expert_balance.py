"""How evenly experts are chosen, and the loss that evens it out: numbers worked out manually, and
transformers' own loss of a whole model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from family_models import FAMILIES
from pydantic import ValidationError
from small_training import PolicyGradient
from trainer_fixtures import kernel_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.registry.components import installed_losses
from prime_rl.trainer import update
from prime_rl.trainer.expert_balance import ExpertBalance
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.routes import Mixture
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import MEASURED

BY_NAME = {family.name: family for family in FAMILIES}
CPU = torch.device("cpu")


def test_balance_and_its_gradient_are_those_worked_out_by_hand() -> None:
    """Two tokens, two experts, one each. Both take the first: f = (1, 0), P = (0.7, 0.3), so the
    balance is 2 (1 * 0.7 + 0 * 0.3) = 1.4. Of the coefficient 3 and 8 tokens in the step, the two
    of this call have 3 * 2 / 8; and d balance / d score of the first expert is 2 / 2."""
    balance = ExpertBalance([balance_mixture()], coefficient=3.0, device=CPU)
    balance.num_tokens = 8
    scores = torch.tensor([[0.8, 0.2], [0.6, 0.4]], requires_grad=True)
    values, chosen = scores.topk(1)
    for again in (False, True):  # a block that is computed again counts once
        seen = balance.watch(
            balance_mixture(), scores, chosen=chosen, values=values, num_owners=None, again=again
        )
        assert torch.equal(seen, values)
    (gradient,) = torch.autograd.grad((seen * torch.tensor([[10.0], [20.0]])).sum(), scores)
    torch.testing.assert_close(gradient, torch.tensor([[10.75, 0.0], [20.75, 0.0]]))
    balance.end_step()
    found = balance.metrics()
    assert found == pytest.approx(
        {"router/balance": 1.4, "router/load/max": 2, "router/load/min": 0}
        | {"router/load/unused": 0.5, "router/load/entropy": 0}
        | {"router/load/0/max": 2, "router/load/0/unused": 0.5, "router/load/0/entropy": 0}
    )
    assert balance.table() == {"layers": [0], "choices": [[2, 0]]}


def balance_mixture(number: int = 0, layer: int = 0) -> Mixture:
    return Mixture(number=number, layer=layer, name="m", num_experts=2, top_k=1)


def test_each_layer_has_a_load_of_its_own_over_all_optimizer_steps() -> None:
    """Four tokens. Layer 1: three choices of the first expert, one of the second: shares 3/4 and
    1/4, so the first has 1.5 times an equal share, and the entropy is (3/4 ln 4/3 + 1/4 ln 4) / ln
    2 = 0.8113. Layer 3: two each. The second optimizer step adds as much again."""
    mixtures = [balance_mixture(0, 1), balance_mixture(1, 3)]
    balance = ExpertBalance(mixtures, coefficient=0.0, device=CPU)
    for step in (1, 2):
        for mixture, chosen in zip(mixtures, ([0, 0, 0, 1], [0, 1, 1, 0]), strict=True):
            experts = torch.tensor(chosen)[:, None]
            scores = torch.full((4, 2), 0.5)
            balance.watch(
                mixture, scores, experts, values=scores[:, :1], num_owners=None, again=False
            )
        balance.end_step()
        assert balance.table() == {
            "layers": [1, 3],
            "choices": [[3 * step, step], [2 * step, 2 * step]],
        }
    entropy = (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(2)
    assert entropy == pytest.approx(0.8113, abs=1e-4)
    assert balance.metrics() == pytest.approx(
        {"router/load/1/max": 1.5, "router/load/1/unused": 0, "router/load/1/entropy": entropy}
        | {"router/load/3/max": 1.0, "router/load/3/unused": 0, "router/load/3/entropy": 1}
        | {"router/load/max": 1.5, "router/load/min": 0.5, "router/load/unused": 0}
        | {"router/load/entropy": (entropy + 1) / 2, "router/balance": 1}
    )


def test_scores_that_are_no_probabilities_count_by_their_softmax() -> None:
    """Logits of ln 3 and 0: probabilities 3/4 and 1/4. One token of each: f = (1/2, 1/2)."""
    balance = ExpertBalance([balance_mixture()], coefficient=0.0, device=CPU)
    logits = torch.tensor([[np.log(3.0), 0.0], [-np.log(3.0), 0.0]], dtype=torch.float32)
    values, chosen = logits.topk(1)
    seen = balance.watch(
        balance_mixture(), logits, chosen=chosen, values=values, num_owners=None, again=False
    )
    assert seen is values
    balance.end_step()
    found = balance.metrics()
    assert found["router/balance"] == pytest.approx(1.0)
    assert (found["router/load/max"], found["router/load/min"]) == (1, 1)


def test_padding_does_not_count() -> None:
    """The third token fills the call: the numbers are those of the first two."""
    balance = ExpertBalance([balance_mixture()], coefficient=3.0, device=CPU)
    balance.num_tokens = 8
    scores = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]], requires_grad=True)
    values, chosen = scores.topk(1)
    num_owners = torch.tensor([1, 1, 0])
    seen = balance.watch(
        balance_mixture(), scores, chosen=chosen, values=values, num_owners=num_owners, again=False
    )
    (gradient,) = torch.autograd.grad(seen.sum(), scores)
    expected = torch.tensor([[1.75, 0.0], [1.75, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(gradient, expected)
    balance.end_step()
    found = balance.metrics()
    assert found["router/balance"] == pytest.approx(1.4) and found["router/load/max"] == 2


def test_a_prompt_that_several_sequences_share_counts_for_each(tmp_path: Path) -> None:
    """The choices are those of transformers for each sequence alone, and the balance is that of a
    row in which no prompt is shared. A sequence's last token predicts nothing: it is not computed
    where prompts are shared."""
    BY_NAME["Qwen3-MoE"].write(tmp_path)
    prompt = [5, 9, 3, 7]
    sequences = [[*prompt, 11, 2], [*prompt, 30, 31, 32], [8, 4]]
    config = TrainerConfig(device="cpu")
    model = load_model(tmp_path, config)

    def choices_of(documents: list[list[int]]) -> list[list[int]]:
        counts = torch.zeros(2, model.config.num_experts, dtype=torch.int64)
        for tokens in documents:
            routers = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
            for number, logits in enumerate(routers.router_logits):
                chosen = logits.topk(model.config.num_experts_per_tok).indices.flatten()
                counts[number] += torch.bincount(chosen, minlength=counts.shape[1])
        return counts.tolist()

    row = joined([row_of(tokens) for tokens in sequences], num_prompt=4)
    shared = trainer_of(tmp_path, expert_load=True, share_prompts=True)
    shared.train_step(1, [row])
    assert shared.policy.packing.name == "shared"
    assert shared.policy.balance is not None
    expected = choices_of([tokens[:-1] for tokens in sequences])
    assert shared.policy.balance.table() == {"layers": [0, 1], "choices": expected}

    apart = trainer_of(tmp_path, expert_load=True)
    apart.train_step(1, [row])
    assert apart.policy.balance is not None
    assert apart.policy.balance.table()["choices"] == choices_of(sequences)


def joined(rows: list[MicroBatch], num_prompt: int) -> MicroBatch:
    """One row of several sequences. Those that are longer than ``num_prompt`` train after it."""
    lengths = [len(row.token_ids) for row in rows]
    first = [num_prompt if length > num_prompt else 1 for length in lengths]
    masks = [np.arange(n) >= start for n, start in zip(lengths, first, strict=True)]
    columns = {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in ("token_ids", "inference_logprobs", "advantages", "sequence_lengths")
    }
    return replace(
        rows[0],
        loss_mask=np.concatenate(masks),
        temperatures=np.ones(len(rows), np.float32),
        env_ids=np.zeros(len(rows), np.uint16),
        **columns,
    )


def test_a_batch_in_which_no_row_trains_has_no_balance() -> None:
    assert ExpertBalance([balance_mixture()], coefficient=0.0, device=CPU).metrics() == {}


def trainer_of(folder: Path, **settings: Any) -> Trainer:
    table: dict[str, Any] = {
        "device": "cpu",
        "share_prompts": False,
        "optim": {"lr": 1e-5, "max_norm": 1e9},
    }
    config = TrainerConfig.model_validate({"loss": {"type": "pg"}, **table, **settings})
    losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
    return Trainer(load_model(folder, config), losses, config, 10, kernel=kernel_of(config))


def row_of(tokens: list[int]) -> MicroBatch:
    """One sequence that trains with an advantage of 0: the policy's loss has no gradient."""
    mask = np.arange(len(tokens)) > 0
    return MicroBatch(
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        sequence_lengths=np.array([len(tokens)], np.int32),
        temperatures=np.ones(1, np.float32),
        env_ids=np.zeros(1, np.uint16),
        envs=("a",),
        advantages=np.zeros(len(tokens), np.float32),
    )


def gradients_of(trainer: Trainer, rows: list[MicroBatch]) -> tuple[dict[str, Any], Any]:
    """Of a step, before the optimizer takes it; and the step's metrics."""
    kept: dict[str, torch.Tensor] = {}
    take = update.BatchUpdate.optimizer_step

    def keep(self: Any, *arguments: Any) -> None:
        for name, weight in trainer.model.named_parameters():
            if weight.grad is not None:
                kept[name] = weight.grad.clone()
        take(self, *arguments)

    with mock.patch.object(update.BatchUpdate, "optimizer_step", keep):
        metrics = trainer.train_step(1, rows)
    return kept, metrics


@pytest.mark.parametrize(
    ("recomputed", "normalized"), [(0, False), (1, False), (0, True), (1, True)]
)
def test_a_step_has_the_balance_and_the_gradient_of_transformers(
    tmp_path: Path, recomputed: int, normalized: bool
) -> None:
    """Of one layer: over several, transformers pools the choices of all layers. It counts k choices
    of a token as k, we as 1. A router that is ``normalized`` divides its choice in place."""
    family = replace(
        BY_NAME["Qwen3-MoE"],
        settings=BY_NAME["Qwen3-MoE"].settings
        | {"num_hidden_layers": 1, "norm_topk_prob": normalized},
    )
    family.write(tmp_path)
    tokens = [5, 9, 3, 7, 11, 2, 30, 31, 32, 33, 34, 8]
    trainer = trainer_of(tmp_path, balance_loss=0.5, activation_checkpointing=recomputed)
    model = load_model(tmp_path, TrainerConfig(device="cpu"))
    config = model.config
    output = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
    expected = load_balancing_loss_func(
        output.router_logits, config.num_experts, config.num_experts_per_tok
    )
    expected = expected / config.num_experts_per_tok
    (0.5 * expected).backward()

    found, metrics = gradients_of(trainer, [row_of(tokens)])
    assert metrics["router/balance"] == pytest.approx(float(expected.detach()), rel=1e-5)
    router = next(name for name in found if name.endswith("mlp.gate.weight"))
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    assert float(wanted[router].norm()) > 1e-4
    for name, gradient in found.items():
        other = wanted[name] if wanted[name] is not None else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)
    chosen = output.router_logits[0].topk(config.num_experts_per_tok).indices
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).double()
    assert metrics["router/load/max"] == pytest.approx(float(counts.max() / counts.mean()))
    assert metrics["router/load/min"] == pytest.approx(float(counts.min() / counts.mean()))


def test_two_rows_count_by_their_tokens(tmp_path: Path) -> None:
    """The mean is over the step's tokens, so a short row counts less; off by default."""
    BY_NAME["Qwen3-MoE"].write(tmp_path)
    rows = [row_of([5, 9, 3, 7]), row_of([11, 2, 30, 31, 32, 33, 34, 8, 4, 6, 1, 12])]
    alone = [
        gradients_of(trainer_of(tmp_path, expert_load=True), [row])[1]["router/balance"]
        for row in rows
    ]
    _, both = gradients_of(trainer_of(tmp_path, expert_load=True), rows)
    assert both["router/balance"] == pytest.approx((4 * alone[0] + 12 * alone[1]) / 16, rel=1e-5)
    _, off = gradients_of(trainer_of(tmp_path), rows)
    assert not any(name.startswith("router/") for name in off)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek V3"])
def test_the_load_of_blocks_that_are_computed_again_counts_once(tmp_path: Path, name: str) -> None:
    BY_NAME[name].write(tmp_path)
    row = row_of([5, 9, 3, 7, 11, 2])
    plain = trainer_of(tmp_path, expert_load=True).train_step(1, [row])
    again = trainer_of(tmp_path, expert_load=True, activation_checkpointing=1)
    found = again.train_step(1, [row])
    for key in [key for key in plain if key.startswith("router/")]:
        assert found[key] == pytest.approx(plain[key]), key
    assert "router/load/max" in found


@pytest.mark.parametrize("settings", [{"expert_load": True}, {"balance_loss": 0.5}])
def test_a_batch_that_only_measures_counts_no_choices(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    BY_NAME["Qwen3-MoE"].write(tmp_path)
    row = replace(row_of([5, 9, 3, 7]), minibatch=MEASURED)
    metrics = trainer_of(tmp_path, **settings).train_step(1, [row])
    assert metrics["validation/tokens"] == 3
    assert not any(name.startswith("router/") for name in metrics)


def test_routers_with_a_bias_have_a_load_and_no_balance(tmp_path: Path) -> None:
    """They rank by a number that is no probability, -inf in groups that are left out."""
    BY_NAME["DeepSeek V3"].write(tmp_path)
    trainer = trainer_of(tmp_path, expert_load=True)
    metrics = trainer.train_step(1, [row_of([5, 9, 3, 7])])
    assert 1 <= metrics["router/load/max"] <= trainer.policy.mixtures[0].num_experts
    assert 0 <= metrics["router/load/min"] <= 1
    assert "router/balance" not in metrics


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Qwen3", {"expert_load": True}, "has none. Leave them out"),
        ("Qwen3", {"balance_bias": 0.1}, "has none. Leave them out"),
        ("DeepSeek V3", {"balance_loss": 0.1}, "Set trainer.balance_bias = 0.001 instead"),
        ("Qwen3-MoE", {"balance_bias": 0.1}, "Set trainer.balance_loss = 0.001 instead"),
    ],
)
def test_models_without_a_balance_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], said: str
) -> None:
    BY_NAME[name].write(tmp_path)
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings", [{"expert_load": True}, {"balance_loss": 0.01}, {"balance_bias": 0.01}]
)
def test_compiled_blocks_would_hide_the_choices(settings: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValidationError), match="balance_loss and balance_bias"):
        TrainerConfig.model_validate({"compile": True, **settings})
