"""The files of sessions: what they have at any moment, when a disk fails, and when they go."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_texts import END, text_of
from waiting import LIMIT, until

from prime_rl_gateway.book import Session
from prime_rl_gateway.store import Line, Place, Store

KEPT = {"x-stainless-retry-count": "1"}


def echo(prompt: str) -> str:
    """Repeats the last thing that was said."""
    last = prompt.rpartition("<|im_start|>user\n")[2].partition(END)[0]
    return f"{last}!{END}"


def files(running: Any) -> list[Path]:
    return [*(running.host.folder / "gateway" / "sessions").iterdir()]


async def conversation(running: Any, session: dict[str, Any], turns: int) -> None:
    said: list[tuple[str, str]] = []
    for turn in range(turns):
        said.append(("user", f"{turn}"))
        said.append(("assistant", await running.say(session, *said)))


async def test_each_reply_adds_one_line_with_what_is_new(gateway: Any) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await conversation(running, session, 6)
        await running.reward(session, reward=1.0)
        (file,) = files(running)
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        assert [len(line.get("nodes", [])) for line in lines] == [0, 2, 2, 2, 2, 2, 2, 0]
        assert [len(line.get("replies", {})) for line in lines] == [0, 1, 1, 1, 1, 1, 1, 0]
        assert lines[-1]["place"]["reward"] == 1.0
        (rollout,) = await running.group()
        assert rollout.num_turns == 6


async def test_a_process_that_is_killed_within_a_line_loses_only_that_line(gateway: Any) -> None:
    """The file is cut at each of its bytes near the ends of lines."""
    async with gateway(echo) as running:
        session = await running.open()
        await conversation(running, session, 3)
        (file,) = files(running)
        whole = file.read_bytes()

    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {cut for end in ends for cut in (end - 1, end, end + 1, end + 40) if cut < len(whole)}
    for cut in sorted(cuts):
        file.write_bytes(whole[:cut])
        replies = sum(end <= cut for end in ends) - 1
        async with gateway(echo) as running:
            if replies < 0:
                assert files(running) == []
                continue
            status = (await running.http.get(f"/sessions/{session['id']}")).json()
            assert (status["status"], status["replies"]) == ("open", replies)
            await running.say(session, ("user", "last"))
            await running.reward(session, reward=1.0)
            (rollout,) = await running.group()
            assert rollout.num_turns == replies + 1


@pytest.mark.parametrize("tail", [b"", b"\0" * 300, b'{"place": {"id":', b"\xff\xfe" * 9])
async def test_what_stands_behind_the_last_whole_line_is_overwritten(
    gateway: Any, tail: bytes
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        (file,) = files(running)
    with file.open("ab") as end:
        end.write(tail)
    for _ in range(2):  # the second process reads what the first has written
        async with gateway(echo) as running:
            await running.say(session, ("user", "two"))
    async with gateway(echo) as running:
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
    assert rollout.num_turns == 3


async def test_a_file_that_is_damaged_costs_its_own_session_and_says_so(
    gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(echo) as running:
        sessions = [await running.open() for _ in range(2)]
        first = min(files(running), key=lambda file: file.name != f"{sessions[0]['id']}.jsonl")
    first.write_bytes(b"not a line\n")
    async with gateway(echo) as running:
        statuses = [
            (await running.http.get(f"/sessions/{session['id']}")).status_code
            for session in sessions
        ]
    assert statuses == [410, 200]
    assert "its session is lost" in caplog.text


@pytest.mark.parametrize("tail", [b"", b'{"half', b"\0" * 300])
def test_the_place_of_a_session_is_that_of_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes
) -> None:
    """However the lines lie in the blocks that are read."""
    monkeypatch.setattr("prime_rl_gateway.store.BLOCK", 64)
    store = Store(tmp_path)
    sizes = [1, 2, 60, 64, 65, 500, 5000]
    for number in range(60):
        rewards = [float(size) for size in (sizes * 3)[number % 7 :][: 1 + number % 3]]
        session = Session(
            id=f"s{number}",
            number=number,
            tenant="t",
            group="g",
            task=None,
            idempotency_key=None,
            opened_at=0.0,
            touched_at=0.0,
        )
        end = 0
        for reward in rewards:
            session.reward = reward
            text = "x" * int(reward)
            end = store.append(Line(place=Place.of(session), nodes=[{"text": text}]), end)
        with store._path(session.id).open("ab") as file:
            file.write(tail)
    store._path("never").write_bytes(tail)

    places = store.places()
    assert [place.number for place in places] == [*range(60)]
    assert places == [store.read(place.id).place for place in places]
    assert not store._path("never").exists()


async def test_a_restart_reads_whole_only_what_is_open(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(echo) as running:
        sessions = [await running.open() for _ in range(4)]
        for session in sessions[:3]:
            await running.say(session, ("user", "one"))
            await running.reward(session, reward=1.0)
    read = Store.read
    whole: list[str] = []

    def noted(self: Store, session_id: str) -> Any:
        whole.append(session_id)
        return read(self, session_id)

    monkeypatch.setattr(Store, "read", noted)
    async with gateway(echo) as running:
        assert whole == [sessions[3]["id"]]
        groups = [await running.group() for _ in range(3)]
    assert [rollout.info["session"] for (rollout,) in groups] == [s["id"] for s in sessions[:3]]


async def test_clients_are_told_to_wait_while_sessions_are_read(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        url, headers = running.url, running.http.headers
    may_read = threading.Event()
    read = Store.read

    def later(self: Store, session_id: str) -> Any:
        assert may_read.wait(LIMIT)
        return read(self, session_id)

    monkeypatch.setattr(Store, "read", later)
    path = f"/sessions/{session['id']}"
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(gateway(echo)))
        client = httpx.AsyncClient(base_url=url, headers=headers, trust_env=False)
        http = await stack.enter_async_context(client)
        answers: list[httpx.Response] = []
        try:
            while not answers:
                with suppress(httpx.ConnectError):
                    answers.append(await http.get(path))
                await asyncio.sleep(0.005)
            answers.append(await http.post("/sessions", json={}))
            answers.append(await http.get("/health"))
        finally:
            may_read.set()
        assert [answer.status_code for answer in answers] == [503] * 3
        assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
        running = await starting
        assert (await running.http.get(path)).json()["status"] == "open"
        assert await running.say(session, ("user", "two")) == "two!"


# -- a disk that fails ---------------------------------------------------------------------------


@contextmanager
def full_disk(running: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each line is half written, and then there is no room."""
    store = running.source.server._store

    def append(line: Any, size: int) -> int:
        path = store._path(line.place.id)
        path.write_bytes((path.read_bytes() if path.exists() else b"")[:size] + b'{"pla')
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", append)
        yield


