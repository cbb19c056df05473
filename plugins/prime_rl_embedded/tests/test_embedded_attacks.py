"""Hostile and broken clients cost themselves only."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from waiting import eventually, until

from prime_rl_embedded import completions, connections
from prime_rl_embedded.schema import Limits
from prime_rl_embedded.testing import Served, serve
from prime_rl_engine_kit import batch, body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import check_choices

BIG = 64 * 2**20
"""More than the buffers of a connection."""


# -- connections and bodies, by uvicorn in this process -----------------------------------------


async def answer(http: HTTPRequest) -> Response:
    try:
        data = await body.read_body(http)
    except RequestError as error:
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)
    return PlainTextResponse("x" * int(data))


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[uvicorn.Server, int]]:
    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    config = uvicorn.Config(
        app, port=0, http=connections.PatientProtocol, ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield server, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


def post(data: bytes, length: int | None = None) -> bytes:
    """A request; ``length``: that its head promises."""
    size = len(data) if length is None else length
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (size, data)


async def closed(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
    await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)


async def test_connections_that_stall_are_ended_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    writers: list[asyncio.StreamWriter] = []
    async with listening() as (server, port):

        async def opened(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writers.append(writer)  # a writer that nothing holds closes its connection
            return reader, writer

        idle, idle_writer = await opened(post(b"1"))
        assert (await idle.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200")
        silent, _ = await opened(b"")
        half, _ = await opened(b"POST / HTTP/1.1\r\nHost")
        second, second_writer = await opened(post(b"1"))
        assert (await second.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200")
        second_writer.write(b"POST / HT")
        unfinished, _ = await opened(post(b"1", length=9))
        _, deaf = await opened(post(b"%d" % BIG))
        deaf.transport.pause_reading()  # type: ignore[attr-defined]
        assert await silent.read() == await half.read() == await second.read() == b""
        late = await unfinished.read()
        assert late.startswith(b"HTTP/1.1 408") and b"did not come within 0.2 s" in late
        await until(lambda: len(server.server_state.connections) == 1)
        idle_writer.write(post(b"2"))
        assert (await idle.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200")
        await closed(*writers)


def test_a_client_that_reads_slowly_is_waited_for() -> None:
    """It leaves 9, 4, 4 bytes unread at the three looks."""
    later: list[Callable[[], None]] = []
    unread, ended = [9, 4, 4], []
    protocol = object.__new__(connections.PatientProtocol)
    protocol.loop = SimpleNamespace(call_later=lambda seconds, call: later.append(call))
    protocol.transport = SimpleNamespace(
        get_write_buffer_size=lambda: unread.pop(0), abort=lambda: ended.append(len(unread))
    )
    protocol._watch(10)
    while later:
        later.pop()()
    assert ended == [0] and unread == []


@pytest.mark.parametrize(
    "start",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX: ",
        b"POST /",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    ],
    ids=["headers", "one header", "address", "trailers", "extension of a chunk"],
)
async def test_a_head_without_an_end_ends_its_connection(start: bytes) -> None:
    line = b"%s: y\r\n" % (b"x" * 1000) if start.endswith(b"\n") else b"x" * 1000
    async with listening() as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        sent = 0
        with pytest.raises(OSError):
            while sent < BIG:
                writer.write(line)
                await writer.drain()
                sent += len(line)
        await until(lambda: not server.server_state.connections)
        # What the server took lies in the buffers of the connection.
        assert sent < BIG
        await closed(writer)


async def test_a_body_in_chunks_of_one_byte_is_read() -> None:
    number = b" " * 200_000 + b"3"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in number) + b"0\r\n\r\n")
        await writer.drain()
        assert (await reader.readuntil(b"\r\n\r\nxxx")).startswith(b"HTTP/1.1 200")
        await closed(writer)


async def test_bodies_that_are_being_read_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "MAX_UNREAD_BYTES", 1000)
    async with listening() as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"1" * 600, length=700))
        await until(lambda: body._Unread.total == 600)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            refused = await http.post("/", content=b" " * 600)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert "bodies that are being read exceed" in refused.json()["error"]["message"]
            await closed(writer)
            await until(lambda: body._Unread.total == 0)
            assert (await http.post("/", content=b" " * 600 + b"3")).text == "xxx"


# -- the engine, as a server process --------------------------------------------------------------


@pytest.fixture(scope="module")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One slot, three places in the queue; weights come from the folder ``root``."""
    root = tmp_path_factory.mktemp("root")
    with serve(
        model_folder, max_model_len=512, num_slots=1, max_waiting=3, weights_roots=[root]
    ) as served:
        served.root = root  # type: ignore[attr-defined]
        yield served


