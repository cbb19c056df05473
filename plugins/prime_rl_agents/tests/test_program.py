"""An agent program plays a rollout: what it gets, what it gives, and how it may end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import verifiers.v1 as vf
from aiohttp import web
from loopback import listening
from program_rollouts import ASK, Play, check_tokens, info_of
from scripted_replies import TOKENIZER, ScriptedEngine
from waiting import LIMIT, until

from prime_rl import ConfigError
from prime_rl.env.episode import ModelEndpoint, RolloutResult
from program.harness import KEPT_OUTPUT
from program.models import FrozenTable

# -- what it gets ----------------------------------------------------------------------------


async def test_a_program_gets_the_task_and_its_reply_is_scored(
    play: Play, engine: ScriptedEngine
) -> None:
    engine.script = lambda prompt: prompt.split("user\n")[-1].split("<")[0][::-1]
    result = await play(
        ASK
        + """
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["PRIME_RL_TASK"]))
assert os.getcwd() != os.path.dirname(os.path.abspath(__file__))
assert set(task) == {"id", "prompt", "system", "messages", "row", "models", "mcp_servers"}, task
assert task["row"] == {} and task["models"] == ["policy"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
print("the word is", task["prompt"], file=sys.stderr)
print(chat(task["messages"])["content"])
""",
        id="reverse-text",
        args={"num_examples": 1},
    )
    assert result.ok, result.error
    assert result.reward == 1.0
    (branch,) = result.branches
    assert branch.policy_versions is not None
    assert {v for v in branch.policy_versions if v != -1} == {7, 8}
    word = result.task_fields["prompt"]
    record = info_of(result)
    assert record["exit_code"] == 0
    assert record["stderr"] == f"the word is {word}\n"
    assert record["stdout"] == f"{word[::-1]}\n"
    assert check_tokens(result, engine) == 1


async def test_places_in_the_command_and_variables_of_one_api(play: Play) -> None:
    result = await play(
        ASK
        + """
assert sys.stdin.read() == ""
task = json.load(open(os.environ["PRIME_RL_TASK"]))
prompt, model, url, key, braces = sys.argv[1:]
assert task["prompt"] == prompt
assert [url, key] == [os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]
assert braces == '{"a": {b}}' and model == "scripted"
assert not [name for name in os.environ if name.startswith("ANTHROPIC")]
assert os.environ["MY_SETTING"] == "on"
chat([user(prompt)])
""",
        command=[
            *(sys.executable, "agent.py", "{prompt}", "{model}", "{base_url}", "{api_key}"),
            '{"a": {b}}',
        ],
        dialect="openai",
        env={"MY_SETTING": "on"},
    )
    assert result.ok, result.error


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "it has no command"),
        (["python", "{promt}"], r"harness\.command: .*{promt} is no place"),
    ],
)
async def test_a_command_is_checked_when_the_env_is_made(
    command: list[str], message: str, play: Play
) -> None:
    with pytest.raises(ConfigError, match=message):
        await play("", command=command)


async def test_a_container_gets_the_files_that_it_names(play: Play, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("word = 'helped'")
    code = (
        ASK
        + """
sys.path.insert(0, os.getcwd())
import helper
chat([user("hi")])
print(helper.word)
"""
    )
    result = await play(code, files=["helper.py"])
    assert result.ok, result.error
    assert info_of(result)["stdout"] == "helped\n"


# -- token for token -------------------------------------------------------------------------


SEVERAL_TURNS = """
messages = [user("one")]
for text in ("two", "three"):
    messages += [chat(messages), user(text)]
chat(messages)
"""
SUB_AGENTS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool:
    found = list(pool.map(lambda word: chat([user(word)])["content"], ["red", "green", "blue"]))
chat([user("join " + " ".join(found))])
"""
COMPACTION = """
messages = [user("one")]
messages += [chat(messages), user("two")]
messages += [chat(messages), user("sum up")]
summary = chat(messages)["content"]
chat([user("so far: " + summary)])
"""
TWO_ENDINGS = """
messages = [user("one")]
messages += [chat(messages)]
chat([*messages, user("left")])
chat([*messages, user("right")])
"""


@pytest.mark.parametrize(
    ("code", "samples"),
    [(SEVERAL_TURNS, 1), (SUB_AGENTS, 4), (COMPACTION, 2), (TWO_ENDINGS, 2)],
    ids=["several turns", "parallel sub-agents", "compaction", "two endings"],
)
async def test_what_trains_is_what_the_engine_sampled(
    code: str, samples: int, play: Play, engine: ScriptedEngine
) -> None:
    engine.script = lambda prompt: f"reply to {len(prompt)}"
    result = await play(ASK + code)
    assert result.ok, result.error
    assert check_tokens(result, engine) == samples


CALL = '<tool_call>\n{"name":  "add", "arguments": {"a": 1,   "b": 2.50}}\n</tool_call>'
CHAT_TOOLS = """
add = {"name": "add", "parameters": {"type": "object", "properties": {}}}
tool = {"type": "function", "function": add}
messages = [user("add")]
for _ in range(2):
    reply = chat(messages, tools=[tool])
    (call,) = reply["tool_calls"]
    messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "3.5"}]
ids = {message["tool_calls"][0]["id"] for message in messages if "tool_calls" in message}
assert len(ids) == 2, ids
chat(messages, tools=[tool])
"""
RESPONSES_TOOLS = """
tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
items = [user("add")]
for _ in range(2):
    reply = post("/responses", {"model": "m", "input": items, "tools": [tool]})
    (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3.5"}
    items += [*reply["output"], result]
post("/responses", {"model": "m", "input": items, "tools": [tool]})
"""
EARLIER_RESPONSE = """
tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
body = {"model": "m", "input": "add", "tools": [tool]}
for _ in range(3):
    reply = post("/responses", body)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "3.5"}
        for item in reply["output"] if item["type"] == "function_call"
    ]
    body = {"model": "m", "input": outputs, "tools": [tool], "previous_response_id": reply["id"]}
"""
MESSAGES_TOOLS = """
tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
messages = [{"role": "user", "content": [{"type": "text", "text": "add"}]}]
for _ in range(3):
    body = {"model": "m", "max_tokens": 400, "messages": messages, "tools": [tool]}
    reply = post("/messages", body)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3.5"}
        for block in reply["content"] if block["type"] == "tool_use"
    ]
    messages.append({"role": "assistant", "content": reply["content"]})
    messages.append({"role": "user", "content": results})
"""


@pytest.mark.parametrize(
    "code",
    [CHAT_TOOLS, RESPONSES_TOOLS, EARLIER_RESPONSE, MESSAGES_TOOLS],
    ids=["chat", "responses", "previous_response_id", "messages"],
)
async def test_tool_calls_of_every_api_stay_one_sample(
    code: str, play: Play, engine: ScriptedEngine
) -> None:
    def script(prompt: str) -> str:
        num_results = prompt.count("<tool_response>")
        return "done" if num_results == 2 else f"<think>\n{num_results}\n</think>\n\n{CALL}"

    engine.script = script
    result = await play(ASK + code)
    assert result.ok, result.error
    assert len(engine.bodies) == 3
    assert check_tokens(result, engine) == 1


async def test_a_retry_of_a_failed_call_is_one_turn(play: Play, engine: ScriptedEngine) -> None:
    """As the SDKs retry: the same body, with their count."""
    result = await play(
        ASK
        + """
body = {"model": "m", "messages": [user("one")]}
first = post("/chat/completions", body)
again = post("/chat/completions", body, **{"x-stainless-retry-count": "1"})
assert first == again
"""
    )
    assert result.ok, result.error
    assert (len(engine.bodies), result.num_turns) == (1, 1)
    assert check_tokens(result, engine) == 1


async def test_the_shorter_limit_of_a_reply_counts(play: Play, engine: ScriptedEngine) -> None:
    result = await play(
        ASK
        + """
chat([user("a")], max_tokens=5, temperature=0)
chat([user("b")], max_completion_tokens=50)
chat([user("c")])
post("/messages", {"model": "m", "max_tokens": 6, "messages": [user("d")]})
post("/responses", {"model": "m", "max_output_tokens": 7, "input": "e"})
""",
        max_tokens=20,
    )
    assert result.ok, result.error
    limits = [body["sampling_params"]["max_tokens"] for body in engine.bodies]
    assert limits == [5, 20, 20, 6, 7]
    assert all(body["sampling_params"]["temperature"] == 0.75 for body in engine.bodies)
    assert info_of(result)["ignored"] == ["temperature"]


async def test_a_tool_that_runs_at_a_provider_is_left_out(
    play: Play, engine: ScriptedEngine
) -> None:
    result = await play(
        ASK
        + """
add = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
post("/responses", {"model": "m", "input": "a", "tools": [add, {"type": "web_search"}]})
search = {"type": "web_search_20250305", "name": "web_search"}
post("/messages", {"model": "m", "max_tokens": 9, "messages": [user("a")], "tools": [search]})
"""
    )
    assert result.ok, result.error
    prompts = [TOKENIZER.decode(body["token_ids"]) for body in engine.bodies]
    assert '"add"' in prompts[0]
    assert not any("web_search" in prompt for prompt in prompts)
    ignored = ["tools: web_search", "tools: web_search_20250305"]
    assert info_of(result)["ignored"] == ignored


async def test_what_cannot_be_answered_is_refused_with_a_reason(play: Play) -> None:
    result = await play(
        ASK
        + """
for path, body in [
    ("/chat/completions", {"model": "m", "messages": [user("a")], "n": 2}),
    ("/responses", {"model": "m", "input": "a", "previous_response_id": "resp_1"}),
]:
    try:
        post(path, body)
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["message"])
chat([user("a")])
"""
    )
    assert result.ok, result.error
    lines = info_of(result)["stdout"].splitlines()
    assert lines[0].startswith("400 n = 2: the policy gives one reply per request")
    assert lines[1].startswith("400 previous_response_id 'resp_1' is no reply of this rollout")
    assert result.num_turns == 1


async def test_a_user_who_answers_starts_the_program_again(
    play: Play, engine: ScriptedEngine
) -> None:
    """``reverse-retry``: each try of the user is one start, with the conversation so far."""
    result = await play(
        ASK
        + """
messages = json.load(sys.stdin)["messages"]
roles = [message["role"] for message in messages]
assert roles == ["user", "assistant"] * (len(messages) // 2) + ["user"]
chat(messages)
""",
        id="reverse-retry",
        args={"num_examples": 1, "tries": 3},
    )
    assert result.ok, result.error
    assert result.num_turns == 3
    assert check_tokens(result, engine) == 1


# -- several models --------------------------------------------------------------------------


async def test_a_frozen_model_answers_by_name_and_does_not_train(
    play: Play, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[dict[str, Any], str | None]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((body, request.headers.get("Authorization")))
        message = {"role": "assistant", "content": "good"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "big"}
            | {"choices": [choice], "usage": usage}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    monkeypatch.setenv("JUDGE_KEY", "secret of the judge")
    async with listening(app) as url:
        judge = {"name": "big", "base_url": f"{url}/v1", "api_key_var": "JUDGE_KEY"}
        result = await play(
            ASK
            + """
assert json.load(sys.stdin)["models"] == ["policy", "judge"]
assert "JUDGE_KEY" not in os.environ
answer = chat([user("one")])["content"]
verdict = chat([user("judge " + answer)], model="judge", temperature=0.25)
print(verdict["content"])
""",
            models={"judge": judge},
        )
    assert result.ok, result.error
    (call,) = asked
    assert call[0]["model"] == "big"
    assert call[0]["temperature"] == 0.25
    assert call[1] == "Bearer secret of the judge"
    record = info_of(result)
    assert record["stdout"] == "good\n"
    assert record["models"] == {"judge": {"calls": 1, "input_tokens": 11, "output_tokens": 3}}
    assert result.num_turns == 1
    assert check_tokens(result, engine) == 1


async def test_a_frozen_model_gets_its_headers_and_its_keys_take_turns(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, str | None, str | None]] = []

    async def complete(request: web.Request) -> web.Response:
        names = ("Authorization", "X-Team", "X-Project-Id")
        asked.append(tuple(request.headers.get(name) for name in names))
        message = {"role": "assistant", "content": "good"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "big"}
            | {"choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    for name in ("FIRST_KEY", "SECOND_KEY", "PROJECT"):
        monkeypatch.setenv(name, name.lower())
    async with listening(app) as url:
        judge = {
            "name": "big",
            "base_url": f"{url}/v1",
            "api_key_var": ["FIRST_KEY", "SECOND_KEY"],
            "headers": {"X-Team": "mine"},
            "headers_from_env": {"X-Project-Id": "PROJECT"},
        }
        for _ in range(3):
            asks = ASK + 'print(chat([user("a")])["content"], chat([user("b")], model="judge"))'
            result = await play(asks, models={"judge": judge})
            assert result.ok, result.error

    keys = ["Bearer first_key", "Bearer second_key", "Bearer first_key"]
    assert asked == [(key, "mine", "project") for key in keys]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"headers": {"X-Api-Key": "s3cret"}}, "the header X-Api-Key holds a secret"),
        ({"api_key_var": []}, "api_key_var"),
        ({"api_key_var": ["A", ""]}, "api_key_var"),
        ({"headers_from_env": {"X Team": "TEAM"}}, "name of an HTTP header"),
    ],
)
def test_keys_and_headers_of_a_frozen_model_are_checked(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FrozenTable(name="big", base_url="http://a/v1", **fields)


async def test_a_policy_that_is_asked_for_messages_answers_every_api_itself(play: Play) -> None:
    """``prime-rl eval`` of a model behind an API of its own: there are no tokens to record."""

    async def respond(request: web.Request) -> web.Response:
        assert (await request.json())["model"] == "theirs"
        text = {"type": "output_text", "text": "hi", "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant", "content": [text]}
        return web.json_response(
            {"id": "r", "object": "response", "created_at": 0, "model": "theirs"}
            | {"status": "completed", "output": [message]}
        )

    app = web.Application()
    app.router.add_post("/v1/responses", respond)
    async with listening(app) as url:
        result = await play(
            ASK + 'print(post("/responses", {"model": "m", "input": "a"})["output"][0]["id"])',
            endpoint=ModelEndpoint("theirs", f"{url}/v1", client="chat"),
        )
    assert result.ok, result.error
    assert info_of(result)["stdout"] == "m\n"
    assert result.reward == 2.0


# -- rewards ---------------------------------------------------------------------------------


ROW = {"prompt": "2+3?", "answer": "5"}


@pytest.mark.parametrize(
    ("printed", "rewards"),
    [
        ("0.25", {"program": 0.25}),
        ('{"right": 1, "brief": 0.5}', {"right": 1.0, "brief": 0.5}),
        ("true", {"program": 1.0}),
    ],
)
async def test_the_last_line_may_be_the_reward(
    printed: str, rewards: dict[str, float], play: Play, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW))
    result = await play(
        ASK
        + f"""
task = json.load(sys.stdin)
assert task["row"] == {{"answer": "5"}}, task
chat(task["messages"])
print("some thoughts")
print({printed!r})
print()
""",
        id="program",
        args={"data": "tasks.jsonl"},
        reward="stdout",
    )
    assert result.ok, result.error
    assert result.rewards == rewards
    assert result.reward == sum(rewards.values())


