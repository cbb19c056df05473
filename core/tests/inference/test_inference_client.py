"""The client of one engine, against real servers on loopback: retries, and what a look says."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from loopback import listening
from waiting import Clock, until

from prime_rl import EngineError
from prime_rl.errors import EngineGone
from prime_rl.inference import client, timing
from prime_rl.inference.client import EngineClient, EngineSilent, NoAnswer, NotListening
from prime_rl.inference.timing import RetryPolicy
from prime_rl.rundir.machine import free_ports
from prime_rl.weights.versions import Weights

QUICK = RetryPolicy(first_wait=0.01, longest_wait=0.02)
PATIENT = RetryPolicy(attempts=100_000, first_wait=0.01, longest_wait=0.02)
DROP = "drop the connection"


class Engine:
    """Answers each route with what is scripted for it, one entry a call, and then with 200."""

    def __init__(self, **script):
        self.script = {f"/{route}": list(answers) for route, answers in script.items()}
        self.paths = []
        self.slow = asyncio.Event()

    async def handle(self, request):
        self.paths.append(request.path)
        answers = self.script.get(request.path)
        answer = answers.pop(0) if answers else 200
        if answer == "slow":
            await self.slow.wait()
        elif answer == DROP:
            request.transport.abort()
        elif answer != 200:
            return web.Response(status=answer, text="the reason")
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def serving(engine, port=0):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    async with listening(app, port) as url:
        yield url
        engine.slow.set()


@asynccontextmanager
async def client_at(url, retry=QUICK, **options):
    """Closed even if the test fails: its socket would fail a later one."""
    admin = EngineClient(url, "k", retry=retry, **options)
    try:
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def client_of(engine, retry=QUICK, **options):
    async with serving(engine) as url, client_at(url, retry, **options) as admin:
        yield admin


def test_waits_double_from_one_second_to_ten():
    waits = [RetryPolicy().wait_after(attempt) for attempt in (1, 2, 3, 4, 5, 6, 5000)]
    assert waits == [1, 2, 4, 8, 10, 10, 10]


@pytest.mark.parametrize("trouble", [500, 502, 503, DROP])
async def test_an_engine_that_fails_twice_and_then_answers_is_updated(tmp_path, trouble):
    engine = Engine(pause=[trouble] * 2, update_weights=[trouble] * 2, resume=[trouble] * 2)
    async with client_of(engine) as admin:
        await admin.update(Weights(tmp_path, 1))
    assert engine.paths == ["/pause"] * 3 + ["/update_weights"] * 3 + ["/resume"] * 3


async def test_every_retry_is_logged_with_the_engine_and_the_reason(tmp_path, caplog):
    async with client_of(Engine(update_weights=[503, DROP])) as admin:
        with caplog.at_level(logging.WARNING, logger="prime_rl.inference.client"):
            await admin.update(Weights(tmp_path, 1))
    first, second = caplog.messages
    assert first == (
        f"engine {admin.url} refused /update_weights: 503 the reason; attempt 2 of 10 in 0.0 s"
    )
    assert second.startswith(f"engine {admin.url} did not answer /update_weights: ")
    assert second.endswith("; attempt 3 of 10 in 0.0 s")


async def test_attempts_end_and_the_error_counts_them(tmp_path):
    engine = Engine(pause=[500] * 99)
    async with client_of(engine, RetryPolicy(attempts=3, first_wait=0.0)) as admin:
        with pytest.raises(EngineError) as caught:
            await admin.update(Weights(tmp_path, 1))
    assert str(caught.value) == (f"engine {admin.url} refused /pause: 500 the reason (3 attempts)")
    assert engine.paths == ["/pause"] * 3 + ["/resume"]


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_what_is_the_clients_fault_is_not_tried_again(tmp_path, status):
    engine = Engine(update_weights=[status])
    async with client_of(engine) as admin:
        with pytest.raises(EngineError, match=rf"refused /update_weights: {status} the reason$"):
            await admin.update(Weights(tmp_path, 1))
    assert engine.paths == ["/pause", "/update_weights", "/resume"]


@pytest.fixture
def clock(monkeypatch):
    """The admin's: no deadline passes unless a test has it pass."""
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    return clock


