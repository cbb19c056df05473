"""Several optimizer steps per batch: minibatches, epochs, and the logprobs of the batch's start."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_fixtures import Ratio, kernel_of, maker_of
from transformers import PreTrainedModel

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    RunError,
    TokenMetric,
    TrainerObserver,
)
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.status import Status
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.update import BatchUpdate, plan_updates
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import MEASURED

Make = Callable[..., Trainer]


class OldRatio(Loss):
    """-A * exp(t - old)"""

    name = "old_ratio"
    token_wise = True
    reads = ("advantages", "old_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.old_logprobs is not None and not inputs.old_logprobs.requires_grad
        ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


class Moved(OldRatio):
    """Reports, for each sequence, how far each of its tokens has moved."""

    name = "moved"
    token_wise = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.old_logprobs is not None
        moved = (inputs.trainer_logprobs - inputs.old_logprobs).detach().abs()
        return LossOutputs(super().__call__(inputs).loss, {"moved": moved[inputs.loss_mask]})


class Reporting(Ratio):
    """Reports the mean ratio of each sequence."""

    name = "reporting"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp().detach()
        metrics = {"ratio": TokenMetric(ratio, inputs.loss_mask)}
        return LossOutputs(super().__call__(inputs).loss, metrics)


@pytest.fixture
def make_trainer(make_model: Callable[..., PreTrainedModel]) -> Make:
    """A trainer of the tiny model; each of one seed has the same weights."""

    def make(loss: type[Loss] = Ratio, observers: Any = (), **table: Any) -> Trainer:
        optim = {"type": "sgd", "lr": 0.05, "weight_decay": 0.0} | table.pop("optim", {})
        config = TrainerConfig.model_validate({"device": "cpu", "optim": optim} | table)
        losses = installed_losses().with_rl(loss(PluginConfig()))
        made: dict[str, Any] = {"kernel": kernel_of(config), "maker": maker_of(config)}
        return Trainer(make_model(), losses, config, 20, observers, **made)

    return make


@pytest.fixture
def parts(pack: Any, random_documents: Any) -> list[list[MicroBatch]]:
    """Three minibatches of one, two and one rows, with advantages of either sign."""

    def row(minibatch: int, lengths: Sequence[int], seed: int) -> MicroBatch:
        advantages = np.random.default_rng(seed).normal(size=sum(lengths))
        documents = random_documents(lengths, seed=seed)
        return replace(pack(documents, advantages=advantages), minibatch=minibatch)

    return [[row(0, [9, 5], 1)], [row(1, [7], 2), row(1, [4, 6], 3)], [row(2, [12], 4)]]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(first: Trainer, second: Trainer) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def flat(parts: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
    return [row for part in parts for row in part]


def planned(
    step: int, parts: Sequence[list[MicroBatch]], epochs: int = 1
) -> list[list[MicroBatch]]:
    return [parts[part] for part in plan_updates(step, len(parts), epochs)]


OPTIMIZERS = [{}, {"momentum": 0.9}, {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}]


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
def test_minibatches_are_steps_of_their_own_each_clipped_by_itself(
    make_trainer: Make, parts: list[list[MicroBatch]], optim: dict[str, Any]
) -> None:
    optim = optim | {"max_norm": 0.1}
    together, apart = make_trainer(optim=optim), make_trainer(optim=optim)
    found = together.train_step(4, flat(parts))
    norms = [apart.train_step(4, part)["optim/grad_norm"] for part in parts]
    assert same(together, apart)
    assert min(norms) > 0.1  # clipping took part
    assert [found[f"minibatch/{n}/optim/grad_norm"] for n in (1, 2, 3)] == norms


def test_an_epoch_after_the_first_takes_the_minibatches_in_the_planned_order(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    together, apart = make_trainer(epochs=3), make_trainer()
    together.train_step(2, flat(parts))
    plan = planned(2, parts, 3)
    for rows in plan:
        apart.train_step(2, rows)
    assert len(plan) == 9 and same(together, apart)


def test_the_plan_has_every_minibatch_once_per_epoch_and_shuffles_later_ones() -> None:
    def orders(step: int, epochs: int) -> list[tuple[int, ...]]:
        plan = plan_updates(step, 3, epochs)
        return [tuple(plan[i : i + 3]) for i in range(0, len(plan), 3)]

    assert plan_updates(7, 3, 1) == [0, 1, 2] and plan_updates(7, 1, 3) == [0, 0, 0]
    many = orders(7, 40)
    assert many == orders(7, 40) and many[:20] == orders(7, 20)
    assert many[0] == (0, 1, 2)
    assert all(sorted(order) == [0, 1, 2] for order in many)
    assert len(set(many)) == 6
    assert orders(8, 40) != many


def logprobs_of(model: PreTrainedModel, row: MicroBatch) -> list[torch.Tensor]:
    """By transformers, document by document: log π of every token but the first."""
    documents = np.split(row.token_ids, np.cumsum(row.sequence_lengths)[:-1])
    found = []
    for document in documents:
        ids = torch.as_tensor(document.astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return found


def advantages_of(row: MicroBatch) -> list[torch.Tensor]:
    assert row.advantages is not None
    columns = np.split(row.advantages, np.cumsum(row.sequence_lengths)[:-1])
    return [torch.as_tensor(column[1:]).double() for column in columns]


def train_with_transformers(
    model: PreTrainedModel, plan: Sequence[Sequence[MicroBatch]], rate: float
) -> list[torch.Tensor]:
    """Plain gradient descent on the mean of -A exp(t - old), with old from a copy."""
    start = copy.deepcopy(model)
    for rows in plan:
        model.zero_grad()
        terms = []
        for row in rows:
            with torch.no_grad():
                old = logprobs_of(start, row)
            for t, o, a in zip(logprobs_of(model, row), old, advantages_of(row), strict=True):
                terms.append(-a * (t - o).exp())
        torch.cat(terms).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_ratio_to_the_batchs_start_equals_a_reference_without_packing(
    make_trainer: Make,
    make_model: Callable[..., PreTrainedModel],
    parts: list[list[MicroBatch]],
    epochs: int,
) -> None:
    trainer = make_trainer(OldRatio, epochs=epochs, optim={"max_norm": None})
    trainer.train_step(1, flat(parts))
    plan = planned(1, parts, epochs)
    expected = train_with_transformers(make_model("eager"), plan, 0.05)
    unmoved = make_model().parameters()
    for found, each, before in zip(weights(trainer), expected, unmoved, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=1e-9)
        assert (found - before).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("loss", "num_parts", "epochs", "passes"),
    [(Ratio, 3, 2, 8), (OldRatio, 1, 1, 1), (OldRatio, 1, 3, 3), (OldRatio, 3, 1, 7),
     (OldRatio, 3, 2, 11)],
)  # fmt: skip
def test_old_logprobs_take_one_more_forward_pass_of_later_minibatches_only(
    make_trainer: Make,
    parts: list[list[MicroBatch]],
    loss: type[Loss],
    num_parts: int,
    epochs: int,
    passes: int,
) -> None:
    trainer = make_trainer(loss, epochs=epochs)
    seen: list[bool] = []
    trainer.policy.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    trainer.train_step(1, flat(parts[:num_parts]))
    assert len(seen) == passes
    with_gradient = epochs * len(flat(parts[:num_parts]))
    assert seen == [False] * (passes - with_gradient) + [True] * with_gradient


def test_with_one_optimizer_step_the_ratio_to_the_batchs_start_is_exactly_one(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    trainer = make_trainer(Moved)
    assert trainer.train_step(1, parts[1])["moved"] == 0.0


def test_metrics_of_a_batch_are_over_its_optimizer_steps_and_tokens_count_once(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    together, apart = make_trainer(Reporting, epochs=2), make_trainer(Reporting)
    found = together.train_step(1, flat(parts))
    plan = planned(1, parts, 2)
    each = [apart.train_step(1, rows) for rows in plan]

    def mean(name: str, sizes: Sequence[int] = (1, 1, 1)) -> Any:
        weights = [sizes[rows[0].minibatch] for rows in plan]
        return pytest.approx(np.average([step[name] for step in each], weights=weights))

    assert found["loss/mean"] == mean("loss/mean") and found["loss/rl"] == mean("loss/rl")
    assert found["optim/grad_norm"] == mean("optim/grad_norm")
    tokens, sequences = (12, 14, 11), (2, 3, 1)
    assert found["mismatch_kl/all/mean"] == mean("mismatch_kl/all/mean", tokens)
    assert found["entropy/all/mean"] == mean("entropy/all/mean", tokens)
    assert found["ratio"] == found["ratio/a/mean"] == mean("ratio", sequences)
    assert found["logprob_gap/max"] == max(step["logprob_gap/max"] for step in each)
    assert found["tokens/rl"] == found["tokens/rl/a"] == sum(tokens)
    assert (found["optim/skipped"], found["optim/lr"]) == (0, 0.05)
    trained = 2 * (sum(tokens) + sum(sequences))  # first tokens pass through the model too
    assert found["perf/throughput"] * found["time/forward_backward"] == pytest.approx(trained)
    names = ["entropy/all/mean", "loss/mean", "mismatch_kl/all/mean", "optim/grad_norm", "ratio"]
    shown = {name for name in found if name.startswith("minibatch/")}
    assert shown == {f"minibatch/{n}/{name}" for n in range(1, 7) for name in names}
    for number, step in enumerate(each, 1):
        assert {name: found[f"minibatch/{number}/{name}"] for name in names} == {
            name: step[name] for name in names
        }
    assert not [name for step in each for name in step if name.startswith("minibatch/")]


def test_the_learning_rate_counts_batches(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    table = {"scheduler": {"type": "linear", "warmup_steps": 4}}
    together, apart = make_trainer(epochs=2, **table), make_trainer(**table)
    rates = [together.train_step(step, flat(parts))["optim/lr"] for step in (1, 2)]
    assert rates == [0.05 / 4, 0.05 / 2]
    for step in (1, 2):
        for rows in planned(step, parts, 2):
            apart.train_step(step, rows)
    assert same(together, apart)


def test_progress_goes_over_all_optimizer_steps(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    shares: list[float | None] = []

    class Reports(Status):
        def report(self, state: str, *, progress: float | None = None, **detail: Any) -> None:
            shares.append(progress)

    make_trainer().train_step(1, flat(parts), Reports(None))
    assert shares == pytest.approx([0, 1 / 3, 1 / 2, 2 / 3])


def bad(part: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same rows, with logprobs that make every ratio overflow."""
    return [replace(row, inference_logprobs=np.where(row.loss_mask, -2000, 0)) for row in part]