async def test_a_file_may_be_the_reward_and_replaces_the_tasksets(play: Play) -> None:
    result = await play(
        ASK
        + """
chat([user("a")])
open(os.environ["PRIME_RL_REWARD"], "w").write('{"mine": 0.5}')
""",
        reward="file",
    )
    assert result.ok, result.error
    assert result.reward == 0.5
    assert set(result.rewards) > {"mine"}  # the taskset's own terms stay in the record


@pytest.mark.parametrize("printed", ["five", "[1]", '{"a": "b"}', "NaN", "{}", ""])
async def test_what_is_no_number_fails_the_rollout_and_says_so(printed: str, play: Play) -> None:
    result = await play(ASK + f"chat([user('a')])\nprint({printed!r})", reward="stdout")
    assert not result.ok
    assert result.error is not None
    assert "no reward in the last line of its output" in result.error
    assert "expected a number" in result.error


async def test_rows_without_a_reward_are_refused(play: Play, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW))
    result = await play(ASK + "chat([user('a')])", id="program", args={"data": "tasks.jsonl"})
    assert result.error is not None
    assert "the taskset 'program' scores nothing" in result.error


# -- how it may end --------------------------------------------------------------------------


async def test_a_program_that_fails_costs_its_rollout_and_says_why(play: Play) -> None:
    result = await play(ASK + "chat([user('a')])\nraise OSError('disk full')")
    assert not result.ok
    assert result.error_type == "HarnessError"
    assert result.error is not None
    assert "exited 1" in result.error
    assert result.error.endswith("OSError: disk full")
    assert info_of(result)["exit_code"] == 1
    assert "disk full" in info_of(result)["stderr"]