async def test_all_attempts_together_take_at_most_twice_the_timeout(tmp_path, clock, monkeypatch):
    """Each answer takes 45 s: of the 200 s that twice 100 s are, the fifth uses up the last."""

    class Slow(Engine):
        async def handle(self, request):
            clock.now += 45 * (request.path == "/update_weights")
            return await super().handle(request)

    engine = Slow(update_weights=[500] * 100)
    retry = RetryPolicy(attempts=100, first_wait=0.01, longest_wait=0.01)
    monkeypatch.setattr(timing, "UPDATE_SECONDS", 100)
    async with client_of(engine, retry) as admin:
        with pytest.raises(EngineError, match=r"500 the reason \(5 attempts\)"):
            await admin.update(Weights(tmp_path, 1))
    assert engine.paths.count("/update_weights") == 5


async def test_an_answer_that_does_not_come_is_asked_for_again(tmp_path, clock, monkeypatch):
    """On a busy machine the second may be late as well: time for more never runs out here."""
    engine = Engine(update_weights=["slow"])
    monkeypatch.setattr(timing, "UPDATE_SECONDS", 0.2)
    async with client_of(engine, PATIENT) as admin:
        await admin.update(Weights(tmp_path, 1))
    assert engine.paths[:3] == ["/pause", "/update_weights", "/update_weights"]
    assert set(engine.paths[3:-1]) <= {"/update_weights"} and engine.paths[-1] == "/resume"


async def test_an_engine_that_pauses_late_is_waited_for_while_it_is_healthy(clock):
    """Twice the time, without a look at its health, is over before the third attempt."""

    class Late(Engine):
        async def handle(self, request):
            clock.now += 0.06 * (request.path == "/pause")
            return await super().handle(request)

    async with client_of(Late(pause=["slow"] * 6), PATIENT) as admin:
        await admin._post("/pause", 0.05)
    engine = Late(pause=["slow"] * 99, health=[500] * 99)
    async with client_of(engine, PATIENT) as admin:
        with pytest.raises(EngineSilent, match=r"did not answer /pause within .* attempts\)"):
            await admin._post("/pause", 0.05)


async def test_an_engine_that_is_being_restarted_is_waited_for(tmp_path, caplog):
    (port,) = free_ports(1)
    async with client_at(f"http://127.0.0.1:{port}", PATIENT) as admin:
        updating = asyncio.create_task(admin.update(Weights(tmp_path, 1)))
        await until(lambda: caplog.messages)
        assert "did not answer /pause: Connection refused" in caplog.messages[0]
        engine = Engine()
        async with serving(engine, port):
            await updating
    assert engine.paths == ["/pause", "/update_weights", "/resume"]


async def test_the_resume_after_a_refused_update_is_retried_and_the_refusal_reported(tmp_path):
    engine = Engine(update_weights=[400], resume=[503, DROP])
    async with client_of(engine) as admin:
        with pytest.raises(EngineError, match="refused /update_weights: 400"):
            await admin.update(Weights(tmp_path, 1))
    assert engine.paths[-3:] == ["/resume"] * 3


async def test_a_cancelled_update_leaves_the_engine_resumed(tmp_path):
    engine = Engine(update_weights=["slow"])
    async with client_of(engine) as admin:
        updating = asyncio.create_task(admin.update(Weights(tmp_path, 1)))
        await until(lambda: "/update_weights" in engine.paths)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
    assert engine.paths == ["/pause", "/update_weights", "/resume"]


async def test_an_engine_that_sleeps_is_woken_instead_of_paused(tmp_path):
    engine = Engine()
    async with client_of(engine) as admin:
        await admin.sleep()
        await admin.update(Weights(tmp_path, 1))
        await admin.update(Weights(tmp_path, 2))
    update = ["/update_weights", "/resume"]
    assert engine.paths == ["/pause", "/sleep", "/wake_up", *update, "/pause", *update]