async def test_a_session_that_cannot_be_written_is_not_open_and_may_be_asked_for_again(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"Idempotency-Key": "k"}
    async with gateway(echo) as running:
        with full_disk(running, monkeypatch):
            asked = [running.http.post("/sessions", json={}, headers=key) for _ in range(2)]
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 503
                assert int(answer.headers["Retry-After"]) > 0
                assert "written" in answer.json()["error"]["message"]
            assert running.source.book.num_open == 0
        answer = await running.http.post("/sessions", json={}, headers=key)
        assert answer.status_code == 201
        await running.say(answer.json(), ("user", "one"))


async def test_a_reply_that_cannot_be_written_is_there_when_the_client_asks_again(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
    async with gateway(echo) as running:
        session = await running.open()
        path = f"/sessions/{session['id']}/v1/chat/completions"
        with full_disk(running, monkeypatch):
            answer = await running.http.post(path, json=body)
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert (await running.reward(session, reward=1.0)).status_code == 503
            for _ in range(2):
                assert (await running.reward(session, turn=0, reward=0.5)).status_code == 503
        answer = await running.http.post(path, json=body, headers=KEPT)
        assert answer.json()["choices"][0]["message"]["content"] == "one!"
        assert len(running.policy.sampled) == 1
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
    assert rollout.num_turns == 1


@pytest.fixture
def keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events begin at once, and not after a minute."""
    from verifiers.v1.interception import server

    monkeypatch.setattr(server, "KEEPALIVE_GRACE_SECONDS", 0)


async def test_a_streamed_reply_whose_events_have_begun_is_on_disk_before_it_leaves(
    gateway: Any, keep_alives: None
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        held, written = asyncio.Event(), asyncio.Event()
        append = running.source.server._write

        async def write(*asked: Any) -> None:
            await held.wait()
            await append(*asked)
            written.set()

        running.source.server._write = write
        sampled = running.policy.sampled
        async with openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"]
        ) as client:
            said: list[Any] = [{"role": "user", "content": "one"}]
            stream = await client.chat.completions.create(model="m", messages=said, stream=True)
            first = asyncio.create_task(anext(aiter(stream)))
            await until(lambda: len(sampled) == 1)
            done, _ = await asyncio.wait({first}, timeout=0.2)
            assert not done  # the disk is waited for

            held.set()
            await first
            assert written.is_set()
            assert "one!" in files(running)[0].read_text("utf-8")


@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
async def test_a_streamed_reply_that_cannot_be_written_ends_with_an_error_and_is_there_later(
    gateway: Any, keep_alives: None, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    async with gateway(echo) as running:
        session = await running.open()
        keys = {"api_key": session["api_key"], "max_retries": 0}
        chat = openai.AsyncOpenAI(base_url=session["base_url"], **keys)
        messages = anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], **keys)
        said: list[Any] = [{"role": "user", "content": "one"}]

        async def ask(**headers: Any) -> str:
            more: dict[str, Any] = {"model": "m", "stream": True, "extra_headers": headers}
            if route == "chat":
                events: Any = await chat.chat.completions.create(messages=said, **more)
            elif route == "responses":
                events = await chat.responses.create(input=said, **more)
            else:
                events = await messages.messages.create(messages=said, max_tokens=9, **more)
            return "".join([event.model_dump_json() async for event in events])

        async with chat, messages:
            with (
                full_disk(running, monkeypatch),
                pytest.raises((openai.APIError, anthropic.APIError), match="Try again later"),
            ):
                await ask()
            assert "one!" in await ask(**KEPT)
            assert len(running.policy.sampled) == 1
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
    assert rollout.num_turns == 1


async def test_a_file_that_cannot_be_read_now_is_read_later(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl_gateway.source.RETRY_SECONDS", 0.0)
    async with gateway(echo) as running:
        session = await running.open()
        await running.say(session, ("user", "one"))
        await running.reward(session, reward=1.0)
        read = running.source._store.read
        failures = iter([OSError(24, "too many open files")] * 2)

        def fails_twice(session_id: str) -> Any:
            for failure in failures:
                raise failure
            return read(session_id)

        monkeypatch.setattr(running.source._store, "read", fails_twice)
        (rollout,) = await running.group()
        assert rollout.info["session"] == session["id"]


async def test_a_session_whose_file_has_gone_fails_and_the_next_one_trains(gateway: Any) -> None:
    async with gateway(echo) as running:
        sessions = [await running.open() for _ in range(2)]
        for session in sessions:
            await running.say(session, ("user", "one"))
            await running.reward(session, reward=1.0)
        running.source._store.delete([sessions[0]["id"]])
        (rollout,) = await running.group()
        assert rollout.info["session"] == sessions[1]["id"]
        assert running.source.book.counts["failed"] == 1


# -- files that go ---------------------------------------------------------------------------------


async def rewarded_group(running: Any) -> list[Any]:
    session = await running.open()
    await running.say(session, ("user", "a"))
    await running.reward(session, reward=1.0)
    group: list[Any] = await running.group()
    return group


@pytest.mark.parametrize(("reason", "state"), [(None, "taken"), ("too easy", "rejected")])
async def test_without_checkpoints_the_file_goes_when_the_group_is_settled(
    gateway: Any, reason: str | None, state: str
) -> None:
    async with gateway(echo, host={"has_checkpoints": False}) as running:
        (rollout,) = group = await rewarded_group(running)
        assert len(files(running)) == 1
        running.source.settled(group, reason)
        await until(lambda: files(running) == [])
        path = f"/sessions/{rollout.info['session']}"
        assert (await running.http.get(path)).json()["status"] == state
        assert running.source.metrics()[state] == 1
        assert not running.source.book.sessions


async def test_a_rejected_session_is_not_given_again_by_a_run_that_continues(
    gateway: Any, tmp_path: Path
) -> None:
    async with gateway(echo) as running:
        running.source.settled(await rewarded_group(running), "too easy")
        running.source.save(tmp_path)
    async with gateway(echo, load=tmp_path) as running:
        assert running.source.book.num_waiting == 0
        running.source.settled(await rewarded_group(running), None)
        running.source.save(tmp_path)
        for _ in range(9):
            running.source.checkpoint_complete(tmp_path)
        await until(lambda: files(running) == [])


# -- clients that ask again ------------------------------------------------------------------------


async def test_the_sdks_go_on_over_a_restart_with_the_reply_that_was_lost_on_its_way(
    gateway: Any,
) -> None:
    """The first process writes each reply and ends before it leaves."""
    calls: list[asyncio.Task[Any]] = []
    async with gateway(echo) as running:
        session = await running.open()
        chat = openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=20
        )
        messages = anthropic.AsyncAnthropic(
            base_url=session["anthropic_base_url"], api_key=session["api_key"], max_retries=20
        )
        write = running.source.server._write

        async def write_and_hang(*asked: Any) -> None:
            await write(*asked)
            await asyncio.Event().wait()

        running.source.server._write = write_and_hang
        said: list[Any] = [{"role": "user", "content": "one"}]
        calls = [
            asyncio.create_task(chat.chat.completions.create(model="m", messages=said)),
            asyncio.create_task(chat.responses.create(model="m", input="two")),
            asyncio.create_task(messages.messages.create(model="m", max_tokens=9, messages=said)),
        ]
        await until(lambda: len(files(running)[0].read_bytes().splitlines()) == 4)
        sampled = [text_of(reply) for _, reply, _ in running.policy.sampled]

    async with gateway(echo) as running:
        first, second, third = await asyncio.gather(*calls)
        assert first.choices[0].message.content == "one!"
        assert second.output_text == "two!"
        assert third.content[0].text == "one!"
        await chat.close()
        await messages.close()
        assert running.policy.sampled == []
        await running.reward(session, reward=1.0)
        (rollout,) = await running.group()
    assert sorted(sampled) == sorted(
        text_of(sample.token_ids[sample.loss_mask]) for sample in rollout.samples
    )