async def test_a_program_that_is_not_there(play: Play) -> None:
    result = await play("", command=["no-such-program"])
    assert result.error is not None
    assert "exited 127" in result.error
    assert "no-such-program" in result.error


async def test_at_the_limit_of_turns_the_rollout_is_scored(play: Play) -> None:
    result = await play(ASK + "while True: chat([user('a')])", max_turns=2)
    assert result.ok, result.error
    assert (result.num_turns, result.stop_condition) == (2, "max_turns")
    assert result.is_truncated
    assert "HTTP Error 400" in info_of(result)["stderr"]


HOUR = 3600.0


async def played_for_an_hour(playing: Awaitable[RolloutResult], begun: Path) -> RolloutResult:
    """The result of a rollout whose program writes the file ``begun`` and then sleeps: an hour
    passes in the event loop as soon as it is there. A rollout that ends before writes no file: its
    result tells why."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(playing)
    await until(lambda: begun.exists() or task.done())
    clock = loop.time
    # Never back: a timer that is set from now on would ring an hour late.
    vars(loop)["time"] = lambda: clock() + HOUR
    async with asyncio.timeout(LIMIT):
        return await task


async def test_at_its_own_limit_of_time_the_rollout_is_scored(
    play: Play, engine: ScriptedEngine, tmp_path: Path
) -> None:
    playing = play(
        ASK
        + f"""
