"""The same seeds give the same frames, byte for byte, and ``replay`` makes them again."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from frames import CASES, DIGESTS, STEPS, frames_of

from prime_rl.wire import decode_batch
from prime_rl_app.saved_rollouts import read_step
from prime_rl_tools.replay.compare import frames_of as replayed_frames
from prime_rl_tools.replay.score import read_run_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_the_orchestrator_sends_the_frames_that_it_has_always_sent(
    case: str, tmp_path: Path
) -> None:
    assert frames_of(case, tmp_path) == json.loads(DIGESTS.read_text())[case]
    assert [step["frames_equal"] for step in replay(tmp_path / "frames")] == [True] * STEPS


@pytest.mark.parametrize(("case", "workers"), [("grpo", "1"), ("two_seats", "2")])
def test_environment_workers_change_no_frame(case: str, workers: str, tmp_path: Path) -> None:
    found = frames_of(case, tmp_path, ("--orchestrator.env_workers", workers))
    assert found == json.loads(DIGESTS.read_text())[case]
    status = json.loads((tmp_path / "frames" / "status" / "env_workers.json").read_text())
    assert status["state"] == f"{workers} of {workers} ready"


def test_whitened_credit_has_mean_0_and_deviation_1_over_each_batch_on_the_wire(
    tmp_path: Path,
) -> None:
    """The frames are packed again from the saved rollouts, and have the digests of those sent."""
    sent = frames_of("reinforce_pp", tmp_path)
    for step, digest in enumerate(sent, 1):
        stored = read_step(tmp_path / "frames" / "rollouts" / f"step_{step}.msgpack")
        config = read_run_config(tmp_path / "frames")
        (frame,) = replayed_frames(config, step, stored.kept)
        assert sha256(frame).hexdigest() == digest
        rows = decode_batch(frame)[1]
        credit = np.concatenate([row.advantages[row.loss_mask] for row in rows])
        np.testing.assert_allclose([credit.mean(), credit.std()], [0, 1], atol=1e-5)
        assert len(stored.kept) == 16 and len({r.group_id for r in stored.kept}) > 1


def replay(run_dir: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "replay"]
    done = warm.run([*command, str(run_dir), "--json"])
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, Any]] = json.loads(done.stdout)
    return steps
