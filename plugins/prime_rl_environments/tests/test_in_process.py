"""The in-process harness equals verifiers' HTTP path, and does what a chat loop must do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import httpx
import pytest
import verifiers.v1 as vf
from aiohttp import web
from loopback import listening
from renderers import Qwen3RendererConfig, create_renderer, reasoning
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.configs import DeepSeekV3RendererConfig, Llama3RendererConfig
from scripted_replies import TOKENIZER
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from waiting import LIMIT

from in_process import InProcessHarness, seam
from in_process.batch import BatchConnection
from in_process.engine import version_spans, with_token_names
from in_process.harness import load_tool
from in_process.tool_calls import fault_of, keep_what_was_written
from prime_rl import ConfigError, PluginError
from prime_rl_engine_kit.batch import (
    ROUTE,
    Answer,
    BatchRequest,
    bytes_to_ids,
    frame,
    ids_to_bytes,
)
from prime_rl_environments.tiny.tokenizer import build_tokenizer

MODEL = "scripted"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


async def add(a: int, b: int) -> int:
    return a + b


add.schema = ADD  # type: ignore[attr-defined]


class EchoData(vf.TaskData):
    answer: str = ""


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self) -> Any:
        yield EchoTask(EchoData(prompt="say 42", answer="42"), self.config.task)


class TalkConfig(vf.SingleAgentEnvConfig):
    turns: int = 3


class TalkEnv(vf.SingleAgentEnv, vf.Env[TalkConfig]):
    """The env is the user and sends a word each turn."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for turn in range(1, self.config.turns):
                if segment.terminated:
                    break
                segment = await talk.turn(f"again {turn}")


