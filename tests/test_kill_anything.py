"""Any process may die or be stopped at any time: the run goes on, with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow


def test_random_faults_leave_frames_and_weights_as_they_are(
    tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m bench.faults`` does the same with thirty."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    from bench import faults

    found = faults.storm(tmp_path, 4, seed=1, popen=warm.Popen)
    assert found["faults"] == 4 and found["restarts"], found
