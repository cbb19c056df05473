"""The exchange between ranks, as one process sees it; ``test_ranks.py`` has the rest."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from prime_rl import ConfigError, WeightsError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.rundir.launch import STORE
from prime_rl.trainer import parallel
from prime_rl.trainer.__main__ import set_up_logging
from prime_rl.trainer.device import choose_device
from prime_rl.trainer.rank import Rank
from prime_rl.trainer.tensor_file import write_stream

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no interface of this name")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_nccl_keeps_to_loopback_unless_an_engine_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    with parallel.joined(Rank(0, 1), torch.device("cpu"), elsewhere):
        pass  # one rank has no group
    assert not any(name in os.environ for name in names)
    parallel._local_store(Rank(0, 2), elsewhere)
    assert [os.environ.get(name) for name in names] == ["lo", None if elsewhere else "lo"]


def test_a_streamed_file_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 5),
        "bfloat": torch.randn(7).bfloat16(),
        "half": torch.tensor([[1.5]], dtype=torch.float16),
        "long": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "without a stride": torch.from_numpy(np.zeros(0, np.int32)),
        "ünïcode": torch.ones(2, dtype=torch.uint8),
    }
    write_stream(tmp_path / "x.safetensors", tensors, iter(tensors.values()))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor)


def test_tensors_are_gathered_to_the_end_although_the_disk_has_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the other ranks would wait in a gathering that rank 0 never joins."""
    gathered: list[float] = []

    def whole(tensor: Tensor, *_: object) -> Tensor:
        gathered.append(float(tensor))
        return tensor

    monkeypatch.setattr(parallel, "_whole", whole)
    monkeypatch.setattr(parallel, "several_ranks", lambda: True)
    monkeypatch.setattr(parallel, "rank", lambda: 0)
    monkeypatch.setattr(parallel, "gather", lambda value, group: [value, None])

    def full_disk(stream: Iterator[Tensor]) -> None:
        next(stream)
        raise OSError("No space left on device")

    tensors = {str(n): torch.tensor(float(n)) for n in range(3)}
    with pytest.raises(OSError, match="No space left"):
        parallel.stream_to_main(tensors, full_disk)
    assert gathered == [0, 1, 2]


