"""What is reported of a complete checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_rl import ObserverHost, PluginConfig
from prime_rl_observers.checkpoints import CheckpointMetrics

Logged = list[tuple[int, dict[str, float]]]


def observer(logged: Logged) -> CheckpointMetrics:
    host = ObserverHost(
        shared=SimpleNamespace(),  # type: ignore[arg-type]
        log=lambda step, metrics: logged.append((step, dict(metrics))),
        num_inflight=lambda: 0,
        environment=lambda: None,
    )
    return CheckpointMetrics(PluginConfig(), host)


def folder_of(path: Path, num_bytes: int) -> Path:
    (path / "trainer").mkdir(parents=True)
    (path / "STABLE").write_bytes(b"12")
    (path / "trainer" / "rank_0.safetensors").write_bytes(bytes(num_bytes - 2))
    return path


async def test_step_size_and_seconds_since_its_batch_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches 1 to 3 leave at 10, 20 and 30 s; the checkpoint of step 2 is complete at 26.5 s."""
    clock = iter([10.0, 20.0, 30.0, 26.5])
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("prime_rl_observers.checkpoints.time", fake)
    logged: Logged = []
    watching = observer(logged)
    for step in (1, 2, 3):
        await watching.batch_leaves(step)
    await watching.checkpoint_complete(2, folder_of(tmp_path / "step_2", 2**21))
    assert logged == [
        (2, {"system/ckpt_step": 2.0, "system/ckpt_gib": 2**-9, "time/ckpt_complete": 6.5})
    ]
    assert list(watching._left) == [3]


async def test_the_checkpoint_that_a_run_resumes_has_no_seconds(tmp_path: Path) -> None:
    logged: Logged = []
    await observer(logged).checkpoint_complete(7, folder_of(tmp_path / "step_7", 2**20))
    assert logged == [(7, {"system/ckpt_step": 7.0, "system/ckpt_gib": 2**-10})]


async def test_a_folder_that_has_been_deleted_has_no_size(tmp_path: Path) -> None:
    logged: Logged = []
    await observer(logged).checkpoint_complete(7, tmp_path / "step_7")
    assert logged == [(7, {"system/ckpt_step": 7.0, "system/ckpt_gib": 0.0})]
