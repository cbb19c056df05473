"""The token export, read back in both formats; nothing if it is off."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch
from prime_rl_observers.token_export import JsonLines, TokenExport, TokenExportConfig

CPU = torch.device("cpu")
ON = {"token_export": {"enabled": True}}
FIELDS = [
    *("schema_version", "step", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx"),
    *("env_name", "token_ids", "position_ids", "loss_mask", "advantages", "inference_logprobs"),
    *("trainer_logprobs", "entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio"),
    *("prob_delta", "is_masked", "is_masked_high", "is_masked_low"),
    *("rl_weights", "ce_weights", "ref_kl_weights"),
]


class Masking(Loss):
    """Drops tokens that grew likelier under a positive advantage, and reports no lows."""

    name = "masking"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        grown = inputs.trainer_logprobs.detach() > inputs.inference_logprobs
        dropped = inputs.loss_mask & grown & (inputs.advantages > 0)
        loss = torch.where(inputs.loss_mask & ~dropped, -inputs.trainer_logprobs, 0.0).sum()
        reported = {"is_masked": dropped, "is_masked_high": dropped}
        return LossOutputs(
            loss, {name: TokenMetric(d.float(), inputs.loss_mask) for name, d in reported.items()}
        )


class OneByOne(Masking):
    """The same, sequence by sequence."""

    token_wise = False


class Silent(Masking):
    """Reports nothing."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(super().__call__(inputs).loss, {})


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    parquet = importlib.import_module("pyarrow.parquet")
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


def export(
    tmp_path: Path,
    micro_batches: list[MicroBatch],
    logprobs: list[Any],
    entropies: list[Any],
    rl: type[Loss] = Masking,
    **table: Any,
) -> list[dict[str, Any]]:
    """Through the exporter with these logprobs and entropies, in the micro batches' own order."""
    observer = TokenExport(TokenExportConfig(enabled=True, **table))
    losses = installed_losses().with_rl(rl(PluginConfig()))
    observer.started(cast(Any, SimpleNamespace(losses=losses)), tmp_path)
    counts = count_members(micro_batches, losses)
    for micro_batch, pi, entropy in zip(micro_batches, logprobs, entropies, strict=True):
        row = make_row(micro_batch, CPU)
        ours = torch.tensor(np.asarray(pi, np.float32)[row.origins])
        result = row_loss(row, ours, losses, counts)
        uncertain = torch.tensor(np.asarray(entropy, np.float32)[row.origins])
        observer.row_trained(
            3,
            micro_batch=micro_batch,
            row=row,
            logprobs=ours,
            entropies=uncertain,
            calls=result.calls,
        )
    directory = tmp_path / "token_exports/step_3"
    assert not (directory / "STABLE").exists()
    observer.step_trained(3, {})
    assert (directory / "STABLE").exists()
    return rows_of(next(directory.glob("rank_0.*")))


