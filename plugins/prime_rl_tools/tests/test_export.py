"""``prime-rl export``: rollouts as a data set of messages."""

import json

import pytest

from prime_rl.errors import RunError
from prime_rl.testing import make_group
from prime_rl_app.saved_rollouts import write_rollouts
from prime_rl_tools.conversations import write_conversations


def rollout(example, reward, reply="b", env="a", **fields):
    (made,) = make_group([reward])
    made.env, made.example_id = env, example
    made.messages = [
        {"role": "user", "content": f"ask {example}"},
        {"role": "assistant", "content": reply} | fields.pop("message", {}),
    ]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def run_dir(tmp_path):
    steps = {
        1: [rollout(0, 1.0, "good"), rollout(0, 0.5, "fair"), rollout(1, 0.1, "bad")],
        2: [
            rollout(0, 1.0, "good"),
            rollout(2, 1.0, "long", is_truncated=True),
            rollout(3, 1.0, "", message={"tool_calls": [{"name": "f", "arguments": "{}"}]}),
            rollout(4, 1.0, ""),
            rollout(5, 1.0, "thought", message={"reasoning_content": "hm"}, env="b"),
        ],
    }
    for step, rollouts in steps.items():
        write_rollouts(tmp_path / f"rollouts/step_{step}.msgpack", step, rollouts, {})
    return tmp_path


def written(run_dir, **settings):
    counts = write_conversations(run_dir, run_dir / "out.jsonl", **settings)
    lines = (run_dir / "out.jsonl").read_text().splitlines()
    return counts, [json.loads(line) for line in lines]


def test_good_rollouts_become_conversations_and_the_others_are_counted(run_dir):
    counts, rows = written(run_dir, min_reward=0.5)
    assert [row["messages"][-1]["content"] for row in rows] == ["good", "fair", "thought"]
    assert rows[2]["messages"][-1]["reasoning_content"] == "hm"
    assert (rows[0]["reward"], rows[0]["env"], rows[0]["step"]) == (1.0, "a", 1)
    reasons = dict(counts.left_out)
    assert sum(reasons.values()) == 5 and counts.written == 3
    assert reasons["below the reward"] == reasons["cut off"] == reasons["that occur twice"] == 1


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}


def calling(example, name="f", arguments='{"a": 1}', tools=(TOOL,), number=0):
    made = rollout(example, 1.0, "", tools=list(tools))
    made.messages[1]["tool_calls"] = [
        {"id": f"call_{number}", "name": name, "arguments": arguments}
    ]
    made.messages += [
        {"role": "tool", "content": "one", "tool_call_id": f"call_{number}"},
        {"role": "assistant", "content": f"it is one, {example}"},
    ]
    return made


def test_calls_of_tools_have_openais_form_and_the_tools_beside_them(tmp_path):
    rollouts = [
        calling(0),
        calling(0, number=1),  # the same but for the id
        calling(1, name="unknown"),
        calling(2, arguments="[1]"),
        calling(3, arguments="{"),
        calling(4, tools=()),  # of a file without them
        rollout(5, 1.0, "no call", tools=[TOOL]),
    ]
    write_rollouts(tmp_path / "rollouts/step_1.msgpack", 1, rollouts, {})
    counts, rows = written(tmp_path)
    assert [row["messages"][-1]["content"] for row in rows] == ["it is one, 0", "no call"]
    assert [row["tools"] for row in rows] == [[TOOL], [TOOL]]
    (call,) = rows[0]["messages"][1]["tool_calls"]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert call == {"id": "call_0", "type": "function", "function": function}
    assert rows[0]["messages"][2]["tool_call_id"] == "call_0"
    assert dict(counts.left_out) | {"that are not among the best": 0} == {
        "that occur twice": 1,
        "with a call that no tool can take": 3,
        "that call tools, whose descriptions the file does not have": 1,
        "that are not among the best": 0,
    }


def test_the_best_of_each_example(run_dir):
    counts, rows = written(run_dir, best=1, envs=["a"])
    assert [row["messages"][-1]["content"] for row in rows] == ["good", "bad"]
    assert counts.left_out["that are not among the best"] == 1


def test_an_env_that_the_run_does_not_have(run_dir):
    with pytest.raises(RunError, match="no rollouts of env 'c'; its envs are: a, b"):
        written(run_dir, envs=["c"])


def test_a_run_without_rollouts(tmp_path):
    with pytest.raises(RunError, match="has no saved rollouts"):
        write_conversations(tmp_path, tmp_path / "out.jsonl")
