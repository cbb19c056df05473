"""A step's metrics worked out manually; two real ranks report the same as one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    PluginError,
    TokenMetric,
    log_metric,
)
from prime_rl.registry.calls import running
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.loss import Counts, count_members, row_loss
from prime_rl.trainer.metrics import StepMetrics, statistics, summarize
from prime_rl.trainer.packed_row import make_row, ratio_tokens
from prime_rl.wire import MicroBatch

CPU = torch.device("cpu")


class Gradient(Loss):
    """-A * t over the member tokens; reports the size of the credit, and logs it per token."""

    name = "gradient"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        credit = inputs.advantages[inputs.loss_mask]
        log_metric("credit", credit.mean(), weight=inputs.loss_mask.sum())
        log_metric("tokens", len(credit))
        loss = (-inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
        return LossOutputs(loss, {"credit": TokenMetric(inputs.advantages, inputs.loss_mask)})


def micro_batch(lengths: list[int], envs: tuple[str, ...], ids: list[int], **streams: Any) -> Any:
    """Documents whose first token is the prompt; log μ is -1 wherever the policy sampled."""
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    columns = {name: np.asarray(column, np.float32) for name, column in streams.items()}
    return MicroBatch(
        token_ids=np.arange(len(mask), dtype=np.int32) + 1,
        loss_mask=mask,
        inference_logprobs=np.where(mask, -1, 0).astype("f4"),
        sequence_lengths=np.array(lengths, np.int32),
        temperatures=np.ones(len(lengths), np.float32),
        env_ids=np.array(ids, np.uint16),
        envs=envs,
        **({"advantages": mask.astype(np.float32)} | columns),
    )


def rows_of_the_step() -> list[MicroBatch]:
    """Two algorithms in two envs, of unequal lengths, in rows that hold different envs; the last
    row trains nothing."""
    return [
        micro_batch([4, 3], ("a", "b"), [0, 1]),
        micro_batch([6], ("b",), [0], advantages=[0, 2, 2, 2, 2, 2]),
        micro_batch(
            [3, 2], ("a", "c"), [0, 1], rl_weights=[0, 1, 1, 0, 0], ce_weights=[0, 0, 0, 0, 1]
        ),
        micro_batch([2], ("a",), [0], rl_weights=[0, 0]),
    ]


def observe(numbers: list[int], counts: Counts) -> StepMetrics:
    """What a rank with some of the rows sees. log π of the token at place p of row r is
    -1 + 0.1 (r + 1) p, its entropy r + p / 10."""
    metrics = StepMetrics(counts)
    for number in numbers:
        batch = rows_of_the_step()[number]
        row = make_row(batch, CPU)
        places = torch.from_numpy(row.origins).float()
        logprobs = -1 + 0.1 * (number + 1) * places
        losses = installed_losses().with_rl(Gradient(PluginConfig()))
        loss = row_loss(row, logprobs, losses, counts)
        metrics.observe(row, logprobs, number + places / 10, loss, ratio_tokens(row, losses))
        metrics.add_max("peak", torch.tensor(float(number)))
        metrics.add_sum("rows", torch.tensor(1.0))
    return metrics


def k3(gap: float) -> float:
    return math.exp(gap) - gap - 1


def flat(by_env: dict[str, list[float]]) -> list[float]:
    return [value for values in by_env.values() for value in values]


def test_metrics_of_two_envs_two_algorithms_and_unequal_lengths() -> None:
    found = observe([0, 1, 2, 3], count_members(rows_of_the_step(), installed_losses())).result()
    # Sampled tokens that train, as (row, place): row 0 has a at 1-3 and b at 5-6, row 1 has b at
    # 1-5, row 2 has a at 1-2 (rl) and c at 4 (ce), row 3 none.
    a = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2)]
    b = [(0, 5), (0, 6), *((1, place) for place in range(1, 6))]
    entropy = {"a": [r + p / 10 for r, p in a], "b": [r + p / 10 for r, p in b], "c": [2.4]}
    gaps = {"a": [k3(0.1 * (r + 1) * p) for r, p in a], "b": [k3(0.1 * (r + 1) * p) for r, p in b]}
    for name, by_env in (("entropy", entropy), ("mismatch_kl", gaps)):
        for env, values in {**by_env, "all": flat(by_env)}.items():
            seen = {key: found.pop(f"{name}/{env}/{key}") for key in ("mean", "median", "std")}
            seen |= {key: found.pop(f"{name}/{env}/{key}") for key in ("min", "max")}
            assert seen == pytest.approx({
                "mean": np.mean(values), "median": np.median(values), "std": np.std(values),
                "min": min(values), "max": max(values),
            }, abs=1e-5)  # fmt: skip
    # rl: N = 5 + 7 = 12, every log π is negative: -A t; ce: N = 1, -t = -(-1 + 0.3 * 4) = -0.2
    rl = [
        sum(1 - 0.1 * p for p in (1, 2, 3, 5, 6)) / 12,  # 3.3 / 12
        sum(2 * (1 - 0.2 * p) for p in range(1, 6)) / 12,  # 4 / 12
        sum(1 - 0.3 * p for p in (1, 2)) / 12,  # 1.1 / 12
    ]
    shares = np.array([rl[0], rl[1], rl[2] - 0.2])  # the row that trains nothing has none
    assert found.pop("kl_ent_ratio/mean") == pytest.approx(
        np.mean(flat(gaps)) / np.mean(flat(entropy))
    )
    assert found == pytest.approx({
        "loss/rl": sum(rl), "loss/ce": -0.2, "loss/mean": sum(rl) - 0.2,
        "loss/median": np.median(3 * shares), "loss/std": np.std(3 * shares),
        "loss/min": 3 * min(shares), "loss/max": 3 * max(shares),
        # over sequences with members: a has two, of credit 1; b one of 1 and one of 2
        # over 12 tokens, five of them of credit 2; over the three rows with members of rl
        "plugin/gradient/credit": 17 / 12, "plugin/gradient/tokens": 4.0,
        "credit": 1.25, "credit/a/mean": 1.0, "credit/b/mean": 1.5,
        "ce/nll": -0.2, "ce/nll/c/mean": -0.2, "logprob_gap/max": 1.0, "peak": 3.0, "rows": 4.0,
        "tokens/rl": 12.0, "tokens/rl/a": 5.0, "tokens/rl/b": 7.0,
        "tokens/ce": 1.0, "tokens/ce/c": 1.0,
    }, abs=1e-5)  # fmt: skip


class Masking(Loss):
    """Leaves out the tokens of credit 2; a call for each sequence, or one for the row."""

    name = "masking"
    reads = ("advantages", "policy_lag")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        masked = (inputs.advantages == 2) & inputs.loss_mask
        loss = (-inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
        return LossOutputs(loss, {"is_masked": TokenMetric(masked.float(), inputs.loss_mask)})


class MaskingAtOnce(Masking):
    token_wise = True


@pytest.mark.parametrize("loss_class", [Masking, MaskingAtOnce])
def test_ratio_gap_and_masked_share_by_the_lag_of_the_tokens(loss_class: type[Loss]) -> None:
    """Row 0: lags 0 0 3 of a sequence and 3 of another; row 1: lag 3. log π - log μ is 0.1 at lag 0
    and 0.2, 0.3 and 0.4 at lag 3. No policy is known for the last token of row 1."""
    rows = [
        (micro_batch([4, 2], ("a", "b"), [0, 1], advantages=[0, 2, 1, 2, 0, 1]),
         [-1, 0, 0, 3, -1, 3], [0, 0.1, 0.1, 0.2, 0, 0.3]),
        (micro_batch([3], ("a",), [0]), [-1, 3, -1], [0, 0.4, 9.0]),
    ]  # fmt: skip
    batches = []
    for batch, lag, _ in rows:
        streams = {"policy_lag": np.array(lag, np.int32)}
        batches.append(replace(batch, streams=streams))
    losses = installed_losses().with_rl(loss_class(PluginConfig()))
    counts = count_members(batches, losses)
    metrics = StepMetrics(counts)
    for batch, (_, _, gaps) in zip(batches, rows, strict=True):
        row = make_row(batch, CPU)
        gap = torch.tensor(gaps)[torch.from_numpy(row.origins)]
        logprobs = row.inference_logprobs + gap
        loss = row_loss(row, logprobs, losses, counts)
        metrics.observe(row, logprobs, gap, loss, ratio_tokens(row, losses))

    found = {name: value for name, value in metrics.result().items() if "policy_lag/" in name}
    old = [0.2, 0.3, 0.4]
    assert found == pytest.approx({
        "policy_lag/0/importance_ratio": math.exp(0.1), "policy_lag/0/mismatch_kl": k3(0.1),
        "policy_lag/3/importance_ratio": np.mean(np.exp(old)),
        "policy_lag/3/mismatch_kl": np.mean([k3(gap) for gap in old]),
        "policy_lag/0/is_masked": 1 / 2, "policy_lag/3/is_masked": 1 / 3,
    }, rel=1e-4)  # fmt: skip


def test_a_batch_of_one_age_has_no_metrics_by_lag() -> None:
    streams = {"policy_lag": np.array([-1, 2, 2, 2], np.int32)}
    batch = replace(micro_batch([4], ("a",), [0]), streams=streams)
    losses = installed_losses().with_rl(Masking(PluginConfig()))
    counts = count_members([batch], losses)
    metrics = StepMetrics(counts)
    row = make_row(batch, CPU)
    loss = row_loss(row, row.inference_logprobs, losses, counts)
    metrics.observe(row, row.inference_logprobs, row.inference_logprobs, loss, np.arange(1, 4))
    assert not [name for name in metrics.result() if name.startswith("policy_lag")]


SPLITS = [[[0, 1], [2, 3]], [[3], [2, 0, 1]]]
"""Rows by rank: other envs and components on each; one rank with nothing that trains."""


def test_two_ranks_report_the_same_as_one(tmp_path: Path) -> None:
    """Real processes over gloo."""
    import warm
    from waiting import LIMIT  # the ranks run this file outside of pytest

    ranks = [
        warm.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=LIMIT)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    one = observe([0, 1, 2, 3], count_members(rows_of_the_step(), installed_losses())).result()
    for number in range(2):
        *splits, failed = json.loads((tmp_path / f"{number}.json").read_text())
        for found in splits:
            assert found == pytest.approx(one, abs=1e-5)
        expected = "plugin/gradient/weight: a weight is -1.0, expected at least 0"
        assert failed == {"error": expected}


def a_rank(rank: int, folder: Path) -> None:
    """One of two processes: its rows' part of the step, and what it then knows of the whole."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = []
    for split in SPLITS:
        counts = count_members(
            [rows_of_the_step()[number] for number in split[rank]], installed_losses()
        )
        found.append(observe(split[rank], counts).result())
    with running("gradient"):
        log_metric("weight", 1.0, weight=torch.tensor(-1.0 if rank else 1.0))
    try:
        StepMetrics(counts).result()
    except PluginError as error:  # on both ranks, though one alone has logged it
        found.append({"error": str(error)})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_a_logged_tensor_that_is_not_finite_makes_its_metric_so_and_no_other() -> None:
    with running("mine"):
        log_metric("ratio", torch.tensor(math.inf))
        log_metric("ratio", 1.0)
        log_metric("gap", torch.tensor(2.0, dtype=torch.bfloat16), weight=3)
        log_metric("gap", 1.0, weight=torch.tensor(1))
        log_metric("none", torch.tensor(math.nan), weight=0.0)
    found = StepMetrics(Counts({}, 0)).result()
    logged = {name: value for name, value in found.items() if name.startswith("plugin/")}
    assert logged == {"plugin/mine/ratio": math.inf, "plugin/mine/gap": 1.75}
    assert not any(name.startswith("plugin/") for name in StepMetrics(Counts({}, 0)).result())