async def test_no_answer_is_told_from_a_refusal(tmp_path):
    (port,) = free_ports(1)
    once = RetryPolicy(attempts=1)
    async with client_at(f"http://127.0.0.1:{port}", once) as admin:
        with pytest.raises(EngineGone, match="did not answer /pause: Connection refused"):
            await admin.update(Weights(tmp_path, 1))
    async with client_of(Engine(pause=[500]), once) as admin:
        with pytest.raises(EngineError, match="refused /pause: 500") as caught:
            await admin.update(Weights(tmp_path, 1))
    assert not isinstance(caught.value, EngineGone)


class Looked(Engine):
    """Answers /health and /v1/models with what it is given."""

    def __init__(self, health, models, status=200):
        super().__init__()
        self.answers = {"/health": health, "/v1/models": models}
        self.status = status

    async def handle(self, request):
        text = self.answers[request.path]
        return web.Response(status=self.status if request.path == "/health" else 200, text=text)


MODELS = '{"data": [{"id": "m"}]}'


@pytest.mark.parametrize(("health", "version"), [('{"version": 12}', 12), ("{}", None), ("", None)])
async def test_a_look_tells_the_version_if_the_engine_does(health, version):
    async with client_of(Looked(health, MODELS)) as admin:
        assert (await admin.look("m")).version == version


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Looked("loading", MODELS, 503), "refused /health: 503 loading"),
        (Looked("", '{"data": []}'), "serves no model, expected 'm'"),
        (Looked("", '{"data": [{"id": "x"}]}'), "serves 'x', expected 'm'"),
        (Looked("", "<html>"), "/v1/models: JSON is malformed"),
    ],
    ids=["unhealthy", "no model", "another model", "no engine"],
)
async def test_what_is_not_ready_says_why(engine, reason):
    async with client_of(engine) as admin:
        with pytest.raises(EngineError) as caught:
            await admin.look("m")
    assert reason in str(caught.value) and not isinstance(caught.value, EngineGone)


@pytest.mark.parametrize("host", ["127.0.0.1", "two-addresses"])
async def test_an_engine_that_takes_no_connection_does_not_listen(host, monkeypatch):
    (port,) = free_ports(1)
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
        for address in ("127.0.0.1", "127.0.0.2")
    ]
    if host == "two-addresses":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: found)
    async with client_at(f"http://{host}:{port}") as admin:
        with pytest.raises(NotListening, match="did not answer /health: Connection refused"):
            await admin.look()


async def test_a_name_that_does_not_resolve_or_a_connection_that_ends_says_nothing_of_its_process(
    monkeypatch,
):
    def no_answer(*args, **named):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async with client_of(Engine(health=[DROP])) as admin:
        with pytest.raises(NoAnswer) as dropped:
            await admin.look()
        monkeypatch.setattr(socket, "getaddrinfo", no_answer)
    async with client_at("http://an-engine:8000") as admin:
        with pytest.raises(NoAnswer, match="/health: Temporary failure in name") as unresolved:
            await admin.look()
    for caught in (dropped, unresolved):
        assert not isinstance(caught.value, NotListening)


@pytest.mark.parametrize(
    ("url", "verified"),
    [("http://h", False), ("https://h", True), ("HTTPS://h", True), ("HTTP://h", False)],
)
def test_the_certificate_of_an_engine_is_verified(url, verified, monkeypatch):
    """httpx opens a TLS connection for every spelling of the scheme."""
    found = {}
    monkeypatch.setattr(client.httpx, "AsyncClient", lambda **given: found.update(given))
    EngineClient(url, None)
    assert found["verify"] is verified


@pytest.mark.parametrize("away", [True, False])
async def test_a_connection_over_a_network_is_probed(monkeypatch, away):
    """Else a request without a time limit would wait for ever at one that NAT has dropped."""
    monkeypatch.setattr(client, "is_loopback", lambda url: not away)
    monkeypatch.setattr(client, "getproxies", dict)
    async with client_of(Engine()) as admin:
        answer = await admin.request("GET", "/health", None)
        connection = answer.extensions["network_stream"].get_extra_info("socket")
        probed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert bool(probed) is away
