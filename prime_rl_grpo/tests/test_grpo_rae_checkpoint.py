"""The baselines of ``rae`` are part of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl import ConfigError
from prime_rl.testing import make_rollout
from prime_rl_grpo.rae import RAE, RAEConfig


def test_baselines_are_exact_after_a_resume(tmp_path: Path) -> None:
    """d = 0.95: after rewards 1 and 0 the baseline is 0.05, then 0.0475."""
    straight, saved, resumed = (RAE(RAEConfig()) for _ in range(3))
    for algorithm in (straight, saved):
        algorithm.score_group([make_rollout(1.0), make_rollout(0.0)])
    saved.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.baselines["agent"] == pytest.approx(0.0475)
    assert resumed.baselines == straight.baselines
    rollout = make_rollout(1.0)
    resumed.score_group([rollout])
    assert rollout.advantages is not None
    assert rollout.advantages[0] == pytest.approx(1 - 0.0475)
    assert resumed.baselines["someone new"] == 0.0


def test_an_invalid_baseline_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "baselines.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"baselines\.json: not baselines that rae saved"):
        RAE(RAEConfig()).load(tmp_path)