chat([user("a")])
print("waiting", file=sys.stderr, flush=True)
open({str(tmp_path / "begun")!r}, "w").close()
import time; time.sleep(100_000)
""",
        timeout=2 * HOUR,
        reward="stdout",
        harness_timeout=HOUR / 2,
    )
    result = await played_for_an_hour(playing, tmp_path / "begun")
    assert result.ok, result.error
    assert result.stop_condition == "program_timeout"
    assert result.reward == 0.0
    assert info_of(result) | {"stdout": ""} == {
        "exit_code": -1,
        "stdout": "",
        "stderr": "waiting\n",
        "ignored": [],
    }
    assert check_tokens(result, engine) == 1


async def test_at_the_envs_limit_of_time_the_rollout_fails_and_the_program_ends(
    play: Play, tmp_path: Path
) -> None:
    playing = play(
        ASK
        + f"""
chat([user("a")])
with open({str(tmp_path / "half")!r}, "w") as file:
    file.write(str(os.getpid()))
os.rename({str(tmp_path / "half")!r}, {str(tmp_path / "pid")!r})
import time; time.sleep(100_000)
""",
        timeout=HOUR / 2,
    )
    result = await played_for_an_hour(playing, tmp_path / "pid")
    assert not result.ok
    assert result.error_type == "TimeoutError"
    await wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
async def test_the_sdk_tries_again_after_a_failure_of_the_engine(
    play: Play, engine: ScriptedEngine
) -> None:
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        if len(prompts) == 1:
            raise OSError("the engine is restarted")
        return "ok"

    engine.script = script
    result = await play(
        """