def mixed(pack: Any) -> MicroBatch:
    """rl in the first sequence, nothing in the second, ref_kl and ce in the third."""
    return pack(  # type: ignore[no-any-return]
        [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
        envs=("echo", "math"),
        env_ids=[1, 1, 0],
        inference_logprobs=np.log([1, 0.25, 0.5, 1, 1, 1, 0.5, 0.25, 1]),
        advantages=[0, 2, -1, 0, 0, 0, 0, 0, 0],
        rl_weights=[0, 1, 1, 0, 0, 0, 0, 0, 0],
        ce_weights=[0, 0, 0, 0, 0, 0, 0, 0, 0.5],
        ref_kl_weights=[0, 0, 0, 0, 0, 0, 1, 1, 0],
        ref_logprobs=[-1] * 9,
    )


LOGPROBS = np.log([0.1, 0.5, 0.25, 0.1, 0.1, 0.1, 0.25, 0.5, 0.125])
ENTROPIES = [9, 1, 2, 9, 9, 9, 3, 4, 5]


def rounded(values: list[Any] | None) -> list[Any] | None:
    return values and [v if v is None or isinstance(v, bool) else round(v, 5) for v in values]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("rl", [Masking, OneByOne])
def test_every_field(format: str, rl: type[Loss], tmp_path: Path, pack: Any) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    batches = [mixed(pack), mixed(pack)]
    rows = export(tmp_path, batches, [LOGPROBS] * 2, [ENTROPIES] * 2, rl, format=format)
    assert [list(row) for row in rows] == [FIELDS] * 4
    facts = [[row[name] for name in FIELDS[:7]] for row in rows]
    assert facts == [
        [1, 3, 0, 0, 0, 0, "math"],
        [1, 3, 0, 0, 2, 1, "echo"],
        [1, 3, 0, 1, 0, 2, "math"],
        [1, 3, 0, 1, 2, 3, "echo"],
    ]
    half, quarter, two = round(math.log(0.5), 5), round(math.log(0.25), 5), round(math.log(2), 5)
    rl_row, other = ({name: row[name] for name in FIELDS[7:]} for row in rows[:2])
    up = {"kl": round(2 - math.log(2) - 1, 5), "log": two, "ratio": 2.0, "delta": 0.25}
    down = {"kl": round(0.5 + math.log(2) - 1, 5), "log": -two, "ratio": 0.5, "delta": -0.25}
    assert {name: rounded(values) for name, values in rl_row.items()} == {
        "token_ids": [1, 2, 3],
        "position_ids": [0, 1, 2],
        "loss_mask": [False, True, True],
        "advantages": [0, 2, -1],
        "inference_logprobs": [0, quarter, half],
        "trainer_logprobs": [None, half, quarter],
        "entropy": [None, 1, 2],
        "mismatch_kl": [None, up["kl"], down["kl"]],
        "log_importance_ratio": [None, up["log"], down["log"]],
        "importance_ratio": [None, up["ratio"], down["ratio"]],
        "prob_delta": [None, up["delta"], down["delta"]],
        "is_masked": [None, True, False],
        "is_masked_high": [None, True, False],
        "is_masked_low": None,  # this loss does not report it
        "rl_weights": [0, 1, 1],
        "ce_weights": [0, 0, 0],
        "ref_kl_weights": [0, 0, 0],
    }
    assert {name: rounded(values) for name, values in other.items()} == {
        "token_ids": [6, 7, 8, 9],
        "position_ids": [0, 1, 2, 3],
        "loss_mask": [False, True, True, True],
        "advantages": [0, 0, 0, 0],
        "inference_logprobs": [0, half, quarter, 0],
        "trainer_logprobs": [None, quarter, half, round(math.log(0.125), 5)],
        "entropy": [None, 3, 4, 5],
        "mismatch_kl": [None, down["kl"], up["kl"], None],
        "log_importance_ratio": [None, down["log"], up["log"], None],
        "importance_ratio": [None, down["ratio"], up["ratio"], None],
        "prob_delta": [None, down["delta"], up["delta"], None],
        "is_masked": [None, True, False, None],  # ref_kl drops what fell by more than 0.2
        "is_masked_high": [None] * 4,
        "is_masked_low": None,
        "rl_weights": [0, 0, 0, 0],
        "ce_weights": [0, 0, 0, 0.5],
        "ref_kl_weights": [0, 1, 1, 0],
    }


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_does_not_exist_is_null(format: str, tmp_path: Path, pack: Any) -> None:
    """ce alone compares no policies, plain rows carry no weights, and numbers may overflow."""
    if format == "parquet":
        pytest.importorskip("pyarrow")
    ce = pack([[1, 2]], rl_weights=[0, 0], ce_weights=[0, 1], advantages=[0, 0])
    ce.advantages = None
    plain = pack([[1, 2]], inference_logprobs=[0, -2000], advantages=[0, -1])
    pis, entropies = [[0, -1.0], [0, -1.0]], [[0, 1.0], [0, np.inf]]
    first, second = export(tmp_path, [ce, plain], pis, entropies, Silent, format=format)
    ratios = ("mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta")
    masks = ("is_masked", "is_masked_high", "is_masked_low")
    assert {first[name] for name in (*ratios, *masks, "advantages", "ref_kl_weights")} == {None}
    assert first["trainer_logprobs"] == [None, -1.0]
    weights = ("rl_weights", "ce_weights", "ref_kl_weights")
    assert {second[name] for name in (*masks, *weights)} == {None}
    assert second["importance_ratio"] == second["mismatch_kl"] == [None, None]  # exp(1999)
    assert second["log_importance_ratio"] == [None, 1999.0]
    assert second["entropy"] == [None, None]


def test_a_step_exports_the_logprobs_it_trained_on(
    make_trainer: Callable[..., Trainer], tmp_path: Path, pack: Any, random_documents: Any
) -> None:
    trainer = make_trainer(Masking, ON)
    batches = [pack(random_documents([4, 9, 6])), pack(random_documents([5], seed=1))]
    expected = []
    with torch.no_grad():
        for micro_batch in batches:
            row = make_row(micro_batch, CPU)
            logprobs, entropies = token_logprobs(trainer.model, row)
            packed = np.empty((2, len(micro_batch)))
            packed[:, row.origins] = torch.stack([logprobs, entropies]).numpy()
            ends = np.cumsum(micro_batch.sequence_lengths)[:-1]
            expected += np.split(packed, ends, axis=1)
    trainer.train_step(1, batches)
    rows = rows_of(tmp_path / "token_exports/step_1/rank_0.jsonl")
    assert [len(row["token_ids"]) for row in rows] == [4, 9, 6, 5]
    assert [(row["micro_step"], row["micro_sequence_idx"]) for row in rows] == [
        (0, 0), (0, 1), (0, 2), (1, 0),
    ]  # fmt: skip
    for row, (logprob, entropy) in zip(rows, expected, strict=True):
        assert row["trainer_logprobs"][1:] == pytest.approx(logprob[1:].tolist())
        assert row["entropy"][1:] == pytest.approx(entropy[1:].tolist())
        ratio = np.exp(logprob[1:] + 1.5)
        assert row["importance_ratio"][1:] == pytest.approx(ratio.tolist())
        assert row["is_masked"][1:] == (ratio > 1).tolist()


def test_only_every_interval_and_only_where_it_is_on(
    make_trainer: Callable[..., Trainer], tmp_path: Path, pack: Any
) -> None:
    batch = [pack([[1, 2, 3]])]
    make_trainer(Masking, {}).train_step(1, batch)
    assert not (tmp_path / "token_exports").exists()
    trainer = make_trainer(Masking, {"token_export": {"enabled": True, "interval": 2}})
    for step in (1, 2, 3, 4):
        trainer.train_step(step, batch)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("rank_0.jsonl"))
    assert found == [f"token_exports/step_{step}/rank_0.jsonl" for step in (2, 4)]


