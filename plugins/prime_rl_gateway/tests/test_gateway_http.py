"""The gateway over HTTP, with the clients that people have, and what becomes of their sessions."""

from __future__ import annotations

import asyncio
import json
import math
import stat
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from gateway_texts import END, ids_of, text_of
from waiting import LIMIT, Clock, until

from prime_rl import ConfigError

CALL = '<tool_call>\n{"name": "get", "arguments": {"word": "sun"}}\n</tool_call>'
TOOL = {
    "name": "get",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def echo(prompt: str) -> str:
    """Repeats the last thing that was said."""
    last = prompt.rpartition("<|im_start|>user\n")[2].partition(END)[0]
    return f"{last}!{END}"


def check_exact(rollout: Any, policy: Any) -> None:
    """Each sampled token of the policy trains once, after its own prompt and with its logprob."""
    trained: list[tuple[list[int], list[float]]] = []
    for sample in rollout.samples:
        mask = np.flatnonzero(sample.loss_mask)
        for part in np.split(mask, np.flatnonzero(np.diff(mask) > 1) + 1):
            tokens = sample.token_ids[part].tolist()
            logprobs = sample.inference_logprobs[part].tolist()
            trained.append((tokens, logprobs))
            prompt = sample.token_ids[: part[0]].tolist()
            assert (prompt, tokens) in [(p, r) for p, r, _ in policy.sampled]
    # By their first logprob, which each reply has alone.
    trained.sort(key=lambda part: -part[1][0])
    assert trained == [(r, pytest.approx(lp)) for _, r, lp in policy.sampled]


# -- one session ---------------------------------------------------------------------------------


async def test_a_conversation_of_several_turns_is_one_sample_of_exactly_what_was_sampled(
    gateway: Any,
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        assert await running.say(session, ("user", "one")) == "one!"
        said = [("user", "one"), ("assistant", "one!"), ("user", "two")]
        assert await running.say(session, *said) == "two!"
        answer = await running.reward(session, reward=0.5)
        assert answer.json()["status"] == "rewarded"

        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
        (sample,) = rollout.samples
        assert text_of(sample.token_ids[sample.loss_mask]) == f"one!{END}two!{END}"
        assert rollout.reward == 0.5
        assert rollout.num_turns == 2
        assert rollout.is_live
        assert rollout.group_id == 7
        assert rollout.info["session"] == session["id"]
        assert rollout.prompt == "one"
        assert rollout.reply == "two!"


async def test_each_token_has_the_version_that_sampled_it_and_the_rollout_the_first(
    gateway: Any,
) -> None:
    async with gateway(echo, step=3) as running:
        session = await running.open()
        running.policy.version = 3
        await running.say(session, ("user", "a"))
        running.policy.version = running.host.step = 4
        await running.say(session, ("user", "a"), ("assistant", "a!"), ("user", "b"))
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group(version=4)
    (sample,) = rollout.samples
    assert sample.policy_versions is not None
    assert sample.policy_versions[sample.loss_mask].tolist() == [3, 3, 3, 4, 4, 4]
    assert set(sample.policy_versions[~sample.loss_mask].tolist()) == {-1}
    assert rollout.policy_version == 3


async def test_another_history_is_another_sample_and_trains_what_was_sampled_once(
    gateway: Any,
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        await running.say(session, ("user", "one"), ("assistant", "changed"), ("user", "two"))
        await running.say(session, ("user", "one"), ("assistant", "one!"), ("user", "three"))
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
    assert len(rollout.samples) == 2


async def test_requests_of_one_session_may_run_at_once(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        words = [f"word {number}" for number in range(8)]
        said = await asyncio.gather(*(running.say(session, ("user", word)) for word in words))
        assert said == [f"{word}!" for word in words]
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
    assert len(rollout.samples) == 8


async def test_turns_keep_the_rewards_that_were_posted_for_them(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        await running.reward(session, turn=0, reward=0.25)
        await running.say(session, ("user", "one"), ("assistant", "one!"), ("user", "two"))
        assert (await running.reward(session, turn=1, reward=2.0, final=True)).status_code == 200
        (rollout,) = await running.group()
    assert rollout.reward == 2.25
    rewards = [turn.reward for turn in rollout.turns if turn.role == "assistant"]
    assert rewards == [0.25, 2.0]


async def test_an_example_of_the_env_comes_with_its_fields(gateway: Any) -> None:
    tasks = [{"prompt": "sun", "answer": "nus"}]
    async with gateway(echo, host={"tasks": tasks}) as running:
        session = await running.open(task=0)
        assert session["fields"] == tasks[0]
        assert (await running.http.post("/sessions", json={"task": 1})).status_code == 404
        await running.say(session, ("user", "sun"))
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
    assert rollout.example_id == 0
    assert rollout.task["answer"] == "nus"


# -- clients -------------------------------------------------------------------------------------


async def test_the_openai_sdk_chats_with_tools_whole_and_as_a_stream(gateway: Any) -> None:
    def script(prompt: str) -> str:
        return f"It is a star.{END}" if "<tool_response>" in prompt else f"{CALL}{END}"

    async with gateway(script) as running:
        session = await running.open()
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"])
        messages: list[Any] = [{"role": "user", "content": "sun?"}]
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        reply = await client.chat.completions.create(model="any", messages=messages, tools=tools)
        (call,) = reply.choices[0].message.tool_calls or []
        assert reply.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"word": "sun"}

        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "a star"})
        stream = await client.chat.completions.create(
            model="any", messages=messages, tools=tools, stream=True
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "It is a star."
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert [model.id async for model in client.models.list()] == ["policy"]

        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
        await client.close()
    assert len(rollout.samples) == 1


async def test_the_openai_sdk_uses_responses_with_tools_whole_and_as_a_stream(
    gateway: Any,
) -> None:
    def script(prompt: str) -> str:
        return f"It is a star.{END}" if "<tool_response>" in prompt else f"{CALL}{END}"

    async with gateway(script) as running:
        session = await running.open()
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"])
        tools: list[Any] = [{"type": "function", **TOOL}]
        said: list[Any] = [{"role": "user", "content": "sun?"}]
        first = await client.responses.create(model="any", input=said, tools=tools)
        (item,) = first.output
        assert item.type == "function_call"

        said.append(item.model_dump(exclude_none=True))
        said.append({"type": "function_call_output", "call_id": item.call_id, "output": "a star"})
        async with client.responses.stream(model="any", input=said, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_response()
        assert last.output_text == "It is a star."
        assert "response.output_text.delta" in kinds

        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
        await client.close()
    assert len(rollout.samples) == 1


async def test_the_anthropic_sdk_uses_messages_with_tools_whole_and_as_a_stream(
    gateway: Any,
) -> None:
    def script(prompt: str) -> str:
        return f"It is a star.{END}" if "<tool_response>" in prompt else f"Look.\n{CALL}{END}"

    async with gateway(script) as running:
        session = await running.open()
        client = anthropic.AsyncAnthropic(
            base_url=session["anthropic_base_url"], api_key=session["api_key"]
        )
        name, description, parameters = TOOL.values()
        tools: list[Any] = [{"name": name, "description": description, "input_schema": parameters}]
        messages: list[Any] = [{"role": "user", "content": "sun?"}]
        asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": tools}
        async with client.messages.stream(messages=messages, **asked) as stream:
            first = await stream.get_final_message()
        text, call = first.content
        assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
        assert call.input == {"word": "sun"}

        messages.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a star"}
        messages.append({"role": "user", "content": [result]})
        last = await client.messages.create(messages=messages, **asked)
        assert last.content[0].text == "It is a star."
        assert last.usage.output_tokens == len(ids_of("It is a star." + END))
        await client.close()

        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
    assert len(rollout.samples) == 1


def answered(route: str, reply: dict[str, Any]) -> tuple[list[Any], str]:
    """What a client appends to its conversation: the reply as it got it, and the results of its
    calls. The id of the last call."""
    if route == "responses":
        calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": call,
                "output": [{"type": "input_text", "text": "a star"}],
            }
            for call in calls
        ]
        return [*reply["output"], *results], calls[-1]
    if route == "messages":
        calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        texts = [{"type": "text", "text": "a star"}]
        results = [{"type": "tool_result", "tool_use_id": c, "content": texts} for c in calls]
        said = {"role": "assistant", "content": reply["content"]}
        return [said, {"role": "user", "content": results}], calls[-1]
    message = reply["choices"][0]["message"]
    message["content"] = [{"type": "text", "text": message["content"]}]
    calls = [call["id"] for call in message["tool_calls"]]
    return [message, *({"role": "tool", "tool_call_id": c, "content": "a star"} for c in calls)], (
        calls[-1]
    )


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_a_reply_that_a_client_restates_in_its_own_way_is_no_new_branch(
    gateway: Any, route: str
) -> None:
    """Texts in parts, arguments as a table; each call has an id of its own."""
    odd = CALL.replace('{"word": "sun"}', '{ "word":"sun",  "n" : 1.50 }')
    async with gateway(lambda prompt: f"Look.\n{odd}{END}") as running:
        session = await running.open()
        name, description, parameters = TOOL.values()
        tool: dict[str, Any] = {"type": "function", "function": TOOL}
        if route == "responses":
            tool = {"type": "function", **TOOL}
        if route == "messages":
            tool = {"name": name, "description": description, "input_schema": parameters}
        key = "input" if route == "responses" else "messages"
        said: list[Any] = [{"role": "user", "content": "sun?"}]
        ids = []
        for _ in range(3):
            body = {"model": "m", "max_tokens": 500, key: said, "tools": [tool]}
            path = f"/sessions/{session['id']}/v1/{route}"
            reply = await running.http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            more, call = answered(route, reply.json())
            said += more
            ids.append(call)

        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
        check_exact(rollout, running.policy)
    assert len({*ids}) == 3
    assert len(rollout.samples) == 1


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_thoughts_come_back_on_every_route(gateway: Any, route: str) -> None:
    async with gateway(
        lambda prompt: f"<think>\nhm\n</think>\n\nyes{END}", thinking=True
    ) as running:
        session = await running.open()
        said = [{"role": "user", "content": "sun?"}]
        key = "input" if route == "responses" else "messages"
        path = f"/sessions/{session['id']}/v1/{route}"
        body = {"model": "m", "max_tokens": 100, key: said}
        whole = (await running.http.post(path, json=body)).json()
        events = (await running.http.post(path, json=body | {"stream": True})).text
    flat = json.dumps(whole)
    assert "hm" in flat
    assert '"yes"' in flat
    assert events.startswith(("data: ", "event: "))
    assert "hm" in events
    assert "yes" in events


async def test_a_client_may_ask_for_fewer_tokens_and_the_run_sets_the_most(gateway: Any) -> None:
    async with gateway(echo, host={"max_completion_tokens": 4}) as running:
        session = await running.open()
        for route, key, name in (
            ("chat/completions", "messages", "max_tokens"),
            ("chat/completions", "messages", "max_completion_tokens"),
            ("responses", "input", "max_output_tokens"),
            ("messages", "messages", "max_tokens"),
        ):
            for limit, length in ((2, 2), (100, 4)):
                body = {"model": "m", key: [{"role": "user", "content": "abcdef"}], name: limit}
                path = f"/sessions/{session['id']}/v1/{route}"
                answer = await running.http.post(path, json=body)
                assert answer.status_code == 200
                assert len(running.policy.sampled[-1][1]) == length, route
        assert answer.json()["stop_reason"] == "max_tokens"


# -- repeats, absences, ends -----------------------------------------------------------------------


async def test_a_reward_may_be_posted_again_and_trains_once(gateway: Any) -> None:
    async with gateway() as running:
        session = await running.open()
        await running.say(session, ("user", "a"))
        posts = await asyncio.gather(*(running.reward(session, reward=1.0) for _ in range(5)))
        assert [answer.status_code for answer in posts] == [200] * 5
        assert sum(not answer.json()["repeated"] for answer in posts) == 1
        assert (await running.reward(session, reward=0.0)).status_code == 409
        await running.group()
        assert running.source.book.next_group(math.inf, 0) == []
        assert (await running.reward(session, reward=1.0)).json()["repeated"]


async def test_a_retry_of_the_sdk_gets_the_reply_that_is_there(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        path = f"/sessions/{session['id']}/v1/chat/completions"
        first = await running.http.post(path, json=body)
        retry = {"x-stainless-retry-count": "1"}
        again = await running.http.post(path, json=body, headers=retry)
        assert again.json() == first.json()
    assert len(running.policy.sampled) == 1


async def test_a_client_that_vanishes_finds_its_reply_when_it_asks_again(gateway: Any) -> None:
    async with gateway(echo) as running:
        held = asyncio.Event()
        sample = running.policy.generate

        async def generate(*asked: Any, **more: Any) -> Any:
            await held.wait()
            return await sample(*asked, **more)

        running.policy.generate = generate
        session = await running.open()
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        path = f"/sessions/{session['id']}/v1/chat/completions"
        asking = asyncio.create_task(running.http.post(path, json=body))
        await until(lambda: running.source.book.requests.total() == 1)
        asking.cancel()
        held.set()
        retry = {"x-stainless-retry-count": "1"}
        answer = await running.http.post(path, json=body, headers=retry)
        assert answer.status_code == 200
    assert len(running.policy.sampled) == 1


async def test_a_reward_ends_the_requests_in_progress(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "a"))

        async def never(*asked: Any, **more: Any) -> Any:
            await asyncio.Event().wait()

        running.policy.generate = never
        asking = asyncio.create_task(running.chat(session, ("user", "b")))
        await until(lambda: running.source.book.requests.total() == 1)
        assert (await running.reward(session, reward=1.0)).status_code == 200
        assert (await asking).status_code == 410
        assert running.source.book.requests.total() == 0
        assert (await running.chat(session, ("user", "b"))).status_code == 410
        (rollout,) = await running.group()
    assert rollout.num_turns == 1


async def test_a_deleted_session_is_gone(gateway: Any) -> None:
    async with gateway() as running:
        session = await running.open()
        await running.say(session, ("user", "a"))
        assert (await running.http.delete(f"/sessions/{session['id']}")).status_code == 200
        assert (await running.reward(session, reward=1.0)).status_code == 410
        assert (await running.chat(session, ("user", "a"))).status_code == 410
        status = (await running.http.get(f"/sessions/{session['id']}")).json()
    assert status["status"] == "discarded"


# -- restart -------------------------------------------------------------------------------------


async def test_a_session_goes_on_where_another_process_left_it(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        await running.reward(session, turn=0, reward=0.5)
        url, key, before = running.url, running.key, [*running.policy.sampled]

    async with gateway(echo) as running:
        assert (running.url, running.key) == (url, key)
        said = [("user", "one"), ("assistant", "one!"), ("user", "two")]
        assert await running.say(session, *said) == "two!"
        await running.reward(session, reward=0.75)
        (rollout,) = await running.group()
        running.policy.sampled[:0] = before
        before_again = [logprobs for _, _, logprobs in running.policy.sampled]
        (sample,) = rollout.samples
        expected = [value for logprobs in before_again for value in logprobs]
        assert sample.inference_logprobs[sample.loss_mask].tolist() == expected
        assert text_of(sample.token_ids[sample.loss_mask]) == f"one!{END}two!{END}"
    rewards = [turn.reward for turn in rollout.turns if turn.role == "assistant"]
    assert (rollout.reward, rewards) == (0.75, [0.5, None])


async def test_what_was_rewarded_trains_after_a_restart_unless_the_checkpoint_has_it(
    gateway: Any, tmp_path: Any
) -> None:
    names = []
    async with gateway(echo) as running:
        for number in range(3):
            session = await running.open()
            names.append(session["id"])
            await running.say(session, ("user", f"{number}"))
            await running.reward(session, reward=float(number))
        running.source.settled(await running.group(), None)  # the first is scored
        await running.group()  # the second is on its way when the process ends
        running.source.save(tmp_path)

    async with gateway(echo, load=tmp_path) as running:
        again = [rollout for _ in range(2) for rollout in await running.group()]
        assert [rollout.info["session"] for rollout in again] == names[1:]
        assert (await running.http.get(f"/sessions/{names[0]}")).json()["status"] == "taken"


async def test_a_run_that_begins_again_gives_every_session_again(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "a"))
        await running.reward(session, reward=1.0)
        running.source.settled(await running.group(), None)
    async with gateway(echo) as running:
        (rollout,) = await running.group()
    assert rollout.info["session"] == session["id"]


async def test_the_time_in_which_the_gateway_was_away_is_no_silence_of_the_agents(
    gateway: Any,
) -> None:
    timeouts = {"host": {"group_size": 2}, "session_timeout": 7200.0, "group_timeout": 3600.0}
    async with gateway(echo, **timeouts) as running:
        first, second = [await running.open(group="g") for _ in range(2)]
        for session in (first, second):
            await running.say(session, ("user", "a"))
        await running.reward(first, reward=1.0)
        files = [*(running.host.folder / "gateway" / "sessions").iterdir()]
    for file in files:  # as if the run had been stopped in the evening
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for line in lines:
            for name in ("opened_at", "touched_at", "rewarded_at"):
                line["place"][name] -= 9 * 3600
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")

    async with gateway(echo, **timeouts) as running:
        book, now = running.source.book, running.source._clock()
        assert book.next_group(now, 0) == []
        assert book.expire(now) == []
        await running.reward(second, reward=0.0)
        assert book.num_ready == 1

        third, fourth = [await running.open(group="h") for _ in range(2)]
        await running.say(third, ("user", "a"))
        await running.reward(third, reward=1.0)
    async with gateway(echo, **timeouts) as running:  # time in which it serves counts as before
        book, now = running.source.book, running.source._clock()
        assert [each.id for each in book.next_group(now, 0)] == [first["id"], second["id"]]
        assert book.next_group(now + 3590.0, 0) == []
        assert book.expire(now + 7190.0) == []
        assert book.next_group(now + 3610.0, 0) == []
        assert book.ended[third["id"]].state == "alone"
        assert [each.id for each in book.expire(now + 7210.0)] == [fourth["id"]]


async def test_a_clock_that_is_set_anew_ends_no_session(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("prime_rl_gateway.source.time", clock)
    async with gateway(echo) as running:
        before = running.source._clock()
        monkeypatch.setattr(clock, "time", lambda: 1e9)
        assert running.source._clock() == before
        clock.now += 5.0
        assert running.source._clock() == before + 5.0


async def test_versions_that_a_run_has_lost_count_as_its_newest(gateway: Any) -> None:
    async with gateway(echo, step=9) as running:
        running.policy.version = 9
        session = await running.open()
        await running.say(session, ("user", "a"))
        await running.reward(session, reward=1.0)
    async with gateway(echo, step=8) as running:
        (rollout,) = await running.group(version=8)
    assert rollout.policy_version == 8
    assert rollout.samples[0].policy_versions.max() == 8


async def test_files_of_sessions_go_when_enough_complete_checkpoints_have_them(
    gateway: Any, tmp_path: Any
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "a"))
        await running.reward(session, reward=1.0)
        running.source.settled(await running.group(), None)
        (file,) = (running.host.folder / "gateway" / "sessions").iterdir()
        for _ in range(9):  # the trainer completes none of them
            running.source.save(tmp_path)
        for _ in range(8):
            running.source.checkpoint_complete(tmp_path)
        await running.source._tidy()
        assert file.exists()
        running.source.checkpoint_complete(tmp_path)
        await until(lambda: not file.exists())
        running.source.save(tmp_path)
    async with gateway(echo, load=tmp_path) as running:
        assert (await running.reward(session, reward=1.0)).status_code == 410


# -- refusals --------------------------------------------------------------------------------------


async def test_only_the_key_opens_anything_and_a_sessions_own_key_its_model(gateway: Any) -> None:
    async with gateway() as running:
        session = await running.open()
        other = await running.open()
        path = f"/sessions/{session['id']}"
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        for key in ("wrong", "Bearer", "\xe4", other["api_key"]):
            bearer = f"Bearer {key}".encode("latin-1")
            for headers in ({b"Authorization": bearer}, {b"x-api-key": key.encode("latin-1")}, {}):
                async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
                    asked = [
                        await client.post("/sessions", headers=headers),
                        await client.get(path, headers=headers),
                        await client.delete(path, headers=headers),
                        await client.post(f"{path}/reward", json={"reward": 1}, headers=headers),
                        await client.post(f"{path}/v1/messages", json=body, headers=headers),
                        await client.get(f"{path}/v1/models", headers=headers),
                    ]
                    assert [answer.status_code for answer in asked] == [401] * 6

        own = {"Authorization": f"Bearer {session['api_key']}"}
        async with httpx.AsyncClient(base_url=running.url, headers=own, trust_env=False) as client:
            chat = await client.post(f"{path}/v1/chat/completions", json=body)
            assert chat.status_code == 200
            assert (await client.post(f"{path}/reward", json={"reward": 1})).status_code == 403
            assert (await client.post("/sessions")).status_code == 401
            assert (await client.get("/health")).json()["status"] == "ok"


async def test_tenants_have_keys_and_sessions_of_their_own(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "a" * 16)
    monkeypatch.setenv("B_KEY", "b" * 16)
    tables = [{"name": name, "key_var": f"{name.upper()}_KEY", "max_sessions": 1} for name in "ab"]
    async with gateway(tenants=tables) as running:
        session = await running.open()
        again = await running.http.post("/sessions", json={})
        assert again.status_code == 429
        assert again.headers["Retry-After"] == "5"
        b = {"Authorization": f"Bearer {'b' * 16}"}
        assert (await running.http.post("/sessions", json={}, headers=b)).status_code == 201
        answer = await running.http.get(f"/sessions/{session['id']}", headers=b)
        assert answer.status_code == 404
        text = (running.host.folder / "gateway" / "address.json").read_text("utf-8")
        assert "a" * 16 not in text
    monkeypatch.setenv("B_KEY", "short")
    with pytest.raises(ConfigError, match=r"B_KEY.*at least 16 characters.*found 5"):
        async with gateway(tenants=tables):
            pass
    monkeypatch.setenv("B_KEY", "a" * 16)
    with pytest.raises(ConfigError, match="same key"):
        async with gateway(tenants=tables):
            pass


async def test_names_that_are_unknown_gone_or_full_get_statuses_of_their_own(gateway: Any) -> None:
    async with gateway(max_waiting=1) as running:
        for method, path, status in (
            ("GET", "/sessions/s1-0123-4567", 404),
            ("POST", "/sessions/nothing/reward", 404),
            ("GET", "/nothing", 404),
            ("PUT", "/sessions", 405),
        ):
            answer = await running.http.request(method, path, json={"reward": 1.0})
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
        session = await running.open()
        await running.say(session, ("user", "a"))
        await running.reward(session, reward=1.0)
        full = await running.http.post("/sessions", json={})
        assert full.status_code == 503
        assert int(full.headers["Retry-After"]) > 0
        await running.group()
        await running.open()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "not JSON"),
        ('{"reward": NaN}', "finite"),
        ('{"reward": Infinity}', "finite"),
        ('{"reward": 1e999}', "finite"),
        (f'{{"reward": 1{"0" * 400}}}', "finite"),
        ('{"reward": "1"}', "expected a number"),
        ('{"reward": true}', "expected a number"),
        ('{"reward": [1]}', "expected a number"),
        ('{"reward": 1, "turn": 0.5}', "number of a reply"),
        ('{"reward": 1, "turn": true}', "number of a reply"),
        ('{"reward": 1, "turn": 7}', "1 replies"),
        ('{"reward": 1, "final": 1}', "true or false"),
        ('{"score": 1}', "unknown key 'score'"),
        ("{}", "has none"),
        ("[" * 10_000, "JSON"),
    ],
)
async def test_a_reward_that_is_none_is_refused_and_the_session_stays_open(
    gateway: Any, body: str, fault: str
) -> None:
    async with gateway() as running:
        session = await running.open()
        await running.say(session, ("user", "a"))
        answer = await running.http.post(f"/sessions/{session['id']}/reward", content=body)
        assert answer.status_code == 400
        assert fault in answer.json()["error"]["message"]
        assert (await running.reward(session, reward=1)).status_code == 200


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"task": -1}, 400),
        ({"task": "1"}, 400),
        ({"task": True}, 400),
        ({"task": 10**12}, 404),
        ({"group": ""}, 400),
        ({"group": "x" * 257}, 400),
        ({"group": 3}, 400),
        ({"group": "\ud800"}, 400),
        ({"model": "m"}, 400),
    ],
)
async def test_a_session_that_cannot_open_says_why(gateway: Any, asked: Any, status: int) -> None:
    async with gateway() as running:
        body = json.dumps(asked).encode()
        answer = await running.http.post("/sessions", content=body)
        assert answer.status_code == status
        assert running.source.book.num_open == 0


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_a_request_that_cannot_be_read_is_refused_on_every_route(
    gateway: Any, route: str
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    key = "input" if route == "responses" else "messages"
    said = {"model": "m", "max_tokens": 5, key: [{"role": "user", "content": "a"}]}
    bodies: list[Any] = [
        b"{",
        b"[]",
        b"3",
        b'"text"',
        b"\xff\xfe",
        {},
        {key: []},
        {key: 3},
        {key: [3]},
        {key: [{"role": "user", "content": 3}]},
        said | {"n": 2},
        said | {"max_tokens": 0},
        said | {"max_tokens": "5"},
        said | {"tools": 3},
        said | {"tools": [{"type": "web_search"}]},
        said | {key: [{"role": "user", "content": "\ud800"}]},
    ]
    if route == "responses":
        image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
        bodies.append(said | {"previous_response_id": "resp_1"})
    if route == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": "AA"}
        image = {"type": "image", "source": source}
    bodies.append(said | {key: [{"role": "user", "content": [image]}]})

    async with gateway(echo) as running:
        session = await running.open()
        path = f"/sessions/{session['id']}/v1/{route}"
        for body in bodies:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await running.http.post(path, content=content)
            assert answer.status_code == 400, (body, answer.text)
            assert answer.json()["error"]["message"]
        assert (await running.http.post(path, json=said)).status_code == 200
    assert len(running.policy.sampled) == 1


async def test_bodies_are_limited(gateway: Any) -> None:
    async with gateway(echo, max_body=1000) as running:
        session = await running.open()
        answer = await running.chat(session, ("user", "x" * 1001))
        assert answer.status_code == 413
        assert "max_body" in answer.json()["error"]["message"]

        async def parts() -> Any:
            for _ in range(100):
                yield b"x" * 100

        path = f"/sessions/{session['id']}/v1/messages"
        answer = await running.http.post(path, content=parts())
        assert answer.status_code == 413
        assert answer.json()["type"] == "error"


async def test_a_conversation_that_is_too_long_to_train_is_refused(gateway: Any) -> None:
    async with gateway(echo, host={"seq_len": 40}) as running:
        session = await running.open()
        assert await running.say(session, ("user", "short")) == "short!"
        answer = await running.chat(session, ("user", "x" * 60))
        assert answer.status_code == 400
        assert "maximum context length is 40" in answer.json()["error"]["message"]


async def test_the_files_can_be_read_by_their_owner_only(gateway: Any) -> None:
    async with gateway() as running:
        await running.open()
        files = [path for path in (running.host.folder / "gateway").rglob("*") if path.is_file()]
        assert len(files) == 3
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


async def test_a_run_has_one_gateway(gateway: Any) -> None:
    async with gateway(host={"env": "a"}):
        with pytest.raises(ConfigError, match=r"env 'b'.*env 'a' has a gateway already"):
            async with gateway(host={"env": "b"}):
                pass


async def test_a_port_that_is_taken_is_an_error_of_the_config(gateway: Any) -> None:
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with gateway(port=port):
                pass


async def test_a_session_that_closes_while_a_turns_reward_is_written_trains_once(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway() as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        begun = threading.Event()
        may_end = threading.Event()
        store = running.source.server._store
        append = store.append

        def held(line: Any, size: int) -> int:
            if line.place.state == "open":
                begun.set()
                assert may_end.wait(LIMIT)
            end: int = append(line, size)
            return end

        monkeypatch.setattr(store, "append", held)
        turn = asyncio.create_task(running.reward(session, turn=0, reward=0.5))
        assert await asyncio.to_thread(begun.wait, LIMIT)
        final = asyncio.create_task(running.reward(session, reward=1.0))
        await until(lambda: not running.source.book.find(session["id"], None).is_open)
        may_end.set()
        assert [(await each).status_code for each in (turn, final)] == [200, 200]
        assert running.source.book.num_waiting == 1
        assert store.read(session["id"]).place.reward == 1.0


async def test_a_repeated_reward_whose_first_post_was_not_written_is_refused(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway() as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        begun = threading.Event()
        may_end = threading.Event()

        def full(line: Any, size: int) -> int:
            begun.set()
            assert may_end.wait(LIMIT)
            raise OSError("no space left")

        with monkeypatch.context() as disk:
            disk.setattr(running.source.server._store, "append", full)
            first = asyncio.create_task(running.reward(session, reward=1.0))
            assert await asyncio.to_thread(begun.wait, LIMIT)
            repeated = asyncio.create_task(running.reward(session, reward=1.0))
            await asyncio.sleep(0)
            may_end.set()
            assert [(await each).status_code for each in (first, repeated)] == [503, 503]
        assert (await running.reward(session, reward=1.0)).status_code == 200
        assert running.source.book.num_waiting == 1


async def test_a_kernel_that_lets_few_connections_wait_is_named(
    gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = tmp_path / "somaxconn"
    monkeypatch.setattr("prime_rl_gateway.server.KERNEL_BACKLOG", limit)
    limit.write_text("128\n")
    async with gateway():
        pass
    assert "lets 128 new connections wait" in caplog.text
    caplog.clear()
    limit.write_text("4096\n")
    async with gateway():
        pass
    assert "connections" not in caplog.text
