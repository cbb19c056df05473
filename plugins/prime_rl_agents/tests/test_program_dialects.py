"""Replies of the policy in the form of three APIs: whole, streamed, and restated."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.graph import message_hash
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, Usage

from in_process.replies import name_calls
from program.dialects import PolicyChat, PolicyMessages, PolicyResponses, for_policy
from program.policy import Conversations, PolicyClient

TEXTS = st.text(max_size=12)
SPELLINGS = st.sampled_from(["{}", '{"a":1}', '{ "a" : 1.50 }', '{"b": [1,  null], "a": "é"}'])
CALLS = st.lists(st.tuples(TEXTS.filter(bool), SPELLINGS), max_size=3)
KINDS = [PolicyChat, PolicyResponses, PolicyMessages]


def made(kind: type[Any]) -> Any:
    """The dialect of one rollout, without an engine."""
    policy = PolicyClient.__new__(PolicyClient)
    policy.ignored = set()
    policy.conversations = Conversations()
    policy.trace = SimpleNamespace(nodes=[])
    base = {PolicyChat: ChatDialect, PolicyResponses: ResponsesDialect}.get(kind, AnthropicDialect)
    return for_policy(base(), policy)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from("abc"), max_size=3))))
def test_conversations_are_kept_as_they_were_and_each_common_beginning_once(
    turns: list[tuple[int, list[str]]],
) -> None:
    """Each goes on from one of the earlier ones, as JSON from a client that sends all of it."""
    said: list[list[dict[str, Any]]] = [[]]
    conversations = Conversations()
    for number, (back, texts) in enumerate(turns):
        before = said[max(0, len(said) - 1 - back)]
        said.append([*before, *({"role": "user", "content": text} for text in texts)])
        conversations.add(f"resp_{number}", json.loads(json.dumps(said[-1])))

    kept = [conversations.items(f"resp_{number}") for number in range(len(turns))]
    assert kept == said[1:]
    beginnings = {json.dumps(each[: end + 1]) for each in said for end in range(len(each))}
    assert len({id(item) for each in kept for item in each}) == len(beginnings)


def reply_of(text: str, thought: str, calls: list[tuple[str, str]], finish: Any) -> Response:
    """A reply as the train client gives it: ``None`` for what is empty."""
    message = AssistantMessage(
        content=text or None,
        reasoning_content=thought or None,
        tool_calls=[
            ToolCall(id=f"call_{place}", name=name, arguments=arguments)
            for place, (name, arguments) in enumerate(calls)
        ]
        or None,
    )
    return Response(
        id="r",
        created=0,
        model="m",
        message=message,
        finish_reason=finish,
        usage=Usage(prompt_tokens=11, completion_tokens=3),
    )


async def test_a_long_conversation_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the replies of 50 turns can be continued with: 100 items, not 50 copies of up to 100."""
    monkeypatch.setattr("program.policy.run_number", lambda ctx, trace: 0)
    trace = SimpleNamespace(agent=SimpleNamespace(name="agent"), nodes=[])

    async def get_response(*asked: Any) -> Response:
        return reply_of("answer", "", [], "stop")

    policy = PolicyClient(SimpleNamespace(get_response=get_response), trace, None)  # type: ignore[arg-type]
    dialect: Any = for_policy(ResponsesDialect(), policy)
    sampling = SamplingConfig()
    history: list[dict[str, Any]] = []
    replies = []
    for turn in range(50):
        history.append({"role": "user", "content": f"question {turn}"})
        body = {"model": "m", "input": json.loads(json.dumps(history))}
        raw: Any = (await policy.get_response(dialect, body, sampling)).raw
        history += raw["output"]
        replies.append(raw["id"])

    kept = [
        dialect.apply_overrides({"previous_response_id": reply}, "m", sampling)["input"]
        for reply in replies
    ]
    assert kept == [history[: 2 * turn + 2] for turn in range(50)]
    assert len({id(item) for each in kept for item in each}) == 100


def restated(kind: type[Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The request of a client that appends the reply to its conversation as it got it."""
    if kind is PolicyResponses:
        return {"model": "m", "input": [{"role": "user", "content": "a"}, *raw["output"]]}
    if kind is PolicyMessages:
        said = {"role": "assistant", "content": raw["content"]}
        return {"model": "m", "messages": [{"role": "user", "content": "a"}, said]}
    said = raw["choices"][0]["message"]
    return {"model": "m", "messages": [{"role": "user", "content": "a"}, said]}


def written(dialect: Any, response: Response) -> dict[str, Any]:
    """The reply in the form of its API. It is in the trace from here on."""
    name_calls(response.message)
    node = SimpleNamespace(sampled=True, message=response.message)
    dialect.policy.trace.nodes.append(node)
    raw: dict[str, Any] = dialect.write(response)
    return raw


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, thought=TEXTS, calls=CALLS)
def test_a_restated_reply_is_the_message_of_the_trace(
    kind: type[Any], text: str, thought: str, calls: list[tuple[str, str]]
) -> None:
    """So the next turn extends the tokens of this one."""
    dialect = made(kind)
    response = reply_of(text, thought, calls, "stop")
    raw = json.loads(json.dumps(written(dialect, response)))
    request = dialect.parse_request(restated(kind, raw))
    assert len(request.messages) == 2
    assert message_hash(request.messages[1]) == message_hash(response.message)


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=TEXTS,
    thought=TEXTS,
    calls=CALLS,
    finish=st.sampled_from(["stop", "length"]),
)
def test_a_stream_gives_the_reply_that_is_given_whole(
    kind: type[Any], text: str, thought: str, calls: list[tuple[str, str]], finish: str
) -> None:
    """Assembled by verifiers' own parsers of providers' streams."""
    dialect = made(kind)
    raw = written(dialect, reply_of(text, thought, calls, finish))
    parser = dialect.stream_parser()
    for event in dialect.stream_events(json.loads(json.dumps(raw))):
        parser.feed(event)
    assembled = parser.finish()
    assert {k: v for k, v in assembled.raw.items() if v is not None} == {
        k: v for k, v in raw.items() if v is not None
    }
    whole = dialect.parse_response(dialect.validate_response(raw))
    assert assembled.message == whole.message
    assert assembled.finish_reason == ("length" if finish == "length" else whole.finish_reason)
    assert (whole.usage.input_tokens, whole.usage.completion_tokens) == (11, 3)


def test_a_reply_that_the_program_has_changed_is_another_message() -> None:
    dialect = made(PolicyMessages)
    response = reply_of("", "", [("add", '{"a":  1}')], "stop")
    raw = written(dialect, response)
    raw["content"][0]["input"] = {"a": 2}
    changed = dialect.parse_request(restated(PolicyMessages, raw)).messages[1]
    assert json.loads(changed.tool_calls[0].arguments) == {"a": 2}
    assert message_hash(changed) != message_hash(response.message)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_is_refused(kind: type[Any]) -> None:
    key = "input" if kind is PolicyResponses else "messages"
    with pytest.raises(ValueError, match="no Unicode"):
        made(kind).parse_request({"model": "m", key: [{"role": "user", "content": "a\ud800"}]})


def test_a_policy_is_chosen_by_the_route() -> None:
    policy: Any = SimpleNamespace()
    pairs = [(ChatDialect, PolicyChat), (ResponsesDialect, PolicyResponses)]
    for theirs, ours in [*pairs, (AnthropicDialect, PolicyMessages)]:
        found = for_policy(theirs(), policy)
        assert type(found) is ours
        assert found.routes == theirs.routes