def test_a_full_queue_answers_429_until_the_clients_in_it_are_gone(small: Served) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    data = json.dumps({"token_ids": [1]}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
    small.post("/pause", admin=True)
    with ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(closing(socket.create_connection((host, int(port)))))
            client.sendall(f"{head}\r\n\r\n".encode() + data)
        small.wait_for("vllm:num_requests_waiting", 3)
        for route, request in (
            ("/inference/v1/generate", {"token_ids": [1]}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
        ):
            refused = small.post(route, request)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1"), route
            assert "3 requests wait, and at most 3 may" in refused.json()["error"]["message"]
        one = batch.BatchRequest(request_id="a", token_ids=batch.ids_to_bytes([1]))
        sent = small.http.post(
            batch.ROUTE, content=msgspec.msgpack.encode(batch.RequestBatch([one]))
        )
        (answer,) = batch.take_answers(bytearray(sent.content))
        assert (answer.status, "3 requests wait" in answer.error) == (429, True)
    eventually(lambda: small.metric("vllm:num_requests_waiting") == 0)  # still paused
    small.post("/resume", admin=True)
    assert len(small.generate([1], max_tokens=3)["choices"][0]["token_ids"]) == 3


HELLO = [{"role": "user", "content": "hello"}]
DEEP = json.loads("[" * 200 + "]" * 200)


@pytest.mark.parametrize(
    ("route", "request_body", "status", "reason"),
    [
        ("chat/completions", {"messages": [{}] * 100_000}, 400, "messages[0].role is None"),
        ("chat/completions", {"messages": HELLO * 150_000}, 413, "has more than 4.03 MiB"),
        ("chat/completions", {"messages": HELLO, "stop": ["x"] * 33}, 400, "stop has 33 strings"),
        ("chat/completions", {"messages": HELLO, "stop": "x" * 257}, 400, "of up to 257"),
        ("chat/completions", {"messages": HELLO, "logit_bias": DEEP}, 400, "logit_bias is [[[["),
        ("completions", {"prompt": [[1]] * 5000}, 400, "are 5000 answers; expected at most 4096"),
        ("completions", {"prompt": ["a"] * 33, "n": 128}, 400, "are 4224 answers"),
        ("completions", {"prompt": [1], "stop_token_ids": [0] * 2000}, 400, "has 2000 tokens"),
        (
            "completions",
            {"prompt": [[1] * 500] * 500, "echo": True, "logprobs": 20, "max_tokens": 0},
            400,
            "at most 16 of each of 250000 tokens fit an answer",
        ),
        (
            "completions",
            {"prompt": [[1]] * 4000, "logprobs": 20, "max_tokens": 500},
            400,
            "4000 choices of up to 500 tokens with 20 alternatives each are 40,000,000 entries",
        ),
    ],
)
def test_a_request_of_too_much_work_is_refused_before_the_work(
    small: Served, route: str, request_body: dict[str, Any], status: int, reason: str
) -> None:
    refused = small.post(f"/v1/{route}", request_body)
    message = refused.json()["error"]["message"]
    assert (refused.status_code, reason in message) == (status, True), message[:500]
    assert len(message) < 500


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([{"request_id": "a", "token_ids": b""}] * 4097, "length <= 4096"),
        ([{"request_id": "a", "token_ids": bytes(4 * 600)}], "the prompt has 600 tokens"),
        (
            [{"request_id": "a", "token_ids": bytes(4), "sampling_params": {"x": bytes(2**23)}}],
            "sampling_params has 8388",
        ),
        (
            [{"request_id": "a", "token_ids": bytes(4), "sampling_params": {"seed": "x"}}],
            "Expected `int | null`, got `str` - at `$.seed`",
        ),
        ([{"request_id": "a", "token_ids": bytes(3)}], "bad request: token_ids"),
    ],
)
def test_a_batch_of_too_much_work_is_refused_before_the_work(
    small: Served, requests: list[dict[str, Any]], reason: str
) -> None:
    sent = small.http.post(batch.ROUTE, content=msgspec.msgpack.encode({"requests": requests}))
    if sent.status_code == 200:
        (answer,) = batch.take_answers(bytearray(sent.content))
        assert (answer.status, reason in answer.error) == (400, True), answer.error
    else:
        message = sent.json()["error"]["message"]
        assert (sent.status_code, reason in message) == (400, True), message