def test_statistics_of_what_is_not_finite_are_not_finite_and_of_nothing_are_none() -> None:
    assert statistics(np.zeros(0), "x") == {}
    found = statistics(np.array([1.0, math.inf, 2.0]), "x")
    assert found["x/max"] == found["x/mean"] == math.inf
    assert (found["x/min"], found["x/median"]) == (1.0, 2.0)
    assert math.isnan(statistics(np.array([1.0, math.nan]), "x")["x/median"])


if __name__ == "__main__":
    a_rank(int(sys.argv[1]), Path(sys.argv[2]))


def test_a_maximum_may_be_below_zero() -> None:
    metrics = StepMetrics(count_members([], installed_losses()))
    for value in (-5.0, -2.0, -3.0):
        metrics.add_max("peak", torch.tensor(value))
    assert metrics.result()["peak"] == -2.0


def test_several_optimizer_steps_report_means_over_the_steps_not_sums() -> None:
    """Twice the same step: what is a mean stays, and what counts tokens counts both minibatches."""
    counts = count_members(rows_of_the_step(), installed_losses())
    step = observe([0, 1, 2, 3], counts)
    once = summarize([step])
    minibatches = summarize([step, step])
    epochs = summarize([step, step], epochs=2)
    losses = [name for name in once if name.startswith("loss/")]
    assert {"loss/mean", "loss/median", "loss/min", "loss/max", "loss/std"} <= {*losses}
    assert once["loss/max"] > 0 > once["loss/min"]
    for name in [*losses, "rows", "peak"]:
        assert minibatches[name] == pytest.approx(once[name]), name
    assert once["rows"] == 4
    tokens = [name for name in counts.metrics() if once[name]]
    assert tokens
    for name in tokens:
        assert minibatches[name] == 2 * once[name], name
        assert epochs[name] == once[name], name  # the second epoch sees the same tokens