from openai import OpenAI
body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
print(OpenAI().chat.completions.create(**body).choices[0].message.content)
"""
    )
    assert result.ok, result.error
    assert (len(prompts), result.num_turns) == (2, 1)
    assert info_of(result)["stdout"] == "ok\n"


async def test_no_more_programs_run_at_once_than_allowed(play: Play, tmp_path: Path) -> None:
    result = await play(
        ASK
        + f"""
os.mkdir({str(tmp_path / "running")!r})
chat([user("a")])
os.rmdir({str(tmp_path / "running")!r})
""",
        max_programs=1,
        times=3,
    )
    assert result.ok, result.error


async def test_an_episode_does_not_begin_while_its_program_has_to_wait(
    play: Play, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers' clock of an episode starts in ``run_episode``."""
    playing: list[Any] = []
    at_each_request = []
    run_episode = vf.Env.run_episode
    reply = engine.script

    async def counted(*args: Any, **named: Any) -> Any:
        playing.append(args)
        try:
            return await run_episode(*args, **named)
        finally:
            playing.pop()

    def script(prompt: list[int]) -> Any:
        at_each_request.append(len(playing))
        return reply(prompt)

    monkeypatch.setattr(vf.Env, "run_episode", counted)
    engine.script = script
    result = await play(ASK + 'chat([user("a")])', max_programs=2, times=5)
    assert result.ok, result.error
    assert len(at_each_request) == 5
    assert max(at_each_request) <= 2