def test_a_bad_minibatch_is_skipped_alone(
    make_trainer: Make, parts: list[list[MicroBatch]], caplog: pytest.LogCaptureFixture
) -> None:
    table = {"optim": {"type": "adamw", "lr": 1e-2}, "max_bad_steps": 1}
    together, apart = make_trainer(**table), make_trainer(**table)
    metrics = together.train_step(1, [*parts[0], *bad(parts[1]), *parts[2]])
    apart.train_step(1, parts[0])
    apart.train_step(1, parts[2])
    assert same(together, apart)
    assert metrics["optim/skipped"] == pytest.approx(1 / 3) and metrics["optim/lr"] == 1e-2
    assert together.num_bad_steps == 0
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert said.startswith("step 1, optimizer step 2 of 3: the gradient norm is ")
    assert said.endswith("No optimizer step; the others go on.")


def test_a_batch_counts_as_bad_if_none_of_its_optimizer_steps_is_finite(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    trainer = make_trainer(max_bad_steps=2, epochs=2)
    before, worst = weights(trainer), flat([bad(part) for part in parts])
    assert trainer.train_step(1, worst)["optim/skipped"] == 1
    assert trainer.num_bad_steps == 1
    with pytest.raises(RunError, match=r"the 2\. step in a row .* version 1 are intact"):
        trainer.train_step(2, worst)
    assert all(map(torch.equal, before, weights(trainer)))
    trainer = make_trainer(max_bad_steps=2)
    trainer.train_step(1, worst)
    trainer.train_step(2, [*bad(parts[0]), *parts[1], *bad(parts[2])])
    assert trainer.num_bad_steps == 0


def test_a_minibatch_that_trains_nothing_is_skipped_alone(
    make_trainer: Make, pack: Any, parts: list[list[MicroBatch]], caplog: pytest.LogCaptureFixture
) -> None:
    table = {"optim": {"type": "adamw", "lr": 1e-2}}
    together, apart = make_trainer(**table), make_trainer(**table)
    nothing = replace(pack([[1, 2, 3]], prompt=3), minibatch=1)
    metrics = together.train_step(1, [*parts[0], nothing, *parts[2]])
    apart.train_step(1, parts[0])
    apart.train_step(1, parts[2])
    assert same(together, apart)
    assert metrics["optim/skipped"] == pytest.approx(1 / 3)
    assert "step 1, optimizer step 2 of 3: none of the batch's 3 tokens trains" in caplog.text


class Calls(TrainerObserver):
    """Keeps what it sees."""

    name = "calls"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.seen: list[Any] = []
        self.model: PreTrainedModel

    def row_trained(self, step: int, *, micro_batch: MicroBatch, **_: object) -> None:
        self.seen.append(micro_batch.minibatch)

    def step_trained(self, step: int, metrics: Any) -> dict[str, float]:
        assert any(each.grad is not None for each in self.model.parameters())
        self.seen.append("step")
        return {"calls": float(len(self.seen))}

    def bad_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> str:
        self.seen.append(f"bad {micro_batches[0].minibatch}")
        return "Bad."


def test_observers_see_each_row_of_each_epoch_and_the_step_once(
    make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    observer = Calls(PluginConfig())
    trainer = make_trainer(observers=[observer], epochs=2)
    observer.model = trainer.model
    rows = [*parts[0], *bad(parts[1])]
    assert plan_updates(4, 2, 2) == [0, 1, 1, 0]
    metrics = trainer.train_step(4, rows)
    assert observer.seen == [0, 1, 1, "bad 1", 1, 1, "bad 1", 0, "step"]
    assert metrics["calls"] == 9


def test_measured_rows_train_nothing_and_their_loss_is_that_of_the_weights_after_the_step(
    make_trainer: Make, make_model: Callable[..., PreTrainedModel], parts: list[list[MicroBatch]]
) -> None:
    trained, measured = parts[0], [replace(row, minibatch=MEASURED) for row in parts[1]]
    beside, alone = make_trainer(), make_trainer()
    found = beside.train_step(1, [*trained, *measured])
    expected = alone.train_step(1, trained)
    assert same(beside, alone)
    assert found["loss/mean"] == expected["loss/mean"]
    assert found["optim/grad_norm"] == expected["optim/grad_norm"]

    # Ratio: -A * exp(t - mu), the sum over the tokens that train, over their number.
    plain = make_model()
    plain.load_state_dict(alone.model.state_dict())
    total, number = 0.0, 0
    for row in parts[1]:
        ends = np.cumsum(row.sequence_lengths)[:-1]
        masks = np.split(row.loss_mask, ends)
        behind = np.split(row.inference_logprobs, ends)
        columns = zip(logprobs_of(plain, row), advantages_of(row), masks, behind, strict=True)
        for logprobs, advantages, mask, mu in columns:
            trains = torch.as_tensor(mask[1:].copy())
            ratio = (logprobs.detach() - torch.as_tensor(mu[1:].copy())).exp()
            total -= float((advantages * ratio)[trains].sum())
            number += int(trains.sum())
    assert found["validation/loss"] == pytest.approx(total / number, abs=1e-5)
    assert found["validation/tokens"] == number
    assert "validation/loss" not in expected


def test_throughput_counts_all_tokens_of_all_optimizer_steps_and_is_shared_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """40 tokens in 2 s are 20 per second, on 4 ranks 5 each."""
    monkeypatch.setattr("prime_rl.trainer.update.parallel.num_ranks", lambda: 4)
    update = BatchUpdate.__new__(BatchUpdate)
    update.sums = [SimpleNamespace(counts=SimpleNamespace(num_tokens=40))]  # type: ignore[list-item]
    update.step_metrics = [{"loss/mean": 0.5}]
    update.balance = None
    assert update.metrics(2.0) == {
        "loss/mean": 0.5,
        "perf/throughput": 20.0,
        "perf/throughput_per_gpu": 5.0,
        "time/forward_backward": 2.0,
    }


def test_the_time_of_a_batch_is_that_of_all_its_optimizer_steps(
    monkeypatch: pytest.MonkeyPatch, make_trainer: Make, parts: list[list[MicroBatch]]
) -> None:
    """Each reading of the clock is a second later: three steps of a second."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("prime_rl.trainer.update.time", clock)
    assert make_trainer().train_step(1, flat(parts))["time/forward_backward"] == 3.0


def test_what_is_of_one_env_is_a_mean_over_the_optimizer_steps_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Env ``b`` is in two of three: (1 + 2) / 2; what all have, of three."""
    monkeypatch.setattr("prime_rl.trainer.update.summarize", lambda sums, epochs: {})
    update = BatchUpdate.__new__(BatchUpdate)
    update.trainer = SimpleNamespace(config=SimpleNamespace(epochs=1))  # type: ignore[assignment]
    counts = SimpleNamespace(num_tokens=1)
    step: Any = SimpleNamespace(counts=counts, reported=set())
    update.sums = [step] * 3
    update.step_metrics = [
        {"optim/grad_norm": 1.0, "optim/env_weight/a": 6.0},
        {"optim/grad_norm": 2.0, "optim/env_weight/a": 3.0, "optim/env_weight/b": 1.0},
        {"optim/grad_norm": 6.0, "optim/env_weight/a": 0.0, "optim/env_weight/b": 2.0},
    ]
    update.balance = None
    metrics = update.metrics(1.0)
    assert {name: metrics[name] for name in metrics if name.startswith("optim/")} == {
        "optim/grad_norm": 3.0,
        "optim/env_weight/a": 3.0,
        "optim/env_weight/b": 1.5,
    }


@pytest.mark.parametrize(
    ("max_steps", "earlier", "said"),
    [
        (9, 2, "the 3. step in a row that is not finite (trainer.max_bad_steps)"),
        (2, 1, "the 2. step in a row that is not finite, and no step of the run was"),
    ],
)
def test_bad_steps_in_a_row_end_the_run_and_so_does_a_run_of_nothing_else(
    max_steps: int, earlier: int, said: str
) -> None:
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(max_bad_steps=3),
        max_steps=max_steps,
        num_bad_steps=earlier - 1,
        observers=[],
    )
    update = BatchUpdate.__new__(BatchUpdate)
    update.trainer = trainer
    update.step = 2
    update.plan = [0]
    update.num_bad = 1
    update.step_metrics = [{"optim/grad_norm": float("nan"), "loss/mean": 0.5}]
    update.report_bad_step([], "step 2", "")  # one less is logged only
    assert trainer.num_bad_steps == earlier
    with pytest.raises(RunError) as caught:
        update.report_bad_step([], "step 2", "")
    assert said in str(caught.value)
