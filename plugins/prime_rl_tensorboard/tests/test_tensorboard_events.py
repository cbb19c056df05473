"""The event file, read back by TensorBoard itself."""

import math

import pytest
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prime_rl_tensorboard import TensorBoardConfig, TensorBoardMonitor, register_observers
from prime_rl_tensorboard.events import masked_crc


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_every_scalar_at_its_step(tmp_path):
    monitor = TensorBoardMonitor(TensorBoardConfig(), tmp_path)
    monitor.log(1, {"train/agg/all/reward/mean": 0.25, "time/step": 1.5})
    monitor.log(3, {"train/agg/all/reward/mean": -0.5})
    monitor.log(300, {"loss/mean": 1e-3, "eval/büro/pass@2": 1.0})
    monitor.close()
    assert read(tmp_path / "tensorboard") == {
        "train/agg/all/reward/mean": [(1, 0.25), (3, -0.5)],
        "time/step": [(1, 1.5)],
        "loss/mean": [(300, pytest.approx(1e-3))],
        "eval/büro/pass@2": [(300, 1.0)],
    }


def test_values_that_are_not_finite_are_dropped_and_large_ones_clipped(tmp_path):
    monitor = TensorBoardMonitor(TensorBoardConfig(folder="tb"), tmp_path)
    monitor.log(1, {"nan": math.nan, "inf": math.inf, "large": 1e300, "fine": 2.0})
    monitor.close()
    assert read(tmp_path / "tb") == {"large": [(1, pytest.approx(3.4e38, rel=0.01))],
                                     "fine": [(1, 2.0)]}  # fmt: skip


def test_events_are_readable_during_the_run(tmp_path):
    monitor = TensorBoardMonitor(TensorBoardConfig(), tmp_path)
    monitor.log(1, {"a": 1.0})
    assert read(tmp_path / "tensorboard") == {"a": [(1, 1.0)]}
    monitor.close()


def test_checksums_equal_the_published_vectors():
    """RFC 3720, B.4: CRC-32C of 32 zero bytes is 8a9136aa, of ``123456789`` e3069283."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"123456789", 0xE3069283)):
        rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
        assert masked_crc(data) == (rotated + 0xA282EAD8) & 0xFFFFFFFF


def test_a_folder_outside_the_run_is_refused():
    with pytest.raises(ValidationError):
        TensorBoardConfig(folder="../elsewhere")


def test_it_registers_the_monitor():
    assert register_observers() == [TensorBoardMonitor]