def test_a_gathering_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have gone on without rank 0, and would wait for it in another gathering."""

    def no_memory(*_: object) -> Tensor:
        raise RuntimeError("CUDA out of memory")

    def write(stream: Iterator[Tensor]) -> None:
        try:
            next(stream)
        except Exception as error:  # as what writes files does
            raise WeightsError(f"cannot write weights: {error}") from error

    monkeypatch.setattr(parallel, "_whole", no_memory)
    monkeypatch.setattr(parallel, "gather", lambda *_: pytest.fail("the others are elsewhere"))
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory"):
        parallel.stream_to_main({"weight": torch.zeros(1)}, write)


def test_what_stops_rank_0_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def others_say(said: object) -> None:
        monkeypatch.setattr(parallel, "gather", lambda value, group: [said, value])

    monkeypatch.setattr(parallel, "rank", lambda: 1)
    others_say([True, "disk full"])
    with pytest.raises(WeightsError, match="disk full"):
        parallel.on_main(lambda: pytest.fail("rank 1 must not act"))
    others_say([False, "no such key"])  # a retry would not fix it
    with pytest.raises(RuntimeError, match="rank 0: no such key"):
        parallel.on_main(lambda: pytest.fail("rank 1 must not act"))


def test_a_full_disk_is_not_tried_again_when_another_rank_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [None, [True, "disk full"], [False, "no memory"]]
    monkeypatch.setattr(parallel, "gather", lambda value, group: [*said, value])

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(RuntimeError, match="rank 2: no memory"):
        parallel.on_all(lambda: fail(OSError("my disk too")))
    with pytest.raises(KeyError, match="mine"):
        parallel.on_all(lambda: fail(KeyError("mine")))
    said.pop()
    with pytest.raises(WeightsError, match="rank 1: disk full"):
        parallel.on_all(lambda: None)
    with pytest.raises(OSError, match="my disk too"):
        parallel.on_all(lambda: fail(OSError("my disk too")))


@pytest.mark.parametrize(
    ("error", "sent"),
    [(OSError("full"), [True, "full"]), (KeyError("a"), [False, "'a'"])],
)
def test_rank_0_sends_its_error_to_the_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sent: list[object]
) -> None:
    seen: list[object] = []

    def fail() -> None:
        raise error

    def gather(value: object, group: object) -> list[object]:
        seen.append(value)
        return [value]

    monkeypatch.setattr(parallel, "gather", gather)
    with pytest.raises(type(error)):
        parallel.on_main(fail)
    assert seen == [sent]


def test_a_single_rank_gathers_its_own_value_without_waiting() -> None:
    assert not parallel.several_ranks()
    assert (parallel.rank(), parallel.num_ranks()) == (0, 1)
    assert parallel.gather({"a": 1}) == [{"a": 1}]
    done: list[int] = []
    parallel.on_main(lambda: done.append(1))
    assert done == [1]
    with parallel.joined(Rank(), CPU):
        assert not parallel.several_ranks()


@pytest.mark.parametrize("ranks", [3, 1])
def test_replicas_that_do_not_divide_the_ranks_are_refused(ranks: int) -> None:
    reason = f"dp_replicate is 2, which does not divide the trainer's {ranks} ranks"
    with pytest.raises(ValueError, match=reason):
        TrainerConfig.model_validate({"num_ranks": ranks, "dp_replicate": 2})
    with pytest.raises(ConfigError, match=reason):
        TrainerConfig(dp_replicate=2).check_ranks(ranks)
    TrainerConfig(num_ranks=4, dp_replicate=2)


@pytest.mark.parametrize(("ranks", "fitting"), [(3, "1, 3"), (1, "1"), (6, "1, 2, 3, 6")])
def test_rows_over_ranks_that_do_not_divide_all_ranks_are_refused(ranks: int, fitting: str) -> None:
    reason = (
        rf"context_parallel is 4, which does not .* {ranks} ranks. Set it to one of \[{fitting}\]"
    )
    with pytest.raises(ConfigError, match=reason):
        TrainerConfig(context_parallel=4).check_ranks(ranks)


@settings(deadline=None)
@given(
    ranks=st.integers(1, 64),
    replicas=st.integers(1, 16),
    parts=st.integers(1, 16),
    heads=st.integers(1, 64),
    experts=st.integers(1, 256),
)
def test_a_refused_layout_names_all_numbers_that_are_accepted(
    ranks: int, replicas: int, parts: int, heads: int, experts: int
) -> None:
    """And none that is not. A layout is refused if and only if something does not divide."""

    def refused(check: Callable[[TrainerConfig], None], **keys: int) -> str:
        try:
            check(TrainerConfig.model_validate(keys))
        except ConfigError as error:
            return str(error)
        return ""

    def accepted(check: Callable[[TrainerConfig], None], key: str, most: int) -> list[int]:
        return [n for n in range(1, most + 1) if not refused(check, **{key: n})]

    def of_ranks(config: TrainerConfig) -> None:
        config.check_ranks(ranks)

    def of_heads(config: TrainerConfig) -> None:
        num_ranks = config.context_parallel  # they divide
        config.check_layout("a model", num_ranks=num_ranks, num_heads=heads, num_experts=None)

    reason = refused(of_ranks, dp_replicate=replicas)
    assert bool(reason) == (ranks % replicas > 0)
    assert not reason or f"one of {accepted(of_ranks, 'dp_replicate', ranks)}, " in reason
    reason = refused(of_ranks, context_parallel=parts)
    assert bool(reason) == (ranks % parts > 0)
    assert not reason or f"one of {accepted(of_ranks, 'context_parallel', ranks)}, " in reason
    reason = refused(of_heads, context_parallel=parts)
    assert bool(reason) == (heads % parts > 0)
    assert not reason or f"one of {accepted(of_heads, 'context_parallel', heads)}." in reason
    if ranks % replicas:
        return

    def of_experts(config: TrainerConfig) -> None:
        config.check_ranks(ranks)
        config.check_experts(experts, ranks)

    reason = refused(of_experts, dp_replicate=replicas)
    assert bool(reason) == (experts % (ranks // replicas) > 0)
    assert not reason or f"one of {accepted(of_experts, 'dp_replicate', ranks)} with" in reason


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", Rank(0, 2, 0)) == torch.device("cuda", 0)
    assert choose_device("cpu", Rank(1, 2, 1)) == CPU
    with pytest.raises(ConfigError) as caught:
        choose_device("auto", Rank(1, 2, 1))
    assert str(caught.value).startswith(
        "rank 1 of 2 is number 1 on its machine, where torch sees 1 GPUs: ranks cannot share one."
    )


def test_a_model_without_blocks_is_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "several_ranks", lambda: True)
    with pytest.raises(ConfigError, match="no module is one of its blocks"):
        parallel.shard(nn.Linear(2, 2), {"Block"}, CPU, replicas=1)


@pytest.mark.parametrize(("rank", "seen"), [(0, ["of all", "its own"]), (1, ["its own"])])
def test_other_ranks_do_not_log_what_all_ranks_do(
    rank: int, seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    set_up_logging("info", Rank(rank, 2, rank))
    for name, message in (("prime_rl.trainer.loop", "of all"), ("prime_rl.trainer", "its own")):
        record = logging.LogRecord(name, logging.INFO, "", 0, message, None, None)
        for handler in logging.root.handlers:
            handler.handle(record)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == seen
    assert all(line.startswith("[rank 1] ") == (rank == 1) for line in lines)


def test_ranks_of_one_machine_wait_for_a_slow_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's default of five minutes is too short for a large model on a slow disk."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {STORE: str(tmp_path / "store")})
    assert parallel._local_store(Rank(0, 2)).timeout == parallel.TIMEOUT