async def test_what_a_program_leaves_running_ends_with_it(play: Play, tmp_path: Path) -> None:
    result = await play(
        ASK
        + """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
print(child.pid)
chat([user("a")])
"""
    )
    assert result.ok, result.error
    await wait_until_gone(int(info_of(result)["stdout"]))


async def test_what_ignores_the_end_of_its_program_is_killed(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("program.harness.GRACE_SECONDS", 0.1)
    result = await play(
        ASK
        + """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a child inherits it
child = subprocess.Popen(["sleep", "1000"])
print(child.pid)
chat([user("a")])
"""
    )
    assert result.ok, result.error
    assert info_of(result)["exit_code"] == 0
    await wait_until_gone(int(info_of(result)["stdout"]))


async def test_output_without_an_end_does_not_fill_the_disk(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("program.harness.MOST_OUTPUT", 100_000)
    monkeypatch.setattr("program.harness.OUTPUT_SECONDS", 0.01)
    result = await play(
        ASK
        + """
import time
written = 0
while os.fstat(1).st_size >= written:  # until it has been shortened
    written += os.write(1, b"x" * 50_000)
    time.sleep(0.001)
while os.fstat(1).st_size == 0:  # its end is about to be written
    time.sleep(0.001)
chat([user("a")])
print("\\n0.25")
""",
        reward="stdout",
    )
    assert result.ok, result.error
    assert result.reward == 0.25
    assert len(info_of(result)["stdout"]) <= KEPT_OUTPUT


async def test_a_program_that_ends_while_its_output_is_shortened_keeps_the_end(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empties_and_waits(path: Path, size: int) -> None:
        real_truncate(path, size)
        time.sleep(0.5)  # the program ends meanwhile

    real_truncate = os.truncate
    monkeypatch.setattr("program.harness.os.truncate", empties_and_waits)
    monkeypatch.setattr("program.harness.MOST_OUTPUT", 100_000)
    monkeypatch.setattr("program.harness.OUTPUT_SECONDS", 0.01)
    result = await play(
        ASK
        + """
import time
chat([user("a")])
written = os.write(1, b"x" * 200_000)
while os.fstat(1).st_size == written:
    time.sleep(0.001)
"""
    )
    assert result.ok, result.error
    assert info_of(result)["stdout"] == "x" * KEPT_OUTPUT


async def test_a_body_that_is_no_json_object_is_refused(play: Play) -> None:
    result = await play(
        ASK
        + """
for body in (b"", b"{", b"[]", b"3", b"\\xff", b"[" * 10**5):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers))
    except urllib.error.HTTPError as error:
        print(error.code, "error" in json.load(error))
chat([user("a")])
"""
    )
    assert result.ok, result.error
    assert info_of(result)["stdout"] == "400 True\n" * 6


async def wait_until_gone(pid: int) -> None:
    def is_gone() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        await until(is_gone)


def test_the_tokenizer_of_the_engine_is_exact() -> None:
    """``check_tokens`` asks the engine again for its reply to a prompt."""
    assert TOKENIZER.decode(TOKENIZER.encode("ab c", add_special_tokens=False)) == "ab c"
