"""The same seeds give the same frames, byte for byte, and ``replay`` makes them again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from frames import CASES, DIGESTS, STEPS, frames_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_the_orchestrator_sends_the_frames_that_it_has_always_sent(
    case: str, tmp_path: Path
) -> None:
    assert frames_of(case, tmp_path) == json.loads(DIGESTS.read_text())[case]
    assert [step["frames_equal"] for step in replay(tmp_path / "frames")] == [True] * STEPS


def replay(run_dir: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", "from prime_rl.cli import main; main()", "replay"]
    done = warm.run([*command, str(run_dir), "--json"])
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, Any]] = json.loads(done.stdout)
    return steps
