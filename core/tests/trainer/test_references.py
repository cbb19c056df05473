"""Logprobs under the policy's first weights and under their average, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_fixtures import kernel_of, maker_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import restore, snapshot, write_shard
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.wire import MicroBatch
from prime_rl_lora.tuning import Lora, LoraConfig

LENGTHS = [9, 5]
SAMPLED = (slice(1, 9), slice(10, 14))


def k3(log_ratio: Tensor) -> Tensor:
    """Of log (reference / π), per token (Schulman 2020, "Approximating KL Divergence")."""
    return log_ratio.exp() - log_ratio - 1


class Anchored(Loss):
    """-A * t + k3 to the first weights"""

    name = "anchored"
    token_wise = True
    reads: Any = ("advantages", "initial_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms, metrics = -inputs.advantages * inputs.trainer_logprobs, {}
        for name in self.reads[1:]:
            kl = k3(getattr(inputs, name) - inputs.trainer_logprobs)
            terms, metrics[name] = terms + kl, TokenMetric(kl.detach(), inputs.loss_mask)
        return LossOutputs(terms[inputs.loss_mask].sum(), metrics)


class Averaged(Anchored):
    """-A * t + k3 to the average"""

    name = "averaged"
    reads = ("advantages", "ema_logprobs")


class Both(Anchored):
    """-A * t + k3 to both"""

    name = "both"
    reads = ("advantages", "initial_logprobs", "ema_logprobs")


class Neither(Anchored):
    """-A * t"""

    name = "neither"
    reads = ("advantages",)


def make_trainer(
    folder: Path,
    loss: type[Loss],
    initial: Path | None = None,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.float64,
    **table: Any,
) -> Trainer:
    """``initial``: the folder of the first weights."""
    optim = {"type": "sgd", "lr": 0.05, "weight_decay": 0.0, "max_norm": None}
    config = TrainerConfig.model_validate({"device": "cpu", "optim": optim} | table)
    model = load_model(folder, config, lora and Lora(lora)).to(dtype)
    losses = installed_losses().with_rl(loss(PluginConfig()))
    made: dict[str, Any] = {"kernel": kernel_of(config), "maker": maker_of(config)}
    return Trainer(model, losses, config, 20, initial=initial or folder, **made)


def hugging_face(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def logprobs(model: PreTrainedModel, row: MicroBatch) -> Tensor:
    """[T] of each document alone; 0 for its first token."""
    found = []
    for ids in torch.tensor(row.token_ids, dtype=torch.int64).split(row.sequence_lengths.tolist()):
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found += [ids.new_zeros(1), logits.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.fixture
def rows(pack: Any, random_documents: Any) -> list[list[MicroBatch]]:
    """Four batches of two rows."""
    return [
        [pack(random_documents(LENGTHS, seed=10 * step + row)) for row in range(2)]
        for step in range(4)
    ]


def train(trainer: Trainer, batches: Sequence[list[MicroBatch]], first: int = 1) -> Any:
    """Metrics of the last."""
    return [trainer.train_step(step, batch) for step, batch in enumerate(batches, first)][-1]


def test_a_kl_to_the_first_weights_is_that_of_transformers(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]]
) -> None:
    trainer = make_trainer(model_dir, Anchored)
    train(trainer, rows[:2])
    trainer.model.save_pretrained(tmp_path / "now")
    first, now = hugging_face(model_dir), hugging_face(tmp_path / "now")
    terms, kls = [], []
    for row in rows[2]:
        mask = torch.from_numpy(row.loss_mask)
        pi = logprobs(now, row)
        kl = k3(logprobs(first, row).detach() - pi)
        terms.append((kl - torch.from_numpy(row.advantages) * pi)[mask])
        kls += [float(kl.detach()[at].mean()) for at in SAMPLED]
    torch.cat(terms).mean().backward()
    found = trainer.train_step(3, rows[2])
    assert found["initial_logprobs"] == pytest.approx(sum(kls) / len(kls), rel=1e-6)
    assert found["initial_logprobs"] > 1e-3
    for name, after in weights(trainer).items():
        parameter = dict(now.named_parameters())[name]
        expected = parameter - 0.05 * parameter.grad
        assert torch.allclose(after, expected, rtol=0, atol=1e-8)


def test_without_a_change_of_the_weights_the_kl_is_zero(
    model_dir: Path, rows: list[list[MicroBatch]]
) -> None:
    optim = {"type": "sgd", "lr": 1e-40, "weight_decay": 0.0}
    trainer = make_trainer(model_dir, Both, optim=optim, ema_decay=0.5)
    found = train(trainer, rows)
    assert (found["initial_logprobs"], found["ema_logprobs"]) == (0.0, 0.0)


@pytest.mark.parametrize("saved", [[], ["norm"]])
def test_the_first_weights_of_an_adapter_are_its_base_and_take_no_copy(
    model_dir: Path, rows: list[list[MicroBatch]], saved: list[str]
) -> None:
    lora = LoraConfig(rank=4, modules_to_save=saved)
    trainer = make_trainer(model_dir, Anchored, Path("is/not/read"), lora)
    trains = [p.requires_grad for p in trainer.model.parameters()]
    train(trainer, rows[:2])
    base = hugging_face(model_dir)
    row = rows[2][0]
    with torch.no_grad():
        with trainer.references.within("initial_logprobs"):
            found = trainer.forward(row)[1]
        moved = trainer.forward(row)[1]
        order = trainer.row(row).origins
        mask = torch.from_numpy(row.loss_mask)[order]
        expected = logprobs(base, row)[order][mask]
    assert torch.allclose(found[mask], expected, atol=1e-6)
    assert (moved[mask] - expected).abs().max() > 1e-3
    assert [p.requires_grad for p in trainer.model.parameters()] == trains


def test_the_average_is_a_sum_over_the_weights_of_every_batch(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]]
) -> None:
    """0.7^3 w0 + 0.3 (0.49 w1 + 0.7 w2 + w3)"""
    trainer = make_trainer(model_dir, Averaged, ema_decay=0.7)
    history = [weights(trainer)]
    for step, batch in enumerate(rows[:3], 1):
        trainer.train_step(step, batch)
        history.append(weights(trainer))
    shares = (0.343, 0.147, 0.21, 0.3)
    oracle = hugging_face(model_dir)
    oracle.load_state_dict(
        {n: sum(s * w[n] for s, w in zip(shares, history, strict=True)) for n in history[0]},
        strict=False,
    )
    expected = []
    trainer.model.save_pretrained(tmp_path / "now")
    now = hugging_face(tmp_path / "now")
    with torch.no_grad():
        for row in rows[3]:
            pi, average = logprobs(now, row), logprobs(oracle, row)
            expected += [k3(average - pi)[at].mean() for at in SAMPLED]
    found = trainer.train_step(4, rows[3])["ema_logprobs"]
    assert found == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert found > 1e-4


def test_a_resumed_run_compares_with_the_same_weights(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]]
) -> None:
    table: Any = {"dtype": torch.float32, "ema_decay": 0.7}
    straight, first = (make_trainer(model_dir, Both, **table) for _ in range(2))
    expected = train(straight, rows)
    train(first, rows[:2])
    checkpoint = Checkpoint(tmp_path / "checkpoint" / "step_2")
    checkpoint.weights.mkdir(parents=True)
    first.model.save_pretrained(checkpoint.weights)
    checkpoint.trainer.mkdir()
    write_shard(checkpoint.trainer, snapshot(first, 2))
    resumed = make_trainer(checkpoint.weights, Both, model_dir, **table)
    restore(resumed, checkpoint)
    found = train(resumed, rows[2:], 3)
    ours = {name: found[name] for name in ("initial_logprobs", "ema_logprobs", "loss/mean")}
    assert ours == {name: expected[name] for name in ours}
    pairs = zip(weights(resumed).values(), weights(straight).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_nothing_is_kept_or_computed_where_no_loss_reads_it(
    model_dir: Path, rows: list[list[MicroBatch]]
) -> None:
    trainer = make_trainer(model_dir, Neither, Path("is/not/read"))
    calls: list[str] = []
    trainer.policy.register_forward_hook(lambda *_: calls.append("forward"))
    train(trainer, rows[:2])
    assert len(calls) == 2 * 2
    assert not trainer.references.average


def test_what_a_loss_reads_and_the_run_does_not_have_is_refused(
    model_dir: Path, rows: list[list[MicroBatch]]
) -> None:
    with pytest.raises(ConfigError, match=r"reads ema_logprobs, and trainer\.ema_decay is not"):
        train(make_trainer(model_dir, Averaged), rows[:1])
