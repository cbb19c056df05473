"""One optimizer step in this process: its numbers, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_training import Frames
from trainer_fixtures import Ratio
from transformers import PreTrainedModel

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    PluginError,
    RunError,
    TrainerObserver,
    WireError,
    log_metric,
)
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.status import Status
from prime_rl.trainer import loop, parallel
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loop import Trainer, publish_earlier, train, wait_for_batch
from prime_rl.trainer.metrics import append_metrics
from prime_rl.trainer.model import keeps_gathered
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.packing import use_attention
from prime_rl.trainer.published import Publisher
from prime_rl.wire import MicroBatch, encode_batch

CPU = torch.device("cpu")


@pytest.fixture
def trainer(make_model: Callable[..., PreTrainedModel]) -> Trainer:
    config = TrainerConfig.model_validate({"optim": {"lr": 1e-2}, "device": "cpu"})
    return Trainer(
        make_model(), installed_losses().with_rl(Ratio(PluginConfig())), config, max_steps=20
    )


def on_policy(model: PreTrainedModel, micro_batch: MicroBatch, by: float = 0.0) -> MicroBatch:
    """Give it the model's own logprobs, off by ``by``, as if it had sampled them."""
    with torch.no_grad():
        logprobs = token_logprobs(model, make_row(micro_batch, CPU))[0].numpy() - by
    micro_batch.inference_logprobs = np.where(micro_batch.loss_mask, logprobs, 0).astype("f4")
    return micro_batch


