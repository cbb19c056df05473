"""Results of earlier attempts that a crash or an editor has damaged."""

import json

import pytest

from prime_rl_evals.evaluation import EvalLog, began_with

GOOD = {
    "step": 4,
    "when": "during",
    "env": "held",
    "policy_version": 4,
    "reward": 0.5,
    "num_rollouts": 8,
    "num_failed": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"reward": "high"},
        {"reward": None},
        {"when": 3},
        {"env": ["held"]},
        {"metrics": [1]},
        {"shown": {}},
        {"policy_version": 1.5},
    ],
    ids=str,
)
def test_a_result_of_another_shape_is_left_out(tmp_path, change):
    lines = [GOOD, {**GOOD, **change}, {**GOOD, "step": 8, "policy_version": 8}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "evals.jsonl").write_text(text + "[]\nnull\n{}\n")
    results = EvalLog(tmp_path).results["during"]
    assert [each.policy_version for each in results] == [4, 8]


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"first_step": "a"}', "3"])
def test_a_launch_of_another_shape_ends_no_resume(tmp_path, text):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "launch.attempt_1.json").write_text(text)
    assert began_with(tmp_path, 7) == 0
    (tmp_path / "configs" / "launch.attempt_1.json").write_text('{"first_step": 5}')
    assert began_with(tmp_path, 7) == 4
