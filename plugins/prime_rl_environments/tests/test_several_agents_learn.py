"""The configs of several agents learn on the tiny model: held-out words, and the judge's reward."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from waiting import LIMIT

CONFIGS = Path(__file__).parents[3] / "configs/several_agents"
HELD_OUT = "eval/text-reversal/all/reward/mean"


def rows(name: str, folder: Path) -> list[dict[str, float]]:
    """The metrics of a run of one config."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "prime_rl",
            "run",
            str(CONFIGS / f"{name}.toml"),
            "--run.name",
            name,
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    lines = (folder / f"outputs/{name}/metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def column(table: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in table if name in row]


@pytest.mark.slow
def test_both_players_of_a_zero_sum_game_learn_by_their_own_baselines(tmp_path: Path) -> None:
    table = rows("duel", tmp_path)
    before, after = column(table, HELD_OUT)
    assert after > before + 0.1
    white, black = (
        column(table, f"train/reversal-duel/all/agents/{name}/reward/mean")
        for name in ("white", "black")
    )
    assert white == pytest.approx([-each for each in black])  # what one wins, the other loses


@pytest.mark.slow
def test_a_player_learns_against_earlier_versions_of_itself(tmp_path: Path) -> None:
    table = rows("duel_past", tmp_path)
    before, after = column(table, HELD_OUT)
    assert after > before + 0.05
    versions = {*column(table, "past/version")}
    assert versions <= {float(each) for each in range(-1, 41)}
    kept = {path.name for path in (tmp_path / "outputs/duel_past/past").glob("step_*")}
    assert {"step_40"} <= kept
    assert 2 <= len(kept) <= 3  # the newest two, and the one that plays


@pytest.mark.slow
def test_a_judge_and_its_writer_learn_by_different_algorithms(tmp_path: Path) -> None:
    table = rows("judge", tmp_path)
    before, after = column(table, HELD_OUT)
    assert after > before + 0.1
    for agent in ("writer", "judge"):
        rewards = column(table, f"train/reversal-judge/all/agents/{agent}/reward/mean")
        assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.05, agent