class HttpHarness(vf.Harness[vf.HarnessConfig]):
    """The reference: the same chat loop via the rollout's loopback HTTP endpoint."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any
    ) -> vf.ProgramResult:
        prompt = data.prompt
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [seam.message_to_wire(message) for message in prompt]
        )
        async with httpx.AsyncClient(verify=False) as http:
            reply = await http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(0 if reply.status_code == 200 else 1, "", reply.text)


@pytest.fixture
def run(
    engine: Any, tokenizer_path: Path, taskset_module: Callable[..., None]
) -> Callable[..., Any]:
    """``await run(harness, env=..., **agent)``: the only trace of one episode."""
    taskset_module("http_harness", HttpHarness)

    async def episode(harness: str | dict[str, Any], *classes: type, **agent: Any) -> vf.Trace:
        taskset_module("echo_taskset", *(classes or (EchoTaskset,)))
        seat = {"harness": {"id": harness} if isinstance(harness, str) else harness}
        table = {
            "taskset": {"id": "echo_taskset"},
            "agent": seat | {"runtime": {"type": "subprocess"}} | agent,
        }
        env = vf.load_environment(vf.resolve_env_config(table))
        context = vf.ModelContext(
            model=MODEL,
            client=vf.TrainClientConfig(
                base_url=engine.base_url,
                api_key_var="PRIME_RL_TEST_KEY",
                renderer=Qwen3RendererConfig(thinking_retention="all"),
                renderer_model_name=str(tokenizer_path),
            ),
            sampling=vf.SamplingConfig(temperature=0.5, max_tokens=64),
        )
        async with env.serving():
            (slot,) = env.slots(next(iter(env.taskset)))
            done = await env.run_slot(slot, context)
        (trace,) = done.traces
        return trace

    return episode


def columns(trace: vf.Trace) -> list[tuple[Any, ...]]:
    """The part of a trace that training reads."""
    return [
        (node.parent, node.sampled, node.token_ids, node.mask, node.is_content, node.logprobs)
        for node in trace.nodes
    ]


def calls(trace: vf.Trace) -> list[tuple[Any, ...]]:
    return [
        (c.node, c.model, c.sampling, c.endpoint, c.finish_reason, c.usage) for c in trace.calls
    ]


async def test_a_trace_is_the_same_as_over_http(engine: Any, run: Any) -> None:
    engine.script = lambda prompt: "the answer is 42"
    direct, http = await run("in-process"), await run("http_harness")
    assert columns(direct) == columns(http)
    assert calls(direct) == calls(http)
    assert (direct.reward, direct.ok, direct.stop_condition) == (1.0, True, "agent_completed")
    assert direct.rewards == http.rewards


@pytest.mark.parametrize("batches", [False, True])
async def test_a_conversation_is_the_same_as_over_http(
    engine: Any, run: Any, batches: bool
) -> None:
    engine.script = lambda prompt: f"reply {prompt.count('<|im_start|>assistant')}"
    engine.version, engine.takes_batches = 6, batches
    direct = await run("in-process", EchoTaskset, TalkEnv)
    assert len(engine.batches) == (3 if batches else 0)
    http = await run("http_harness", EchoTaskset, TalkEnv)
    assert direct.num_turns == 3
    assert len(direct.branches) == 1  # every turn extends the one before, token by token
    assert columns(direct) == columns(http)
    assert calls(direct) == calls(http)


async def test_both_paths_send_the_same_request(engine: Any, run: Any) -> None:
    await run("in-process")
    await run("http_harness")
    direct, http = engine.bodies
    assert direct == http
    assert direct["sampling_params"]["temperature"] == 0.5
    for header in ("Authorization", "Content-Type"):
        assert engine.headers[0][header] == engine.headers[1][header]
    assert "X-Session-ID" in engine.headers[0]


async def test_python_tools_run_and_the_model_gets_their_results(engine: Any, run: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
    engine.script = lambda prompt: "it is 42" if "<tool_response>" in prompt else call
    trace = await run({"id": "in-process", "tools": [f"{__name__}:add"]})
    assert [node.message.role for node in trace.nodes] == ["user", "assistant", "tool", "assistant"]
    assert trace.nodes[2].message.content == "42"
    assert trace.reward == 1.0
    assert len(trace.branches) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("subtract", {}, "error: LookupError: no tool 'subtract'; available: add"),
        ("add", {"a": 1}, "error: TypeError: add() missing 1 required positional argument: 'b'"),
    ],
)
async def test_the_model_gets_the_error_of_a_tool(
    name: str, arguments: dict[str, int], text: str
) -> None:
    harness = InProcessHarness.__new__(InProcessHarness)
    harness.tools = {"add": add}
    call = {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}
    assert (await harness.call_tool(call))["content"] == text


def wrapped(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


async def echo(text: Any = "", **others: Any) -> Any:
    return text


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def leaves(kind: str = "") -> None:
    """As a command line does that refuses its arguments, and worse."""
    if kind == "task":
        await asyncio.gather(leaves("exit"))
    raise {
        "exit": SystemExit(2),
        "generator": GeneratorExit(),
        "group": BaseExceptionGroup("two", [SystemExit(1)]),
        "cancelled": asyncio.CancelledError(),
        "interrupt": KeyboardInterrupt(),
        "silent": Silent(),
    }[kind]


for tool in (echo, leaves):
    function = {**ADD["function"], "name": tool.__name__}  # type: ignore[dict-item]
    tool.schema = ADD | {"function": function}  # type: ignore[attr-defined]

TOOLS = {"id": "in-process", "tools": [f"{__name__}:echo", f"{__name__}:leaves"]}


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": 5, "arguments": {}}', "no tool '5'; available: echo, leaves"),
        ('{"name": true}', "no tool 'true'"),
        ('{"name": ["echo"], "arguments": {}}', "no tool '[\"echo\"]'"),
        ('{"name": "\\ud800", "arguments": {}}', "no tool '?'"),
        ('{"name": "echo", "arguments": {"text": "a\\ud800b"}}', "a?b"),
        ('{"name": "echo", "arguments": "{\\"text\\": \\"\\ud800\\"}"}', "?"),
        ('{"name": "echo", "arguments": {"text": "\\ud83d\\ude00"}}', "\U0001f600"),
        ('{"name": "echo", "arguments": [1, 2]}', "error: TypeError"),
        ('{"name": "echo", "arguments": 7}', "error: TypeError"),
        ('{"name": "echo", "arguments": "not JSON"}', "error: JSONDecodeError"),
        (f'{{"name": "echo", "arguments": {{"text": {"9" * 400}}}}}', "9" * 400),
        ('{"name": "leaves", "arguments": {"kind": "exit"}}', "error: SystemExit: 2"),
        ('{"name": "leaves", "arguments": {"kind": "generator"}}', "error: GeneratorExit"),
        ('{"name": "leaves", "arguments": {"kind": "group"}}', "error: BaseExceptionGroup"),
        ('{"name": "leaves", "arguments": {"kind": "cancelled"}}', "error: CancelledError"),
        ('{"name": "leaves", "arguments": {"kind": "interrupt"}}', "error: KeyboardInterrupt"),
        ('{"name": "leaves", "arguments": {"kind": "silent"}}', "error: Silent: its text cannot"),
    ],
)
async def test_whatever_the_model_calls_is_answered(
    engine: Any, run: Any, batches: bool, call: str, answer: str
) -> None:
    engine.script = lambda prompt: "42" if "<tool_response>" in prompt else wrapped(call)
    engine.takes_batches = batches
    trace = await run(TOOLS)
    assert trace.ok, trace.last_error
    assert [node.message.role for node in trace.nodes] == ["user", "assistant", "tool", "assistant"]
    assert answer in trace.nodes[2].message.content
    assert trace.reward == 1.0
    assert len(trace.branches) == 1


DEEP = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (wrapped('{"name": "echo", "arguments": {'), "it is not valid JSON: Expecting"),
        (wrapped("echo(1)"), "it is not valid JSON"),
        (wrapped('{"arguments": {}}'), "it names no tool"),
        (wrapped("[]"), "it names no tool"),
        ('<tool_call>\n{"name": "echo"}', "it has no end"),
        (wrapped(f'{{"name": "echo", "arguments": {DEEP}}}'), "it nests deeper than 64 levels"),
        (
            wrapped(f'{{"name": "echo", "arguments": {DEEP[2900:3100]}}}'),
            "it nests deeper than 64 levels",
        ),
        (
            wrapped(f'{{"name": "echo", "arguments": {"9" * 5000}}}'),
            "ValueError: Exceeds",
        ),
    ],
    ids=["cut", "code", "no name", "list", "no end", "deep", "less deep", "huge"],
)
async def test_a_call_that_cannot_be_read_stays_text_and_the_model_is_told(
    engine: Any, run: Any, batches: bool, text: str, fault: str
) -> None:
    engine.script = lambda prompt: "42" if "could not be read" in prompt else text
    engine.takes_batches, engine.max_model_len = batches, 16384
    trace = await run(TOOLS)
    assert trace.ok, trace.last_error
    assert [node.message.role for node in trace.nodes] == ["user", "assistant", "user", "assistant"]
    assert trace.nodes[1].message.content == text
    assert f"error: a tool call could not be read: {fault}" in trace.nodes[2].message.content
    assert trace.reward == 1.0
    assert len(trace.branches) == 1


async def test_of_two_calls_the_good_one_runs_and_the_other_is_reported(
    engine: Any, run: Any
) -> None:
    both = wrapped('{"name": "echo", "arguments": {"text": "fine"}}') + wrapped("{")
    engine.script = lambda prompt: "42" if "could not be read" in prompt else f"so:\n{both}"
    trace = await run(TOOLS)
    roles = ["user", "assistant", "tool", "user", "assistant"]
    assert [node.message.role for node in trace.nodes] == roles
    assert trace.nodes[1].message.content == f"so:\n{wrapped('{')}"
    assert trace.nodes[2].message.content == "fine"


async def test_a_call_in_an_env_without_tools_stays_text(engine: Any, run: Any) -> None:
    engine.script = lambda prompt: f"42 {wrapped('{')}"
    trace = await run("in-process")
    assert (trace.ok, trace.num_turns, trace.reward) == (True, 1, 1.0)
    assert trace.last_reply == f"42\n{wrapped('{')}"


async def test_cancelling_a_rollout_while_a_tool_runs_is_no_answer(engine: Any, run: Any) -> None:
    engine.script = lambda prompt: wrapped('{"name": "waits", "arguments": {}}')
    task = asyncio.create_task(run({"id": "in-process", "tools": [f"{__name__}:waits"]}))
    await WAITING.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


WAITING = asyncio.Event()


async def waits() -> None:
    WAITING.set()
    await asyncio.Event().wait()


waits.schema = ADD | {"function": {**ADD["function"], "name": "waits"}}  # type: ignore


async def test_a_system_prompt_and_a_conversation_open_the_request() -> None:
    harness = InProcessHarness.__new__(InProcessHarness)
    plain = vf.TaskData(prompt="hi", system_prompt="be brief")
    assert harness.opening(plain) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    talk = vf.TaskData(prompt=[vf.UserMessage(content="a"), vf.AssistantMessage(content="b")])
    assert harness.opening(talk) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize("path", ["no_such_module:x", f"{__name__}:nothing", "json:dumps", "json"])
def test_an_invalid_tool_is_refused_with_its_name(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools: '{path}' is not a tool"):
        load_tool(path)


async def test_a_turn_limit_stops_the_rollout_cleanly(engine: Any, run: Any) -> None:
    trace = await run("in-process", EchoTaskset, TalkEnv, max_turns=2)
    assert (trace.num_turns, trace.stop_condition, trace.ok) == (2, "max_turns", True)
    assert trace.is_truncated


async def test_a_stop_of_the_task_ends_the_rollout(engine: Any, run: Any) -> None:
    class OnceTask(EchoTask):
        @vf.stop
        async def once(self, trace: vf.Trace) -> bool:
            return trace.num_turns >= 1

    class OnceTaskset(vf.Taskset[OnceTask, vf.TasksetConfig]):
        def load(self) -> Any:
            yield OnceTask(EchoData(prompt="say 42"), self.config.task)

    trace = await run("in-process", OnceTaskset, TalkEnv)
    assert (trace.num_turns, trace.stop_condition, trace.ok) == (1, "once", True)


@pytest.mark.parametrize("batches", [False, True])
async def test_the_policy_version_of_every_token_is_recorded(
    engine: Any, run: Any, batches: bool
) -> None:
    engine.version, engine.script, engine.takes_batches = 6, lambda prompt: "abcde", batches
    trace = await run("in-process", EchoTaskset, TalkEnv)
    spans = [(6, 0, 3), (7, 3, 6)]  # five letters and the stop token
    assert trace.info == {"weight_versions": {"1": spans, "3": spans, "5": spans}}


async def test_an_engine_without_versions_leaves_no_version_spans(engine: Any, run: Any) -> None:
    assert (await run("in-process")).info == {}


async def test_logprobs_in_the_shape_of_vllm_0_32_are_read(engine: Any, run: Any) -> None:
    engine.native_shape = True
    trace = await run("in-process")
    assert trace.ok
    assert trace.nodes[1].logprobs == [-0.25, -0.5, -0.75]


async def test_an_engine_that_refuses_is_a_provider_error_with_its_reason(
    engine: Any, run: Any
) -> None:
    def refuse(prompt: str) -> str:
        from aiohttp import web

        raise web.HTTPBadRequest(text='{"error": "no such model"}')

    engine.script = refuse
    trace = await run("in-process")
    assert (trace.ok, trace.last_error.type, trace.last_error.status_code) == (
        False,
        "ProviderError",
        400,
    )
    assert "no such model" in trace.last_error.message
    assert trace.calls[0].error.status_code == 400


async def test_cancelling_a_rollout_reaches_the_engine_and_leaves_nothing_registered(
    engine: Any, run: Any
) -> None:
    started = asyncio.Event()
    gone = asyncio.Event()

    async def wait_for_ever(request: Any) -> Any:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()

    from aiohttp import web

    app = web.Application()
    app.router.add_post("/inference/v1/generate", wait_for_ever)
    async with listening(app, handler_cancellation=True) as url:
        engine.base_url = f"{url}/v1"
        task = asyncio.create_task(run("in-process"))
        await started.wait()
        assert len(seam._servers) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), LIMIT)
        assert not seam._servers


async def test_requests_of_one_tick_share_an_http_request_and_end_apart(engine: Any) -> None:
    engine.script = lambda prompt: "..." if prompt == "zz" else "ok"
    root, timeout = engine.base_url.removesuffix("/v1"), aiohttp.ClientTimeout(sock_read=LIMIT)

    def ask(name: str, text: str) -> asyncio.Task[Any]:
        ids = ids_to_bytes(TOKENIZER.encode(text, add_special_tokens=False))
        return asyncio.create_task(
            connection.send(BatchRequest(request_id=name, token_ids=ids, model=MODEL))
        )

    async with aiohttp.ClientSession() as session:
        connection = BatchConnection(session, root, timeout)
        good, bad = ask("good", "ab"), ask("bad", "a")
        assert bytes_to_ids((await good).token_ids) == TOKENIZER.encode(
            "ok<|im_end|>", add_special_tokens=False
        )
        with pytest.raises(seam.ProviderError, match="HTTP 400: one token") as refused:
            await bad
        assert refused.value.status_code == 400
        assert engine.batches == [["good", "bad"]]

        stuck = ask("stuck", "zz")
        while "stuck" not in engine.aborted:
            await asyncio.sleep(0.001)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        await asyncio.wait_for(engine.aborted["stuck"].wait(), LIMIT)
        await connection.close()


async def test_an_engine_that_breaks_a_reply_off_fails_what_is_missing() -> None:
    async def half(request: Any) -> web.Response:
        whole = frame(Answer(index=0, finish_reason="stop"))
        return web.Response(body=whole + whole[:-1])

    app = web.Application()
    app.router.add_post(ROUTE, half)
    async with listening(app) as url, aiohttp.ClientSession() as session:
        connection = BatchConnection(session, url, aiohttp.ClientTimeout())
        asked = [BatchRequest(request_id=name, token_ids=b"") for name in "ab"]
        first, second = await asyncio.gather(*map(connection.send, asked), return_exceptions=True)
        assert first.finish_reason == "stop"
        assert (second.status_code, "early" in str(second)) == (503, True)
        await connection.close()


async def test_a_runtime_has_a_folder_once_something_uses_it() -> None:
    runtime = SubprocessRuntime(vf.SubprocessConfig(), name=uuid4().hex)
    await runtime.start()
    folder = Path(runtime.info.id)
    assert not folder.exists()
    await runtime.write("a.txt", b"1")
    assert (await runtime.read("a.txt"), folder.exists()) == (b"1", True)
    await runtime.stop()
    assert not folder.exists()


def test_an_unregistered_secret_is_refused() -> None:
    with pytest.raises(PluginError, match="not in this process"):
        seam.server_of("unknown")


def test_another_version_of_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "version", lambda name: "0.5.1")
    with pytest.raises(PluginError, match=r"found verifiers 0\.5\.1, expected 0\.4\.0"):
        seam._check()


@pytest.mark.parametrize(
    ("reply", "spans"),
    [
        (b'{"choices":[{"weight_versions":[{"version":"3","start":0,"end":2}]}]}', [(3, 0, 2)]),
        (b'{"choices":[{"weight_versions":[{"version":"default","start":0,"end":2}]}]}', []),
        (b'{"choices":[{"token_ids":[1]}]}', []),
        (b'{"choices":[]}', []),
        (b"not json", []),
    ],
)
def test_version_spans_are_read_if_they_are_integers(
    reply: bytes, spans: list[tuple[int, int, int]]
) -> None:
    assert version_spans(reply) == spans


def test_a_header_is_encoded_once_and_again_for_another_tokenizer() -> None:
    class Letters:
        def __init__(self, first: int) -> None:
            self.first, self.encoded = first, []

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            self.encoded.append((text, add_special_tokens))
            return [ord(letter) - self.first for letter in text]

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(each + self.first) for each in ids)

    small, large = Letters(97), Letters(65)
    after = [
        reasoning._after_header(each, each.encode(text, False), "ab", last=last)
        for each, text in ((small, "abc"), (small, "xabcd"), (large, "abab"))
        for last in (False, True)
    ]
    assert after == [[2], [2], [23, 0, 1, 2, 3], [2, 3], [32, 33], []]
    assert [each.encoded.count(("ab", False)) for each in (small, large)] == [1, 1]


def test_a_reply_that_names_its_tokens_is_unchanged() -> None:
    reply = b'{"choices":[{"logprobs":{"content":[{"token":"token_id:5","token_id":5}]}}]}'
    assert with_token_names(reply) is reply


def test_every_turn_of_every_run_of_every_agent_has_its_own_seed() -> None:
    from in_process.engine import seed_offset, with_offset

    offsets = {
        seed_offset(agent, number, run)
        for agent in ("agent", "judge")
        for number in range(4)
        for run in range(3)
    }
    assert len(offsets) == 24 and seed_offset("agent", 0) == 0
    body = {"token_ids": [1], "sampling_params": {"seed": 2**31 - 1, "temperature": 1.0}}
    assert with_offset(body, 0) is body
    assert with_offset(body, 3)["sampling_params"] == {"seed": 2, "temperature": 1.0}
    assert body["sampling_params"]["seed"] == 2**31 - 1
    unseeded = {"sampling_params": {"temperature": 1.0}}
    assert with_offset(unseeded, 3) is unseeded


def test_runs_of_an_agent_are_numbered_per_episode() -> None:
    from types import SimpleNamespace

    from in_process import turns

    class Context:
        """A fake context: verifiers creates one per agent and episode."""

    traces: list[Any] = [SimpleNamespace(id=name) for name in "abc"]
    first, second = Context(), Context()
    numbers: list[int] = [turns.run_number(first, trace) for trace in (*traces, traces[0])]
    assert numbers == [0, 1, 2, 0]  # a later segment belongs to its run
    assert turns.run_number(second, traces[2]) == 0
    known = len(turns._runs)
    del first, second
    assert len(turns._runs) == known - 2


def deepseek(name: str) -> str:
    """A special token of the family, which has fullwidth bars."""
    return f"<\uff5c{name}\uff5c>"


def deepseek_reply(text: str) -> ParsedResponse:
    """``text`` as the parser of DeepSeek V3 reads it."""
    tokenizer = build_tokenizer()
    names = ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
    calls = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end")
    calls = (*(f"tool▁{name}" for name in (*calls, "output▁begin", "output▁end", "sep")),)
    tokenizer.add_tokens([*map(deepseek, (*names, *calls))], special_tokens=True)
    renderer = create_renderer(tokenizer, DeepSeekV3RendererConfig())
    keep_what_was_written(renderer)
    return renderer.parse_response(tokenizer.encode(text, add_special_tokens=False))


BEGIN = deepseek("tool▁calls▁begin")
SEP = deepseek("tool▁sep")


@pytest.mark.parametrize("section", [BEGIN, f"{BEGIN}function echo", f"{BEGIN}{SEP}echo"])
def test_a_section_of_calls_without_any_call_stays_text_and_is_reported(section: str) -> None:
    """The parser drops it: it looks for the token that begins a call."""
    parsed = deepseek_reply(f"said{section}")
    assert parsed.content == f"said\n{section}"
    assert [fault_of(call) for call in parsed.tool_calls] == ["no call follows its first token"]


def deepseek_call(name: str) -> str:
    begin = deepseek("tool▁call▁begin")
    end = deepseek("tool▁call▁end")
    return f'{begin}function{SEP}{name}\n```json\n{{"a": 1}}\n```{end}'


END = deepseek("tool▁calls▁end")


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"hi{BEGIN}{deepseek_call('x')}{END}", "hi", ["x"]),
        (f"hi{BEGIN}{deepseek_call('x')}{END} and more", "hi\nand more", ["x"]),
        (f"{BEGIN}{deepseek_call('x')}{END}\n\n", "", ["x"]),
        (f"{BEGIN}{deepseek_call('x')}", "", ["x"]),
        (f"{BEGIN}lead {deepseek_call('x')}{END}", "lead", ["x"]),
        (
            f"{BEGIN}{deepseek_call('x')}between{deepseek_call('y')}{END}after",
            "between\nafter",
            ["x", "y"],
        ),
        (f"<think>t</think>said{BEGIN}{deepseek_call('x')}{END}more", "said\nmore", ["x"]),
    ],
)
def test_a_text_beside_calls_stays_and_the_calls_do_too(
    text: str, content: str, names: list[str]
) -> None:
    """The parser of DeepSeek reads what stands before the section, and calls in it."""
    parsed = deepseek_reply(text)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        (name, {"a": 1}) for name in names
    ]


LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_CALL = '{"name": "f", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("hello", "hello", []),
        (LLAMA_CALL, "", ["f"]),
        (f"{LLAMA_HEADER}bye", "bye", []),
        (f"{LLAMA_HEADER}{LLAMA_CALL}", "", ["f"]),
        ("hello<|end_header_id|>bye", "hello\nbye", []),
        ("gone<|end_header_id|>", "gone", []),
        (f"x{LLAMA_HEADER}{LLAMA_CALL}", "x", ["f"]),
        ("a<|end_header_id|>b<|end_header_id|>c", "a<|end_header_id|>b\nc", []),
    ],
)
def test_a_text_before_a_header_that_the_model_writes_stays(
    text: str, content: str, names: list[str]
) -> None:
    """The parser of Llama 3 begins to read behind the last header."""
    tokenizer = build_tokenizer()
    ends = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id")
    others = ("python_tag", "finetune_right_pad_id")
    tokenizer.add_tokens([f"<|{name}|>" for name in (*ends, *others)], special_tokens=True)
    renderer = create_renderer(tokenizer, Llama3RendererConfig())
    keep_what_was_written(renderer)
    parsed = renderer.parse_response(tokenizer.encode(text, add_special_tokens=False))
    assert parsed.content == content
    assert [call.name for call in parsed.tool_calls] == names


def test_arguments_that_no_parser_can_nest_have_a_fault() -> None:
    """Malformed for the renderer's parser, and too deep for the one that says why."""
    call = ParsedToolCall(raw='{"a":' * 5000, status=ToolCallParseStatus.INVALID_JSON)
    assert fault_of(call) == "it nests deeper than 64 levels"