def test_a_step_done_again_starts_anew_and_one_that_trains_nothing_is_empty(
    make_trainer: Callable[..., Trainer], tmp_path: Path, pack: Any
) -> None:
    trainer = make_trainer(Masking, ON)
    trainer.train_step(1, [pack([[1, 2, 3]])])
    trainer.train_step(1, [pack([[1, 2], [4, 5]])])
    assert len(rows_of(tmp_path / "token_exports/step_1/rank_0.jsonl")) == 2
    trainer.train_step(1, [pack([[1, 2]], prompt=2)])
    assert (tmp_path / "token_exports/step_1/rank_0.jsonl").read_bytes() == b""
    assert (tmp_path / "token_exports/step_1/STABLE").exists()


def test_several_epochs_export_each_row_once_as_the_first_trained_it(
    make_trainer: Callable[..., Trainer], tmp_path: Path, pack: Any
) -> None:
    trainer = make_trainer(Masking, ON)
    trainer.config = trainer.config.model_copy(update={"epochs": 3})
    rows = [replace(pack([[1 + n, 2, 3]]), minibatch=n) for n in range(2)]
    with torch.no_grad():
        before, _ = token_logprobs(trainer.model, make_row(rows[0], CPU))
    trainer.train_step(1, rows)
    first, second = rows_of(tmp_path / "token_exports/step_1/rank_0.jsonl")
    assert (first["token_ids"], second["token_ids"]) == ([1, 2, 3], [2, 2, 3])
    assert first["trainer_logprobs"][1:] == pytest.approx(before[1:].tolist())


def test_a_full_disk_costs_the_export_of_that_step_and_not_the_run(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    pack: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, batch = make_trainer(Masking, ON), [pack([[1, 2]]), pack([[3, 4]])]
    (tmp_path / "token_exports").write_text("a file where a folder should be")
    assert "optim/grad_norm" in trainer.train_step(1, batch)
    (tmp_path / "token_exports").unlink()
    real, failures = JsonLines.write, iter([False, True])

    def full(self: JsonLines, exported: Any) -> None:
        real(self, exported)
        if next(failures):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    trainer.train_step(2, batch)
    monkeypatch.setattr(JsonLines, "write", real)
    trainer.train_step(3, batch)
    assert [path.name for path in (tmp_path / "token_exports").iterdir()] == ["step_3"]
    first, second = caplog.messages
    assert first.startswith("step 1: no token export, the run goes on: cannot write ")
    assert second.startswith("step 2: ") and second.endswith("No space left on device")


def test_parquet_without_pyarrow_is_refused_with_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prime_rl_observers.token_export.find_spec", lambda name: None)
    TokenExportConfig(enabled=True)
    TokenExportConfig(format="parquet")  # off: nothing to refuse
    with pytest.raises(
        ValueError, match=r"pyarrow is not installed.*prime-rl-observers\[parquet\]"
    ):
        TokenExportConfig(enabled=True, format="parquet")