def test_the_sampling_of_many_prompts_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stop tokens may be as many as the vocabulary has: prompts times these block the loop."""
    checked = []
    resolve = completions.resolve_sampling

    def counted(*args: Any, **options: Any) -> Any:
        checked.append(args)
        return resolve(*args, **options)

    monkeypatch.setattr(completions, "resolve_sampling", counted)
    limits = Limits("m", max_model_len=10, vocab_size=5, eos_token_ids=frozenset({4}))
    texts = SimpleNamespace(limits=limits, answer=lambda index, request, *_: request)
    route = completions.Completions(texts)  # type: ignore[arg-type]
    body = completions.CompletionBody(prompt="", stop_token_ids=[1, 2], max_tokens=5, n=2, seed=7)
    requests: list[Any] = route._answers(body, [[0] * 3, [0] * 8, [0]])
    assert len(checked) == 1
    # 10 tokens of context: the second prompt leaves room for 2.
    assert [request.params.max_tokens for request in requests] == [5, 5, 2, 2, 5, 5]
    assert [request.params.seed for request in requests] == [7, 8] * 3
    assert {request.params.stop_token_ids for request in requests} == {frozenset({1, 2, 4})}


@pytest.mark.parametrize(
    ("num_choices", "max_tokens", "alternatives", "is_refused"),
    [
        (1, 2**22, 1, False),
        (1, 2**22 + 1, 1, True),
        (128, 2**15, 1, False),
        (128, 2**15, 2, True),
        (128, 2**30, None, False),  # as many numbers as tokens
        (4, 2**15, 20, False),
        (8, 2**15, 20, True),
    ],
)
def test_alternatives_of_sampled_tokens_are_bounded(
    num_choices: int, max_tokens: int, alternatives: int | None, is_refused: bool
) -> None:
    refused = pytest.raises(RequestError, match="Lower max_tokens, n or the number of logprobs")
    with refused if is_refused else nullcontext():
        check_choices(num_choices, max_tokens, alternatives)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("fifo", "model.safetensors: not a file"),
        ("index", "'../model.safetensors' is not the name of a file"),
        ("outside", "lies outside of the run; expected a folder in"),
        ("link", "lies outside of the run; expected a folder in"),
        ("x" * 5000, "is no path: "),
        ("a\0b", "is no path: "),
        ("nowhere", "no such folder"),
    ],
)
def test_weights_that_no_run_has_are_refused(
    small: Served, model_folder: Path, folder: str, reason: str
) -> None:
    root: Path = small.root  # type: ignore[attr-defined]
    made: dict[str, Any] = {"outside": model_folder}
    path = made.get(folder, f"{root}/{folder}")
    if folder in ("fifo", "index"):
        Path(path).mkdir()
    if folder == "fifo":
        os.mkfifo(f"{path}/model.safetensors")
    elif folder == "index":
        table = {"weight_map": {"w": "../model.safetensors"}}
        Path(path, "model.safetensors.index.json").write_text(json.dumps(table))
    elif folder == "link":
        Path(path).symlink_to(model_folder)
    refused = small.update_weights(path)
    assert refused.status_code == 400
    assert reason in refused.json()["error"]["message"]
    assert small.http.get("/health").json()["version"] == 0


MEETING = {
    "directory": "m", "group": "g", "backend": "gloo", "rank": 1, "world_size": 2, "timeout": 9.0,
    "loopback": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": -5}, "version is -5; it must be in [0, 2147483647]"),
        ({"version": -1}, "version is -1"),
        ({"version": 2**31}, "version is 2147483648"),
        ({"version": True}, "Expected `int | null`, got `bool`"),
        ({"version": "3"}, "Expected `int | null`, got `str`"),
        ({"weight_dir": None}, "Expected `str`, got `null`"),
        ({"meeting": MEETING | {"rank": 0}}, "meeting.rank is 0 and meeting.world_size 2"),
        ({"meeting": MEETING | {"rank": -1}}, "meeting.rank is -1"),
        ({"meeting": MEETING | {"rank": 2}}, "meeting.rank is 2"),
        ({"meeting": MEETING | {"world_size": 1}}, "meeting.world_size 1"),
        ({"meeting": MEETING | {"timeout": 0}}, "meeting.timeout is 0"),
        ({"meeting": MEETING | {"timeout": -1.0}}, "meeting.timeout is -1"),
        ({"meeting": MEETING | {"backend": "smoke"}}, "Invalid enum value 'smoke'"),
        ({"meeting": MEETING}, "meeting.directory: m lies outside of the run"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(
    small: Served, change: dict[str, Any], reason: str
) -> None:
    root: Path = small.root  # type: ignore[attr-defined]
    refused = small.post("/update_weights", {"weight_dir": str(root)} | change, admin=True)
    message = refused.json()["error"]["message"]
    assert (refused.status_code, reason in message) == (400, True), message
    assert small.http.get("/health").json()["version"] == 0


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ("/pause?mode=abort", "mode: this engine keeps requests in flight"),
        ("/pause?clear_cache=true", "clear_cache: running requests keep their KV"),
        ("/sleep?level=2", "level: this engine keeps its weights on the host"),
        ("/sleep?level=-1", "level: this engine keeps its weights on the host"),
    ],
)
def test_other_admin_routes_check_what_they_take(small: Served, route: str, reason: str) -> None:
    refused = small.post(route, admin=True)
    assert refused.status_code == 400 and reason in refused.json()["error"]["message"]
    assert small.metric("prime_rl:paused") == small.metric("prime_rl:asleep") == 0
