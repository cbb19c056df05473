"""``prime-rl race``: real runs of two algorithms within one budget of tokens."""

import json
from pathlib import Path

import pytest
from commandline import prime_rl

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "reverse_text"
EVAL = '[{id = "reverse-text", args = {split = "held_out"}, num_examples = 8, interval = 1}]'

pytestmark = pytest.mark.slow


def test_two_configs_race_and_a_second_race_knows_the_result(model_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    command = [
        *("race", CONFIGS / "grpo.toml", CONFIGS / "max_rl.toml", "--seeds", 1, "--tokens", 1000),
        *("--json", "--model.warmup_exact", 0.15, "--orchestrator.eval.env", EVAL),
        *("--orchestrator.batch_size", 8, "--orchestrator.group_size", 4),
    ]
    first = prime_rl(*command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    race = json.loads(first.stdout)
    for config in ("grpo", "max_rl"):
        point = race["results"][config]["1"]
        run_dir = tmp_path / "outputs" / "race" / f"{config}-seed1"
        rewards = {
            row["step"]: row["reward"]
            for row in map(json.loads, (run_dir / "evals.jsonl").read_text().splitlines())
        }
        assert point["step"] > 0 and point["reward"] == rewards[point["step"]]
        assert point["before"] == rewards[0]
        assert 0 < point["tokens"] <= 1000
        assert (run_dir / "weights").is_dir()  # it was stopped, not killed
    assert race["pairs"][0]["num_seeds"] == 1 and "too few" in race["pairs"][0]["verdict"]
    assert (tmp_path / "outputs/race/race.png").read_bytes().startswith(b"\x89PNG")

    again = prime_rl(*command, cwd=tmp_path)
    assert json.loads(again.stdout) == race
    assert again.stderr.count("(known)") == 2
