"""``dataset``: demonstrations as rollouts, and errors that name the bad line."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from prime_rl import ConfigError, SourceRequest
from prime_rl.testing import FakeHost
from prime_rl_samplers import Dataset
from prime_rl_samplers.dataset import DatasetConfig
from prime_rl_samplers.messages import conversation

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "BA"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "C"},
]


def written(tmp_path, *records):
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


async def source(host=None, **config):
    made = Dataset(DatasetConfig(**config))
    await made.setup(host or FakeHost(env="demos"))
    return made


async def shown(made, example=0, group_id=7, version=3):
    (rollout,) = await made.group(SourceRequest(group_id, example, version))
    return rollout


def text(sample, mask=True):
    return "".join(chr(token) for token in sample.token_ids[sample.loss_mask == mask])


async def test_a_conversation_trains_the_assistants_messages(tmp_path):
    made = await source(path=written(tmp_path, {"messages": CHAT, "id": 4}))
    rollout = await shown(made)
    (sample,) = rollout.samples
    assert (text(sample), text(sample, False)) == ("BAC", "Sabc")
    assert not sample.inference_logprobs.any()
    assert rollout.task == {"id": 4, "prompt": CHAT[:2]}
    assert rollout.num_turns == 2


async def test_a_demonstration_has_no_logprobs_and_no_rewards(tmp_path):
    made = await source(path=written(tmp_path, {"prompt": "ab", "completion": "BA"}))
    rollout = await shown(made, group_id=9, version=5)
    assert (rollout.env, rollout.example_id, rollout.group_id) == ("demos", 0, 9)
    assert (rollout.source, rollout.is_live, rollout.has_logprobs) == ("dataset", False, False)
    assert (rollout.reward, rollout.rewards, rollout.policy_version) == (0.0, {}, 5)
    assert rollout.info["demonstration"].endswith("demos.jsonl:1")
    assert rollout.samples[0].advantages is None


async def test_prompt_and_completion_may_be_text_or_messages(tmp_path):
    made = await source(
        path=written(
            tmp_path,
            {"prompt": "ab", "completion": "BA"},
            {"prompt": CHAT[:2], "completion": [CHAT[2]]},
            {"prompt": "ab", "completion": CHAT[2]},
        )
    )
    assert made.num_examples == 3
    assert [text((await shown(made, i)).samples[0]) for i in range(3)] == ["BA"] * 3
    assert [text((await shown(made, i)).samples[0], False) for i in range(3)] == ["ab", "Sab", "ab"]


async def test_examples_keep_the_order_of_the_file_and_blank_lines_count_as_lines(tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_text(
        '\n{"prompt": "x", "completion": "1"}\n\n{"prompt": "y", "completion": "2"}\r\n\n'
    )
    made = await source(path=path)
    assert made.num_examples == 2
    second = await shown(made, 1)
    assert text(second.samples[0]) == "2"
    assert second.info["demonstration"].endswith("demos.jsonl:4")
    assert made.task(1) == {
        "prompt": [{"role": "user", "content": "y"}],
        "completion": "2",
    }


async def test_every_group_is_new(tmp_path):
    made = await source(path=written(tmp_path, {"prompt": "ab", "completion": "BA"}))
    first, second = await shown(made), await shown(made)
    first.task["prompt"] = "gone"
    first.assign_weights("ce", [0.5, 0.5])
    first.freeze()
    assert second.samples[0].ce_weights is None
    assert not np.shares_memory(first.samples[0].token_ids, second.samples[0].token_ids)
    assert (await shown(made)).task["prompt"] == [{"role": "user", "content": "ab"}]


async def test_a_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    written(tmp_path, {"prompt": "ab", "completion": "BA"})
    monkeypatch.chdir(tmp_path)
    assert (await source(path="demos.jsonl")).num_examples == 1


async def test_a_field_of_the_envs_tasks_answers_their_prompt():
    tasks = [
        {"prompt": "ab", "answer": "BA", "level": 1},
        {"prompt": CHAT[:2], "answer": [CHAT[2]], "level": 2},
    ]
    made = await source(FakeHost(env="demos", tasks=tasks), demo_key="answer")
    assert made.num_examples == 2
    first, second = await shown(made, 0), await shown(made, 1)
    assert (text(first.samples[0]), text(first.samples[0], False)) == ("BA", "ab")
    assert (text(second.samples[0]), text(second.samples[0], False)) == ("BA", "Sab")
    assert (first.task["level"], second.task["level"]) == (1, 2)
    assert first.task["prompt"] == [{"role": "user", "content": "ab"}]


def test_a_message_may_have_only_tool_calls():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert conversation([CHAT[1], call], "user", "") == [CHAT[1], call]
    with pytest.raises(ConfigError, match=r"x\[0\]: content: expected text, got NoneType None"):
        conversation([{**call, "tool_calls": []}], "user", "x")


# -- bad input ---------------------------------------------------------------------------------

GOOD = {"prompt": "ab", "completion": "BA"}
REPLY = {"role": "assistant", "content": "BA"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "expected a JSON object, .* got list"),
        ({"prompt": "ab"}, r"expected {\"messages\": .* got keys prompt"),
        ({"messages": CHAT, "completion": "x"}, "expected .* got keys completion, messages"),
        ({"completion": "x"}, "got no field 'prompt', expected it among completion"),
        ({"messages": 3}, "messages: expected text or a list of messages, got int 3"),
        (
            {"messages": ["hi"]},
            r"messages\[0\]: expected a message \(role, content\), got str 'hi'",
        ),
        (
            {"messages": [{"role": "bot", "content": ""}]},
            r"messages\[0\]: role: expected .* got str 'bot'",
        ),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]: role: .* got NoneType None"),
        (
            {"messages": [CHAT[1], {"role": "assistant", "content": [1]}]},
            r"messages\[1\]: content: expected text, got list \[1\]",
        ),
        (
            {"messages": CHAT[:2]},
            "expected at least one message of the assistant to learn from, got system, user",
        ),
        ({"messages": []}, "expected .* got no messages"),
        ({"prompt": "ab", "completion": [CHAT[1]]}, "expected .* to learn from, got user, user"),
        ({"messages": [REPLY, *CHAT]}, "the first message is the assistant's"),
        ({"messages": [REPLY]}, "the first message is the assistant's"),
        ({"messages": [CHAT[1], REPLY | {"weight": 0}]}, r"messages\[1\]: weight: got int 0, and"),
        (
            {"messages": [CHAT[1], REPLY | {"reasoning_content": 5}]},
            r"messages\[1\]: reasoning_content: expected text",
        ),
        (
            {"prompt": "a\ud800", "completion": "b"},
            "no tokenizer takes these messages: .*surrogate",
        ),
    ],
)
async def test_a_bad_line_is_named(tmp_path, record, message):
    path = written(tmp_path, GOOD, record)
    where = r"^env 'demos': algo\.sampling\.source\.path: .*demos\.jsonl:2: "
    with pytest.raises(ConfigError, match=where + message):
        await source(path=path)


async def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"demos\.jsonl:2: expected JSON, got b'\{\"prompt\": '"):
        await source(path=path)


async def test_an_empty_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"env 'demos'.*demos\.jsonl is empty"):
        await source(path=written(tmp_path))
    with pytest.raises(ConfigError, match=r"env 'demos'.*cannot read .*nowhere\.jsonl: No such"):
        await source(path=tmp_path / "nowhere.jsonl")


async def test_a_demonstration_without_tokens_to_learn_from_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"demos\.jsonl:2: expected tokens .* got none among 2"):
        await source(path=written(tmp_path, GOOD, {"prompt": "ab", "completion": ""}))
    with pytest.raises(ConfigError, match=r"demos\.jsonl:1: expected tokens"):
        await source(path=written(tmp_path, {"prompt": "ab", "completion": ""}))


async def test_a_task_without_the_demonstration_is_named():
    host = FakeHost(env="demos", tasks=[{"prompt": "p", "answer": "a"}, {"prompt": "q"}])
    with pytest.raises(
        ConfigError, match=r"env 'demos': .*demo_key: example 0: got no field 'demo'"
    ):
        await source(host, demo_key="demo")
    with pytest.raises(ConfigError, match="example 1: got no field 'answer', expected it among pr"):
        await source(host, demo_key="answer")


@pytest.mark.parametrize(
    ("config", "got"), [({}, "neither"), ({"path": "x", "demo_key": "y"}, "both")]
)
def test_exactly_one_origin_of_demonstrations_is_required(config, got):
    with pytest.raises(ValidationError, match=f"expected one of path and demo_key, got {got}"):
        DatasetConfig(**config)


def test_demonstrations_feed_only_ce():
    assert Dataset.feeds == {"ce"}


LOOK = {"type": "function", "function": {"name": "look"}}
CALLS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "BA"},
]


async def test_the_tools_of_a_line_are_in_its_prompt(tmp_path):
    made = await source(path=written(tmp_path, {"messages": CALLS, "tools": [LOOK]}))
    (sample,) = (await shown(made)).samples
    assert (text(sample), text(sample, False)) == ("BA", "lookab7")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": CALLS}, r"demos.jsonl:1: messages call tools, and there is no 'tools'"),
        ({"messages": CALLS, "tools": []}, "there is no 'tools'"),
        ({"messages": CALLS, "tools": "look"}, "tools: expected a list of .*got str 'look'"),
        ({"messages": CALLS, "tools": [{"name": "look"}]}, "tools: expected a list of"),
        ({"messages": CALLS, "tools": {"a": 1}}, "tools: expected a list of .*got dict"),
    ],
)
async def test_calls_without_tools_and_wrong_tools_are_refused(tmp_path, line, said):
    with pytest.raises(ConfigError, match=said):
        await source(path=written(tmp_path, line))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("look", "expected a list, got str 'look'"),
        ({"name": "look"}, "expected a list, got dict"),
        (["look"], r"\[0\]: expected {\"type\": .*got str 'look'"),
        ([{"function": "look"}], r"\[0\]: expected {\"type\""),
        ([{"function": {"name": 5}}], r"\[0\]: expected {\"type\""),
        ([{"function": {}}], r"\[0\]: expected {\"type\""),
        *(
            (
                [{"function": {"name": "look", "arguments": arguments}}],
                r"\[0\]: arguments: expected",
            )
            for arguments in ("{a", "", "5", '"x"', "[1]", "null", None, 5, [1])
        ),
    ],
)
async def test_calls_that_no_tool_could_take_are_refused(tmp_path, calls, said):
    """They would train the policy to write what the harness answers with an error."""
    messages = [CALLS[0], CALLS[1] | {"tool_calls": calls}, *CALLS[2:]]
    with pytest.raises(ConfigError, match=r"demos.jsonl:1: messages\[1\]: tool_calls.*" + said):
        await source(path=written(tmp_path, {"messages": messages, "tools": [LOOK]}))


@pytest.mark.parametrize("name", ["find", "Look", "look ", ""])
async def test_a_call_of_a_tool_that_the_line_lacks_is_refused(tmp_path, name):
    calls = [{"function": {"name": "look"}}, {"function": {"name": name}}]
    messages = [CALLS[0], CALLS[1] | {"tool_calls": calls}, *CALLS[2:]]
    said = rf"demos.jsonl:1: messages\[1\]: tool_calls: .*\(look\), got str '{name}'"
    with pytest.raises(ConfigError, match=said):
        await source(path=written(tmp_path, {"messages": messages, "tools": [LOOK]}))


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', "{}", {}])
async def test_arguments_may_be_a_table_or_its_text(tmp_path, arguments):
    call = {"function": {"name": "look", "arguments": arguments}}
    messages = [CALLS[0], CALLS[1] | {"tool_calls": [call]}, *CALLS[2:]]
    assert await source(path=written(tmp_path, {"messages": messages, "tools": [LOOK]}))


async def test_an_error_of_the_renderer_names_the_line(tmp_path, monkeypatch):
    made = await source(path=written(tmp_path, GOOD, GOOD))

    def fails(*_):
        raise TypeError("a template's error")

    monkeypatch.setattr(made._host, "supervised_samples", fails)
    with pytest.raises(
        ConfigError, match=r"demos\.jsonl:2: the renderer cannot .*TypeError: a tem"
    ):
        await shown(made, 1)


@pytest.mark.parametrize(
    ("odd", "tools"),
    [
        (CALLS, [LOOK]),
        ([CALLS[0], {**CALLS[1], "content": None}, *CALLS[2:]], [LOOK]),
        ([*CHAT[:2], CHAT[2] | {"reasoning_content": "x"}], None),
        (CHAT[1:3], None),
    ],
)
async def test_the_first_row_of_each_form_is_rendered_before_the_first_step(odd, tools):
    """A row in the middle whose form the renderer cannot write does not wait for its step."""
    plain = {"prompt": "x", "conversation": {"messages": CHAT}}
    table = {"messages": odd} | ({} if tools is None else {"tools": tools})
    rows = [plain] * 5 + [{"prompt": "x", "conversation": table}] + [plain] * 5
    host = FakeHost(env="demos", tasks=rows)
    rendered = []
    render = host.supervised_samples

    def fails_at_the_odd_one(messages, tools=None):
        rendered.append(messages)
        if list(messages) == odd:
            raise TypeError("a template's error")
        return render(messages, tools)

    host.supervised_samples = fails_at_the_odd_one
    with pytest.raises(ConfigError, match=r"example 5: the renderer cannot render it"):
        await source(host, demo_key="conversation")
    assert len(rendered) == 2


async def test_a_file_may_begin_with_a_byte_order_mark_and_have_any_character(tmp_path):
    path = tmp_path / "demos.jsonl"
    lines = [
        '{"prompt": "a\u2028b", "completion": "\u0085"}',
        "",
        '{"prompt": "c", "completion": "d"}',
    ]
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    made = await source(path=path)
    assert made.num_examples == 2
    assert text((await shown(made)).samples[0], False) == "a\u2028b"


@pytest.mark.parametrize(
    ("roles", "trained"),
    [
        (("assistant",), "BAC"),
        (("assistant", "user"), "abBAcC"),
        (("user",), "abc"),
        (("system",), "S"),
        ("all", "SabBAcC"),
    ],
)
async def test_the_roles_choose_whose_tokens_train(tmp_path, roles, trained):
    made = await source(path=written(tmp_path, {"messages": CHAT}), roles=roles)
    (sample,) = (await shown(made)).samples
    assert text(sample) == trained


async def test_roles_that_no_message_has_leave_nothing_to_learn(tmp_path):
    with pytest.raises(ConfigError, match="expected tokens of the assistant to learn from"):
        await source(path=written(tmp_path, {"messages": CHAT}), roles=("tool",))


async def test_a_task_may_have_the_whole_conversation():
    tasks = [{"prompt": "shown in reports", "conversation": {"messages": CHAT}}]
    made = await source(FakeHost(env="demos", tasks=tasks), demo_key="conversation")
    rollout = await shown(made)
    assert text(rollout.samples[0]) == "BAC"
    assert rollout.num_turns == 2
