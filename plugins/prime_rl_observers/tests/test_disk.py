"""Free, used and total space of a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prime_rl import PluginConfig
from prime_rl_observers import Disk


def test_the_disk_under_a_folder(tmp_path: Path) -> None:
    trainer: Any = None
    disk = Disk(PluginConfig())
    disk.started(trainer, tmp_path)
    found = disk.step_trained(1, {})
    free, used, total = (found[f"system/ckpt_disk_{k}_gib"] for k in ("free", "used", "total"))
    assert 0 < free < total and used <= total
    assert found["system/ckpt_disk_free_ratio"] == pytest.approx(free / total)
    disk.started(trainer, tmp_path / "nowhere")
    assert disk.step_trained(1, {}) == {}
