"""Logprobs under the policy's first weights and under their average, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from anchored_training import Anchored, hugging_face, k3, logprobs, make_trainer, train
from torch import Tensor

from prime_rl import ConfigError
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import restore, snapshot, write_shard
from prime_rl.trainer.loop import Trainer
from prime_rl.wire import MicroBatch

LENGTHS = [9, 5]
SAMPLED = (slice(1, 9), slice(10, 14))


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


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.fixture
def rows(pack: Any, random_documents: Any) -> list[list[MicroBatch]]:
    """Four batches of two rows."""
    return [
        [pack(random_documents(LENGTHS, seed=10 * step + row)) for row in range(2)]
        for step in range(4)
    ]


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


RESET: Any = {"reference_reset": {"interval": 2}}
ADAM: Any = {"optim": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.0, "max_norm": None}}


def test_after_a_reset_the_kl_is_to_the_weights_of_that_step(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]]
) -> None:
    trainer = make_trainer(model_dir, Anchored, **RESET)
    metrics = []
    for step, batch in enumerate(rows[:3], 1):
        metrics.append(trainer.train_step(step, batch))
        trainer.model.save_pretrained(tmp_path / str(step))
    of_second, of_third = hugging_face(tmp_path / "2"), hugging_face(tmp_path / "3")
    expected = []
    with torch.no_grad():
        for row in rows[3]:
            kl = k3(logprobs(of_second, row) - logprobs(of_third, row))
            expected += [kl[at].mean() for at in SAMPLED]
    metrics.append(trainer.train_step(4, rows[3]))

    found = metrics[-1]["initial_logprobs"]
    assert found == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert found > 1e-5 and metrics[2]["initial_logprobs"] == 0.0  # pi is the reference there
    assert [each["reference/version"] for each in metrics] == [0, 0, 2, 2]
    assert [each["reference/reset"] for each in metrics] == [0, 1, 0, 1]


def test_after_a_reset_the_run_is_one_that_begins_with_these_weights(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]]
) -> None:
    """Reference and moments are as new; without ``optimizer`` the moments go on."""
    trainer = make_trainer(model_dir, Anchored, dtype=torch.float32, **RESET, **ADAM)
    train(trainer, rows[:2])
    trainer.model.save_pretrained(tmp_path)
    fresh = make_trainer(tmp_path, Anchored, dtype=torch.float32, **ADAM)
    keeps: Any = {"reference_reset": {"interval": 2, "optimizer": False}}
    goes_on = make_trainer(model_dir, Anchored, dtype=torch.float32, **keeps, **ADAM)
    train(goes_on, rows[:2])
    for each in (trainer, fresh, goes_on):
        train(each, rows[2:3], 3)

    ours, new, old = (list(weights(each).values()) for each in (trainer, fresh, goes_on))
    assert all(torch.equal(one, other) for one, other in zip(ours, new, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(ours, old, strict=True))


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_resumes_after_a_reset_goes_on_bit_for_bit(
    model_dir: Path, tmp_path: Path, rows: list[list[MicroBatch]], at: int
) -> None:
    table: Any = {"dtype": torch.float32, **RESET, **ADAM}
    straight, first = (make_trainer(model_dir, Anchored, **table) for _ in range(2))
    expected = train(straight, rows)
    train(first, rows[:at])
    checkpoint = Checkpoint(tmp_path / "checkpoint" / f"step_{at}")
    checkpoint.weights.mkdir(parents=True)
    first.model.save_pretrained(checkpoint.weights)
    checkpoint.trainer.mkdir()
    write_shard(checkpoint.trainer, snapshot(first, at))
    checkpoint.write_reference(first.references.version)
    resumed = make_trainer(checkpoint.weights, Anchored, model_dir, **table)
    restore(resumed, checkpoint)
    found = train(resumed, rows[at:], at + 1)
    ours = {name: found[name] for name in ("initial_logprobs", "reference/version", "loss/mean")}
    assert ours == {name: expected[name] for name in ours}
    pairs = zip(weights(resumed).values(), weights(straight).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
