"""The trainer's bench for a GPU runs on CPU too, unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))


def test_it_measures_long_and_packed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    from bench import gpu_trainer

    arguments = ["--shape", "tiny", "--tokens", "64", "--steps", "1", "--warmup", "0"]
    gpu_trainer.main([*arguments, "--settings", "recompute"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert [*told] == ["long, recompute", "packed, recompute"]
    for found in told.values():
        rate = found["perf/throughput"]
        assert rate == pytest.approx(2 * 64 / found["step_seconds"])
        assert "perf/mfu" not in found  # nobody knows a CPU's peak


def test_packed_rows_are_full_and_long_ones_one_sequence() -> None:
    from bench import gpu_trainer

    rng = np.random.default_rng(0)
    assert gpu_trainer.lengths_of("long", 640, rng) == [640]
    packed = gpu_trainer.lengths_of("packed", 640, rng)
    assert sum(packed) == 640
    assert len(packed) >= 8
    assert all(20 <= length < 80 for length in packed[:-1])