def test_metrics_of_packed_data_are_right(
    trainer: Trainer, pack: Any, random_documents: Any
) -> None:
    documents = random_documents([9, 6, 4])
    row = pack(documents, prompt=2, envs=("math", "code"), env_ids=[0, 1, 1])
    with torch.no_grad():
        entropies = token_logprobs(trainer.model, make_row(row, CPU))[1]
    metrics = trainer.train_step(1, [on_policy(trainer.model, row, by=0.5)])
    assert metrics["tokens/rl"] == 7 + 4 + 2
    assert "tokens/ce" not in metrics
    kl = np.exp(0.5) - 0.5 - 1
    for name in ("all", "math", "code"):
        assert metrics[f"mismatch_kl/{name}/mean"] == pytest.approx(kl, abs=1e-5)
    assert metrics["mismatch_kl/all/max"] == pytest.approx(kl, abs=1e-5)
    assert metrics["logprob_gap/max"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["loss/mean"] == metrics["loss/rl"] == pytest.approx(-np.exp(0.5), abs=1e-5)
    assert metrics["entropy/math/mean"] == pytest.approx(float(entropies[2:9].mean()))
    code = torch.cat([entropies[11:15], entropies[17:19]])
    assert metrics["entropy/code/mean"] == pytest.approx(float(code.mean()))
    everything = (7 * metrics["entropy/math/mean"] + 6 * metrics["entropy/code/mean"]) / 13
    assert metrics["entropy/all/mean"] == pytest.approx(everything)
    assert metrics["optim/lr"] == 1e-2
    assert metrics["perf/throughput"] == pytest.approx(19 / metrics["time/forward_backward"])


def test_metrics_add_up_over_micro_batches(
    trainer: Trainer, pack: Any, random_documents: Any
) -> None:
    rows = [on_policy(trainer.model, pack(random_documents([n], seed=n)), by=b)
            for n, b in ((5, 0.1), (9, 0.3))]  # fmt: skip
    shares: list[float | None] = []

    class Reports(Status):
        def report(self, state: str, *, progress: float | None = None, **detail: Any) -> None:
            shares.append(progress)

    metrics = trainer.train_step(1, rows, Reports(None))
    assert shares == [0.0, 0.5]
    first, second = (np.exp(b) - b - 1 for b in (0.1, 0.3))
    assert metrics["mismatch_kl/all/mean"] == pytest.approx((4 * first + 8 * second) / 12, abs=1e-5)
    assert metrics["mismatch_kl/all/max"] == pytest.approx(second, abs=1e-5)
    assert metrics["loss/mean"] == pytest.approx(
        -(4 * np.exp(0.1) + 8 * np.exp(0.3)) / 12, abs=1e-5
    )


class Logs(Loss):
    """-A t, once per sequence; logs the sequence's tokens."""

    name = "logs"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        log_metric("tokens", inputs.loss_mask.sum())
        log_metric("advantage", inputs.advantages.max(), weight=inputs.loss_mask.sum())
        return LossOutputs((-inputs.advantages * inputs.trainer_logprobs).sum(), {})


class Tokens(TrainerObserver):
    name = "tokens"

    def row_trained(self, step: int, **row: Any) -> None:
        log_metric("row", len(row["logprobs"]), weight=step)


def test_losses_and_observers_log_metrics_of_the_step(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    config = TrainerConfig.model_validate({"device": "cpu"})
    observers = [Tokens(PluginConfig())]
    trainer = Trainer(
        make_model(), installed_losses().with_rl(Logs(PluginConfig())), config, 20, observers
    )
    rows = [
        pack(random_documents([9, 6]), advantages=[1.0] * 9 + [4.0] * 6),
        pack(random_documents([3]), advantages=[2.0] * 3),
    ]
    for step in (1, 2):
        metrics = trainer.train_step(step, [on_policy(trainer.model, row) for row in rows])
        tokens, advantage = metrics["plugin/logs/tokens"], metrics["plugin/logs/advantage"]
        # 8, 5 and 2 tokens were sampled, with advantages 1, 4 and 2
        assert (tokens, advantage) == pytest.approx((15 / 3, 32 / 15))
        assert metrics["plugin/tokens/row"] == (15 + 3) / 2


def test_an_observer_logs_in_row_trained_only(trainer: Trainer, pack: Any) -> None:
    class Late(TrainerObserver):
        name = "late"

        def step_trained(self, step: int, metrics: Any) -> dict[str, float]:
            log_metric("x", 1.0)
            return {}

    trainer.observers = [Late(PluginConfig())]
    with pytest.raises(PluginError, match="no hook, wrapper or loss of a plugin is called here"):
        trainer.train_step(1, [pack([[1, 2, 3]])])


def test_ce_alone_has_no_mismatch(trainer: Trainer, pack: Any) -> None:
    row = pack([[1, 2, 3]], rl_weights=[0, 0, 0], ce_weights=[0, 1, 1])
    metrics = trainer.train_step(1, [row])
    assert not [name for name in metrics if "mismatch" in name or "gap" in name]
    assert metrics["loss/mean"] == metrics["loss/ce"] == pytest.approx(metrics["ce/nll"])
    assert metrics["tokens/ce"] == 2


def test_good_advantages_make_tokens_likelier(
    trainer: Trainer, pack: Any, random_documents: Any
) -> None:
    documents = random_documents([6, 9])

    def nll(step: int) -> float:
        row = pack(documents, rl_weights=np.zeros(15), ce_weights=np.full(15, 1e-9))
        return trainer.train_step(step, [row])["ce/nll"]

    before = nll(1)
    for step in range(2, 8):
        trainer.train_step(step, [on_policy(trainer.model, pack(documents))])
    assert nll(8) < before - 0.3


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_batch_that_trains_nothing_leaves_the_weights_alone(
    rows: int,
    trainer: Trainer,
    pack: Any,
    random_documents: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    documents = random_documents([6, 9])
    first = trainer.train_step(3, [on_policy(trainer.model, pack(documents))])
    assert first["optim/skipped"] == 0
    before = weights(trainer)
    nothing = [pack([[1, 2, 3]], prompt=3)] * rows
    metrics = trainer.train_step(4, nothing)  # the momentum of step 3 must not move them
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert metrics["optim/skipped"] == 1
    assert metrics["loss/mean"] == metrics["optim/grad_norm"] == metrics["optim/lr"] == 0
    assert f"step 4: none of the batch's {3 * rows} tokens trains anything" in caplog.text
    trainer.train_step(5, [on_policy(trainer.model, pack(documents))])
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_a_batch_that_trains_nothing_is_published_and_measured_like_any(
    make_model: Callable[..., PreTrainedModel], pack: Any, tmp_path: Path
) -> None:
    config = TrainerConfig.model_validate({"device": "cpu", "keep_broadcasts": 4})
    trainer = Trainer(
        make_model(), installed_losses().with_rl(Ratio(PluginConfig())), config, max_steps=3
    )
    some, nothing = [pack([[1, 2, 3]])], [pack([[1, 2, 3]], prompt=3)]
    train(trainer, Frames(1, [some, nothing, some]), tmp_path, 1, Status(None))
    versions = [load_file(tmp_path / f"broadcasts/step_{n}/model.safetensors") for n in (1, 2, 3)]
    name = "model.norm.weight"
    assert versions[0].keys() == versions[1].keys()
    assert all(versions[1][key].equal(versions[0][key]) for key in versions[0])
    assert not versions[2][name].equal(versions[1][name])
    assert (tmp_path / "broadcasts/step_2/STABLE").exists()
    lines = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert [line["metrics"]["optim/skipped"] for line in lines] == [0, 1, 0]


def test_a_sample_that_trains_nothing_is_harmless_beside_one_that_does(
    make_model: Callable[..., PreTrainedModel], pack: Any
) -> None:
    """As truncation leaves it: a prompt whose whole completion was cut off."""

    def trained(*documents: list[int], **streams: Any) -> list[torch.Tensor]:
        config = TrainerConfig.model_validate({"optim": {"lr": 1e-2}, "device": "cpu"})
        trainer = Trainer(
            make_model(), installed_losses().with_rl(Ratio(PluginConfig())), config, max_steps=20
        )
        trainer.train_step(1, [pack(documents, prompt=3, **streams)])
        return weights(trainer)

    alone = trained([1, 2, 3, 4, 5])
    beside = trained([1, 2, 3, 4, 5], [1, 2, 3])
    for a, b in zip(alone, beside, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(
    trainer: Trainer, pack: Any
) -> None:
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    row = pack([[1, 2, 3]], inference_logprobs=[0, -2000, -2000])
    trainer.config = trainer.config.model_copy(update={"max_bad_steps": 1})
    with pytest.raises(
        RunError, match=r"step 4: the gradient norm is (nan|inf).*version 3 are intact"
    ):
        trainer.train_step(4, [row])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class OneFrame:
    """A receiver that has one frame, after one vain wait."""

    def __init__(self, frame: bytes) -> None:
        self.answers = [None, memoryview(frame)]

    def receive(self, timeout: float) -> memoryview | None:
        return self.answers.pop(0)

    def announce(self, version: int) -> None: ...

    def close(self) -> None: ...


class Waiting(TrainerObserver):
    """Keeps the steps it waits for."""

    name = "waiting"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.steps: list[int] = []
        self.seconds: list[float] = []

    def waiting(self, step: int, seconds: float) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)


def test_another_steps_batch_is_refused(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status(None)
    for other in (3, 5):
        receiver = OneFrame(encode_batch(other, [pack([[1, 2]])]))
        with pytest.raises(WireError, match=f"batches of step {other}, expected step 4"):
            wait_for_batch(receiver, 4, status)
    assert status.last.waiting_for == "orchestrator (batch 4)"
    observer = Waiting(PluginConfig())
    receiver = OneFrame(encode_batch(4, [pack([[1, 2]])]))
    clock = iter([100.0, 107.5])  # at the start, and after the vain wait
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = wait_for_batch(receiver, 4, status, observers=[observer])
    assert len(found) == 1 and observer.steps == [4]
    assert observer.seconds == [7.5]


def test_half_precision_computes_in_half_and_still_learns_at_a_usual_rate(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    config = TrainerConfig.model_validate(
        {"optim": {"lr": 1e-6, "weight_decay": 0.0}, "device": "cpu", "dtype": "bfloat16"}
    )
    model, batch = make_model().float(), pack(random_documents([9, 5]))
    batch.temperatures[:] = 0.7  # bfloat16 has 0.69921875
    exact, _ = token_logprobs(model, make_row(batch, CPU))
    trainer = Trainer(model, installed_losses().with_rl(Ratio(PluginConfig())), config, max_steps=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    before = [parallel.full(parameter.detach()).clone() for parameter in model.parameters()]
    batch.inference_logprobs = np.where(batch.loss_mask, -4.0, 0.0).astype("f4")
    rounded = make_model()
    for parameter in rounded.parameters():  # rotary frequencies stay float32
        parameter.data = parameter.bfloat16()
    use_attention(rounded, trainer.policy.packing.attention)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, _ = token_logprobs(rounded, make_row(batch, CPU, trainer.policy.packing))
        assert trainer.forward(batch)[1].equal(expected)
    assert 1e-4 < (expected - exact).abs().max() < 0.5  # bfloat16 keeps three digits
    parallel.reshard(trainer.policy)
    keeps_copies: list[bool] = []
    trainer.policy.register_forward_pre_hook(
        lambda *_: keeps_copies.append(torch.is_autocast_cache_enabled())
    )
    metrics = trainer.train_step(1, [batch])
    assert keeps_copies == [False]  # of the weights, until the pass is over
    after = [parallel.full(parameter.detach()) for parameter in model.parameters()]
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    assert math.isfinite(metrics["optim/grad_norm"])


def test_a_metric_that_is_no_number_is_null_on_disk_and_readable(tmp_path: Path) -> None:
    from prime_rl.orchestrator.policy import TrainerStep

    append_metrics(tmp_path / "trainer.jsonl", 3, {"loss/mean": math.nan, "optim/lr": 0.5})
    step = msgspec.json.decode((tmp_path / "trainer.jsonl").read_bytes(), type=TrainerStep)
    assert (step.step, step.metrics) == (3, {"loss/mean": None, "optim/lr": 0.5})


def test_metrics_that_cannot_be_written_end_the_run_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write the metrics of step 3 to .*--resume"):
        append_metrics(tmp_path / "missing" / "trainer.jsonl", 3, {"loss/mean": 1.0})


class Clock:
    """``time`` for the trainer's loop: it stands still but for what advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, seconds: float, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return result

        return call


@pytest.mark.parametrize("has_engines", [False, True])
def test_the_seconds_of_a_step_and_of_what_the_step_before_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_engines: bool
) -> None:
    """A step waits 5 s for its batch, trains 7 s and writes weights 3 s. The engines take them in
    0.5 s and a checkpoint takes 11 s to begin, both after the step's metrics are written. Weights
    move to the device and back in 0.25 and 0.5 s of that."""
    clock = Clock()
    made: list[dict[str, Any]] = []

    class Broadcaster:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            made.append(named)
            self.prepare = clock.takes(3.0)
            self.announce = clock.takes(0.0, 0.5)

        def size(self, version: int) -> float:
            return 2.5 * version

    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "Broadcaster", Broadcaster)
    monkeypatch.setattr(loop, "wait_for_batch", clock.takes(5.0, ["rows"]))
    monkeypatch.setattr(loop, "publish_earlier", lambda *arguments, **named: None)

    def train_step(*arguments: Any) -> dict[str, float]:
        clock.now += 7.0
        return {}

    events: list[Any] = []
    observer: Any = SimpleNamespace(
        started=lambda trainer, run_dir: events.append(run_dir),
        step_done=lambda step, metrics: events.append((step, metrics["time/save_ckpt"])),
    )
    memory = SimpleNamespace(load=lambda: 0.25, unload=lambda: 0.5, give_back=lambda: None)
    trainer: Any = SimpleNamespace(
        config=TrainerConfig.model_validate({"device": "cpu"}),
        observers=[observer],
        memory=memory,
        max_steps=2,
        model=None,
        device=CPU,
        policy=SimpleNamespace(balance=None),
        train_step=train_step,
    )
    checkpointer: Any = SimpleNamespace(
        is_due=lambda step, last: True, save=clock.takes(11.0), wait=lambda status: None
    )
    receiver: Any = SimpleNamespace(announce=None)
    train(
        trainer,
        receiver,
        tmp_path,
        first_step=1,
        status=Status(None),
        checkpointer=checkpointer,
        has_engines=has_engines,
    )
    assert made[0]["is_read"] is has_engines
    assert events == [tmp_path, (1, 11.0), (2, 11.0)]
    lines = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert [line["metrics"] for line in lines] == [
        {
            "time/wait_for_batch": 5.0,
            "time/broadcast_weights": 3.0,
            "time/step": 15.0,
            "time/save_ckpt": 0.0,
            "time/offload": 0.75,
            "perf/broadcast_mib": 2.5,
        },
        {
            "time/wait_for_batch": 5.0,
            "time/broadcast_weights": 3.5,
            "time/step": 15.5,
            "time/save_ckpt": 11.0,
            "time/offload": 0.75,
            "perf/broadcast_mib": 5.0,
        },
    ]


@pytest.mark.parametrize("due", [False, True])
def test_a_stopped_run_saves_its_last_step_unless_that_is_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: bool
) -> None:
    ends: list[Any] = []
    saved: list[int] = []
    batches = iter([["rows"], []])
    broadcaster = SimpleNamespace(
        prepare=lambda step, exact, last: None, announce=lambda last: 0.0, size=lambda step: 0.0
    )
    monkeypatch.setattr(loop, "Broadcaster", lambda *arguments, **named: broadcaster)
    monkeypatch.setattr(loop, "wait_for_batch", lambda *arguments, **named: next(batches))
    monkeypatch.setattr(loop, "publish_earlier", lambda *arguments, **named: None)
    monkeypatch.setattr(
        loop,
        "_end_early",
        lambda trainer, step, **named: ends.append((step, named["checkpointer"])),
    )
    trainer: Any = SimpleNamespace(
        config=TrainerConfig.model_validate({"device": "cpu"}),
        observers=[],
        memory=SimpleNamespace(load=lambda: 0.0, unload=lambda: 0.0, give_back=lambda: None),
        max_steps=9,
        model=None,
        policy=SimpleNamespace(balance=None),
        train_step=lambda *arguments: {},
    )
    checkpointer: Any = SimpleNamespace(
        is_due=lambda step, last: due,
        save=lambda trainer, step, published, status: saved.append(step),
        wait=lambda status: None,
    )
    receiver: Any = SimpleNamespace(announce=None)
    train(
        trainer,
        receiver,
        tmp_path,
        first_step=1,
        status=Status(None),
        checkpointer=checkpointer,
    )
    assert saved == ([1] if due else [])
    assert ends == [(1, None if due else checkpointer)]


def test_the_reference_before_stays_until_engines_have_loaded_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(trainer: Any, publisher: Publisher, column: str, version: int, status: Any) -> None:
        publisher.path(version).mkdir(parents=True)
        publisher.announce(version)

    monkeypatch.setattr(loop, "_publish", write)
    config = TrainerConfig.model_validate({"reference_reset": {"interval": 5}})
    references = SimpleNamespace(version=0)
    trainer: Any = SimpleNamespace(
        config=config, publishes_average=False, publishes_reference=True, references=references
    )
    kept = []
    for step in (4, 5, 6, 10, 15):
        references.version = step - step % 5
        publish_earlier(trainer, tmp_path, step, status=Status(None))
        kept.append(sorted(folder.name for folder in tmp_path.glob("*/step_*")))
    assert kept == [
        [],
        ["step_5"],
        ["step_5"],
        ["step_10", "step_5"],
        ["step_10", "step_15"],
    ]


def test_one_rank_in_half_precision_that_keeps_its_rounded_weights_changes_no_bit(
    make_model: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    """Two steps of three rows, in the second with other weights than were gathered in the first."""
    rows = [pack(random_documents(lengths)) for lengths in ([9, 5], [4, 3], [7])]
    found = []
    for reshards in (True, False):
        settings = {
            "optim": {"lr": 0.01},
            "device": "cpu",
            "dtype": "bfloat16",
            "reshard_after_forward": reshards,
        }
        trainer = Trainer(
            make_model().float(),
            installed_losses().with_rl(Ratio(PluginConfig())),
            TrainerConfig.model_validate(settings),
            max_steps=2,
        )
        assert trainer.policy.keeps_gathered is not reshards
        metrics = [trainer.train_step(step, rows) for step in (1, 2)]
        weights = [parallel.full(each.detach()).clone() for each in trainer.model.parameters()]
        norms = [each["optim/grad_norm"] for each in metrics]
        assert norms[0] != norms[1]
        found.append((weights, norms, [each["loss/mean"] for each in metrics]))

    assert all(a.equal(b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1:] == found[1][1:]


def test_weights_stay_gathered_where_they_take_a_sixteenth_of_the_gpu() -> None:
    auto = TrainerConfig(device="cpu")
    assert keeps_gathered(auto, 5 * 2**30, memory=80 * 2**30)
    assert not keeps_gathered(auto, 5 * 2**30 + 1, memory=80 * 2**30)
    assert not keeps_gathered(auto, 1, memory=0)  # no GPU
    never = TrainerConfig(device="cpu", reshard_after_forward=True)
    always = TrainerConfig(device="cpu", reshard_after_forward=False)
    assert not keeps_gathered(never, 1, memory=80 * 2**30)
    assert keeps_gathered(always, 2**40, memory=0)
