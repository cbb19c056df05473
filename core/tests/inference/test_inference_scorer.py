"""Prompt scores over real HTTP: what is sent, what is read, outages, replicas, refusals."""

import asyncio
import logging
from collections import Counter
from contextlib import asynccontextmanager
from itertools import chain, repeat

import numpy as np
import pytest
from aiohttp import web
from loopback import listening
from pydantic import ValidationError
from waiting import LIMIT, Clock, until

from prime_rl import (
    Completion,
    ConfigError,
    EngineError,
    FrozenModel,
    OverlongError,
    StreamError,
)
from prime_rl.inference import engine as engine_module
from prime_rl.inference import pool as pool_module
from prime_rl.inference.client import EngineClient
from prime_rl.inference.pool import FrozenPool
from prime_rl.inference.scorer import ROUTE, PromptScorer
from prime_rl.rundir.machine import free_ports

WHERE = "env 'a': teacher"
MODEL = "big"
QUICK = 0.02


class Engine:
    """A stand-in engine: the logprob of token t is -t / 8. Notes what it is
    asked."""

    def __init__(self, **settings):
        self.asked, self.headers, self.refusals = [], [], []
        self.inflight = self.most_inflight = 0
        self.names, self.max_model_len, self.healthy = [MODEL], 64, True
        self.delay = lambda ids: 0.0
        self.hold = asyncio.Event()
        self.hold.set()
        self.entries = lambda ids: [None, *({str(t): {"logprob": -t / 8}} for t in ids[1:])]
        self.__dict__ |= settings

    async def models(self, request):
        cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.names]
        return web.json_response({"data": cards})

    async def health(self, request):
        return web.Response(status=200 if self.healthy else 503, text="loading")

    async def generate(self, request):
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        if self.refusals:
            status, text = self.refusals.pop(0)
            return web.Response(status=status, text=text)
        self.inflight += 1
        self.most_inflight = max(self.most_inflight, self.inflight)
        try:
            await asyncio.sleep(self.delay(body["token_ids"]))
            await self.hold.wait()
        finally:
            self.inflight -= 1
        if "prompt_logprobs" in body["sampling_params"]:
            return web.json_response({"prompt_logprobs": self.entries(body["token_ids"])})
        return web.json_response({"choices": self.choices(body["sampling_params"]["n"])})

    def choices(self, n):
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        content = [{"token": "token_id:8", "logprob": -0.5}, {"token_id": 2, "logprob": -0.25}]
        choice = {"token_ids": [8, 2], "finish_reason": "stop", "weight_versions": spans}
        return [choice | {"logprobs": {"content": content}}] * n


@asynccontextmanager
async def serving(engine, port=0):
    """The engine's URL, as a config writes it."""
    app = web.Application()
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/health", engine.health)
    app.router.add_post("/inference/v1/generate", engine.generate)
    async with listening(app, port, handler_cancellation=True, shutdown_timeout=0.1) as url:
        yield f"{url}/v1"


@asynccontextmanager
async def pool(*urls, on_waiting=lambda text: None, poll=QUICK, api_key=None, **settings):
    """A scorer over the engines of a frozen model."""
    engines = FrozenPool(
        urls, MODEL, where=WHERE, api_key=api_key, on_waiting=on_waiting, poll=poll
    )
    try:
        yield PromptScorer(engines, MODEL, **settings)
    finally:
        await engines.close()


@asynccontextmanager
async def scoring_one(settings=None, **engine_settings):
    engine = Engine(**engine_settings)
    async with serving(engine) as url, pool(url, **settings or {}) as scoring:
        yield engine, scoring


def free_port():
    return free_ports(1)[0]


# -- what is asked, what is read ---------------------------------------------------------------


async def test_each_token_is_scored_and_the_first_is_zero():
    async with scoring_one() as (engine, scoring):
        column = await scoring.logprobs([8, 4, 2])
    assert column.tolist() == [0.0, -0.5, -0.25]
    assert column.dtype == "float32"
    assert engine.asked == [
        {
            "model": "big",
            "token_ids": [8, 4, 2],
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
    ]


async def test_a_logprob_is_found_by_its_token_wherever_it_stands():
    def entries(ids):
        return [None, {"7": {"logprob": -9.0}, str(ids[1]): {"logprob": -1.5, "rank": 2}}]

    async with scoring_one(entries=entries) as (_, scoring):
        assert (await scoring.logprobs([1, 2])).tolist() == [0.0, -1.5]


async def test_nothing_is_asked_about_a_sequence_without_a_second_token():
    async with scoring_one() as (engine, scoring):
        assert (await scoring.logprobs([5])).tolist() == [0.0]
        assert (await scoring.logprobs([])).tolist() == []
    assert engine.asked == []


async def test_the_salt_is_that_of_the_moment():
    versions = iter(["3", "4", None])
    settings = {"cache_salt": lambda: next(versions)}
    async with scoring_one(settings) as (engine, scoring):
        for _ in range(3):
            await scoring.logprobs([1, 2])
    assert [body.get("cache_salt", "none") for body in engine.asked] == ["3", "4", "none"]


async def test_the_key_of_a_frozen_model_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    engine = Engine()
    async with serving(engine) as url:
        model = FrozenModel(name=MODEL, base_url=url, api_key_var="TEACHER_KEY")
        engines = FrozenPool.of(model, where=WHERE, on_waiting=lambda text: None)
        await PromptScorer(engines, MODEL).logprobs([1, 2])
        await engines.close()
    assert engine.headers[0]["Authorization"] == "Bearer s3cret"
    assert "cache_salt" not in engine.asked[0]


async def test_several_keys_take_turns_and_headers_go_with_every_request(monkeypatch):
    for number in range(3):
        monkeypatch.setenv(f"KEY_{number}", f"s3cret-{number}")
    monkeypatch.setenv("TEAM", "blue")
    engine = Engine()
    async with serving(engine) as url:
        model = FrozenModel(
            name=MODEL,
            base_url=url,
            api_key_var=["KEY_0", "KEY_1", "KEY_2"],
            headers={"X-Project": "mine"},
            headers_from_env={"X-Team": "TEAM"},
        )
        engines = FrozenPool.of(model, where=WHERE, on_waiting=lambda text: None)
        scorer = PromptScorer(engines, MODEL)
        for _ in range(6):
            await scorer.logprobs([1, 2])
        await engines.close()
    used = [each["Authorization"] for each in engine.headers]
    # The looks at the engine's health take their turns too.
    assert len({*used}) > 1 and {*used} <= {f"Bearer s3cret-{number}" for number in range(3)}
    assert {(each["X-Project"], each["X-Team"]) for each in engine.headers} == {("mine", "blue")}
    assert "s3cret" not in model.model_dump_json() and "blue" not in model.model_dump_json()


async def test_a_request_with_a_key_of_its_own_keeps_it():
    """Scoring by the policy's engines has another key than their admin routes."""
    engine = Engine()
    body = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}
    mine = {"Authorization": "Bearer mine"}
    async with serving(engine) as url:
        client = EngineClient(url, ["one", "two"])
        for headers in ({}, mine, {}, {}):
            await client.request("POST", ROUTE, LIMIT, json=body, headers=headers)
        await client.close()
    used = [each["Authorization"].removeprefix("Bearer ") for each in engine.headers]
    assert used == ["one", "mine", "two", "one"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"api_key_var": ["KEY_0", "GONE"]}, "api_key_var is 'GONE', and the environment has no"),
        ({"headers_from_env": {"X-Team": "GONE"}}, "has the header X-Team from 'GONE', and the"),
    ],
)
def test_each_variable_that_is_missing_is_named(monkeypatch, table, said):
    monkeypatch.setenv("KEY_0", "s3cret-0")
    monkeypatch.delenv("GONE", raising=False)
    model = FrozenModel(name=MODEL, base_url="http://h/v1", **table)
    with pytest.raises(ConfigError) as caught:
        FrozenPool.of(model, where=WHERE, on_waiting=lambda text: None)
    assert said in str(caught.value) and "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["Authorization", "authorization", "X-Api-Key", "Cookie", "x-auth-token", "apikey", "X-Secret"],
)
def test_a_header_with_a_secret_is_not_written_into_the_config(name):
    with pytest.raises(ValidationError, match=rf"header {name} holds a secret.*headers_from_env"):
        FrozenModel(name=MODEL, base_url="http://h/v1", headers={name: "hunter2"})


@pytest.mark.parametrize("headers", [{"X Team": "a"}, {"": "a"}, {"X-Team": "a\nb"}, {"A:": "b"}])
def test_what_is_no_header_is_refused(headers):
    with pytest.raises(ValidationError, match="header"):
        FrozenModel(name=MODEL, base_url="http://h/v1", headers=headers)


def test_a_missing_key_is_named(monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    model = FrozenModel(name=MODEL, base_url="http://h/v1", api_key_var="TEACHER_KEY")
    with pytest.raises(ConfigError) as caught:
        FrozenPool.of(model, where=WHERE, on_waiting=lambda text: None)
    assert str(caught.value) == (
        "env 'a': teacher 'big': api_key_var is 'TEACHER_KEY', and the environment has no such "
        "variable, or an empty one. Export it, or leave api_key_var out if the endpoint needs no "
        "key."
    )


async def test_answers_that_overtake_each_other_reach_who_asked():
    async with scoring_one(delay=lambda ids: 0.1 / ids[0]) as (_, scoring):
        columns = await asyncio.gather(*(scoring.logprobs([i, i]) for i in range(1, 9)))
    assert [column[1] for column in columns] == [-i / 8 for i in range(1, 9)]


async def test_no_more_than_max_concurrency_are_in_flight():
    async with scoring_one({"max_concurrency": 3}) as (engine, scoring):
        engine.hold.clear()
        scores = asyncio.gather(*(scoring.logprobs([1, 2]) for _ in range(12)))
        await until(lambda: engine.inflight == 3)
        engine.hold.set()
        await scores
    assert engine.most_inflight == 3
    assert len(engine.asked) == 12


async def test_a_cancelled_score_frees_its_slot_and_its_request():
    delays = {1: 60.0, 2: 0.0}
    settings = {"max_concurrency": 1}
    async with scoring_one(settings, delay=lambda ids: delays[ids[0]]) as (engine, scoring):
        slow = asyncio.create_task(scoring.logprobs([1, 1]))
        await until(lambda: engine.inflight)
        slow.cancel()
        assert (await asyncio.wait_for(scoring.logprobs([2, 2]), LIMIT)).tolist() == [0.0, -0.25]
        with pytest.raises(asyncio.CancelledError):
            await slow


# -- outages -----------------------------------------------------------------------------------


async def test_what_may_pass_is_tried_again_and_logged_once(caplog):
    refusals = [(500, "oops"), (429, "slow down"), (503, "loading")]
    with caplog.at_level(logging.WARNING, "prime_rl.inference.pool"):
        async with scoring_one(refusals=refusals) as (engine, scoring):
            assert (await scoring.logprobs([8, 4])).tolist() == [0.0, -0.5]
    assert len(engine.asked) == 4
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith("env 'a': teacher 'big' at http://127.0.0.1:")
    assert away.endswith(" refused /inference/v1/generate: 500 oops; trying again")
    assert back.endswith(" answers again")


async def test_an_outage_pauses_names_the_endpoint_and_ends():
    port, said = free_port(), []
    url = f"http://127.0.0.1:{port}"
    async with pool(url, on_waiting=said.append) as scoring:
        scores = [asyncio.create_task(scoring.logprobs([8, 4])) for _ in range(3)]
        await until(lambda: len(said) == 2)
        assert not any(score.done() for score in scores)
        where = f"env 'a': teacher 'big' at {url}"
        refused = f"{where} did not answer /health: Connection refused"
        assert said == [f"{where} is starting", refused]
        async with serving(Engine(), port):
            columns = await asyncio.wait_for(asyncio.gather(*scores), LIMIT)
        assert [column.tolist() for column in columns] == [[0.0, -0.5]] * 3
    assert said[-1] is None
    assert said.count(None) == 1


async def test_a_wait_that_is_cancelled_is_not_shown_any_longer():
    said = []
    async with pool(f"http://127.0.0.1:{free_port()}", on_waiting=said.append) as scoring:
        score = asyncio.create_task(scoring.logprobs([8, 4]))
        await until(lambda: said)
        score.cancel()
        await asyncio.gather(score, return_exceptions=True)
    assert said[-1] is None


async def test_a_request_without_an_answer_in_time_is_tried_again():
    """Until one comes in time: on a busy machine that need not be the second."""
    waits = chain([3600.0], repeat(0.0))
    said = []
    settings = {"timeout": 0.1, "on_waiting": said.append}
    async with scoring_one(settings, delay=lambda ids: next(waits)) as (engine, scoring):
        assert (await scoring.logprobs([8, 4])).tolist() == [0.0, -0.5]
    assert len(engine.asked) >= 2
    assert any(
        text and text.endswith("did not answer /inference/v1/generate within 0.1 s")
        for text in said
    )


async def test_the_pause_between_attempts_doubles():
    refusals = [(500, "oops")] * 4
    async with scoring_one({"poll": 0.05}, refusals=refusals) as (_, scoring):
        start = asyncio.get_running_loop().time()
        await scoring.logprobs([8, 4])
        # 0.05 + 0.1 + 0.2 + 0.4; without doubling it would be 0.2
        assert asyncio.get_running_loop().time() - start >= 0.74


async def test_every_outage_is_logged_and_starts_with_a_short_pause(caplog):
    with caplog.at_level(logging.WARNING, "prime_rl.inference.pool"):
        async with scoring_one() as (engine, scoring):
            async with asyncio.timeout(60):
                for _ in range(12):  # one outage that long would pause for 82 s in all
                    engine.refusals = [(500, "oops")]
                    await scoring.logprobs([8, 4])
    said = [record.getMessage().split("127.0.0.1")[1].split(" ", 2)[1] for record in caplog.records]
    assert said == ["refused", "answers"] * 12


async def test_an_overloaded_server_is_asked_as_often_as_it_takes():
    async with scoring_one({"poll": 0.00001}, refusals=[(429, "slow down")] * 13) as (
        engine,
        scoring,
    ):
        assert (await scoring.logprobs([8, 4])).tolist() == [0.0, -0.5]
    assert len(engine.asked) == 14


# -- replicas ----------------------------------------------------------------------------------


async def test_a_group_stays_on_one_replica():
    engines = [Engine(), Engine()]
    async with serving(engines[0]) as one, serving(engines[1]) as two, pool(one, two) as scoring:
        for group_id in (0, 1, 2, 3, 3, 3):
            await scoring.logprobs([group_id, 1], group_id=group_id)
    assert [[body["token_ids"][0] for body in engine.asked] for engine in engines] == [
        [0, 2],
        [1, 3, 3, 3],
    ]


async def test_a_dead_replica_is_skipped_and_comes_back():
    engine, port, said = Engine(), free_port(), []
    revived = Engine()
    dead = f"http://127.0.0.1:{port}/v1"
    async with serving(engine) as url, pool(dead, url, on_waiting=said.append) as scoring:
        assert (await scoring.logprobs([8, 4], group_id=0)).tolist() == [0.0, -0.5]
        assert len(engine.asked) == 1
        async with serving(revived, port):
            await until(lambda: len(scoring.pool.serving) == 2)
            for _ in range(3):
                await scoring.logprobs([8, 4], group_id=1)
    assert len(revived.asked) == 3
    assert len(engine.asked) == 1
    assert said[-1] is None and said.count(None) == 1  # for the first answer


async def test_a_replica_that_only_fails_is_left_for_another_one():
    engines = [Engine(refusals=[(503, "no memory")] * 1000), Engine()]
    async with serving(engines[0]) as one, serving(engines[1]) as two, pool(one, two) as scoring:
        await scoring.pool.wait_ready(LIMIT)
        async with asyncio.timeout(30):
            assert (await scoring.logprobs([8, 4])).tolist() == [0.0, -0.5]
    assert [len(engine.asked) for engine in engines] == [1, 1]


async def test_one_look_without_an_answer_loses_nothing_however_old_the_last_one_is(monkeypatch):
    """A frozen model is not looked at while it serves."""
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(pool_module, "time", clock)
    async with scoring_one() as (engine, scoring):
        await scoring.logprobs([8, 4])
        clock.now += 3600
        engine.hold.clear()
        held = asyncio.create_task(scoring.logprobs([1, 2]))
        await until(lambda: engine.inflight)
        engine.refusals, engine.healthy = [(503, "busy")], False
        busy = asyncio.create_task(scoring.logprobs([2, 3]))
        await until(lambda: scoring.pool.engines[0].problem)
        assert scoring.pool.engines[0].serving
        engine.healthy = True
        engine.hold.set()
        await asyncio.gather(held, busy)
    assert len(engine.asked) == 4 and scoring.pool.engines[0].retried == 0


# -- refusals ----------------------------------------------------------------------------------


async def refused(error=EngineError, ids=(8, 4), settings=None, **engine_settings):
    """The message, with the port taken out, and the requests it took."""
    async with scoring_one(settings, **engine_settings) as (engine, scoring):
        with pytest.raises(error) as caught:
            await asyncio.wait_for(scoring.logprobs(list(ids)), LIMIT)
        (root,) = (engine.url for engine in scoring.pool.engines)
    return str(caught.value).replace(root, "URL"), len(engine.asked)


async def test_a_refusal_ends_it_with_where_what_and_what_to_do():
    message, tries = await refused(refusals=[(400, "token_ids[1] is 9999.")])
    assert message == (
        "env 'a': teacher 'big' at URL refused /inference/v1/generate: 400 token_ids[1] is 9999. "
        "Check that it is an engine that scores prompts (docs/engines.md)."
    )
    assert tries == 1


async def test_a_wrong_name_says_which_models_are_served():
    message, tries = await refused(names=["small", "base"])
    assert message == (
        "env 'a': teacher 'big' at URL serves 'small', 'base', expected 'big'. Fix the name or the "
        "base_url."
    )
    assert tries == 0


async def test_a_key_that_is_wanted_is_said():
    message, _ = await refused(refusals=[(401, "who are you?")])
    assert message.endswith("401 who are you?. Give its key by api_key_var.")


async def test_a_server_without_the_route_is_told_from_a_wrong_name():
    message, _ = await refused(refusals=[(404, "Not Found")])
    assert message == (
        "env 'a': teacher 'big' at URL refused /inference/v1/generate: 404 Not Found. It serves "
        "the model but not this route: a reference must give prompt_logprobs (prime-rl serve, "
        "vLLM with --enable-scale-out)."
    )


async def test_another_model_in_place_of_the_route_is_named_with_the_fix():
    async with scoring_one() as (engine, scoring):
        await scoring.logprobs([8, 4])
        engine.names, engine.refusals = ["small"], [(404, "no such model")]
        with pytest.raises(EngineError) as caught:
            await scoring.logprobs([8, 4])
    assert str(caught.value).endswith(
        "serves 'small', expected 'big'. Fix the name or the base_url."
    )


async def test_a_sequence_beyond_the_context_is_refused_before_it_is_sent():
    message, tries = await refused(ids=[1] * 9, max_model_len=8)
    assert message == (
        "env 'a': teacher 'big' at URL takes 8 tokens (its max_model_len), and this sequence has "
        "9. Serve it with more, or lower seq_len or max_completion_tokens."
    )
    assert tries == 0


async def test_a_sequence_that_fills_the_context_is_tried_and_the_way_out_is_named():
    async with scoring_one(max_model_len=2) as (_, scoring):
        assert (await scoring.logprobs([8, 4])).tolist() == [0.0, -0.5]
    message, _ = await refused(max_model_len=2, refusals=[(400, "too long")])
    assert message.endswith("Serve it with a max_model_len of 3: one token is sampled.")


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        (None, "no prompt_logprobs in the answer; a reference must give them"),
        ([None], "got 1 prompt_logprobs, expected 2"),
        ([None, None], "position 1 of 2: no logprob of token 4"),
        ([None, {"5": {"logprob": -1.0}}], "position 1 of 2: no logprob of token 4"),
        (
            [None, {"4": {"logprob": -9999.0}}],
            "position 1 of 2: token 4 is impossible to this model (logprob -9999): no finite "
            "signal leads towards it. Use a reference whose vocabulary is the policy's",
        ),
    ],
)
async def test_nothing_is_guessed_where_a_logprob_is_missing(entries, fault):
    message, tries = await refused(entries=lambda ids: entries)
    assert message == f"env 'a': teacher 'big' at URL: /inference/v1/generate: {fault}"
    assert tries == 1


# -- readiness ---------------------------------------------------------------------------------


async def test_ready_waits_until_the_server_is_up_and_healthy():
    port, said, engine = free_port(), [], Engine(healthy=False)
    async with pool(f"http://127.0.0.1:{port}", on_waiting=said.append) as scoring:
        ready = asyncio.create_task(scoring.pool.wait_ready(LIMIT))
        await until(lambda: said)
        async with serving(engine, port):
            await until(lambda: said[-1].endswith("refused /health: 503 loading"))
            assert not ready.done()
            engine.healthy = True
            await asyncio.wait_for(ready, LIMIT)
    assert "Connection refused" in said[1]
    assert said[-1] is None


async def test_ready_gives_up_in_time_and_says_why():
    url = f"http://127.0.0.1:{free_port()}"
    async with pool(url) as scoring:
        with pytest.raises(EngineError) as caught:
            await scoring.pool.wait_ready(0.1)
    assert str(caught.value) == (
        f"not ready after 0.1 s: env 'a': teacher 'big' at {url} did not answer /health: "
        "Connection refused. Start it, or fix the base_url."
    )


async def test_ready_refuses_a_server_of_other_models_at_once():
    async with scoring_one(names=["small"]) as (_, scoring):
        with pytest.raises(ConfigError, match=r"serves 'small', expected 'big'\. Fix the name"):
            await scoring.pool.wait_ready(LIMIT)


async def test_ready_needs_every_replica():
    async with serving(Engine()) as url, pool(url, f"http://127.0.0.1:{free_port()}") as scoring:
        with pytest.raises(EngineError, match="not ready after"):
            await scoring.pool.wait_ready(0.1)


async def test_a_server_that_comes_back_as_another_model_is_noticed():
    port, said, impostor = free_port(), [], Engine(names=["small"])
    async with pool(f"http://127.0.0.1:{port}", on_waiting=said.append) as scoring:
        async with serving(Engine(), port):
            await scoring.logprobs([8, 4])
        score = asyncio.create_task(scoring.logprobs([8, 4]))
        await until(lambda: "Connection refused" in str(said))
        async with serving(impostor, port):
            with pytest.raises(EngineError, match="serves 'small'"):
                await asyncio.wait_for(score, LIMIT)
    assert impostor.asked == []


async def test_a_request_that_fails_again_and_again_while_others_are_answered_ends_the_wait():
    class Poisoned(Engine):
        async def generate(self, request):
            if (await request.json())["token_ids"][0] == 13:
                return web.Response(status=500, text="out of luck")
            return await super().generate(request)

    engine = Poisoned()
    async with serving(engine) as url, pool(url, poll=0.0001) as scoring:
        bad = asyncio.create_task(scoring.logprobs([13, 1]))
        while not bad.done():
            await scoring.logprobs([1, 2])
        with pytest.raises(EngineError, match=r"a request failed 11 times: .* 500 out of luck"):
            bad.result()


# -- completions -------------------------------------------------------------------------------


def lent(scoring, salt="0 a", stops=(9,)):
    asked = Counter()
    return scoring.lend(salt, lambda: stops, asked), asked


async def test_a_completion_is_sampled_from_the_whole_distribution():
    async with scoring_one({"cache_salt": lambda: "4"}) as (engine, scoring):
        model, asked = lent(scoring)
        first, _ = await model.generate([5, 6], max_tokens=7, n=2, temperature=0.5, seed=1)
    (body,) = engine.asked
    assert body["cache_salt"] == "4" and body["token_ids"] == [5, 6]
    assert body["sampling_params"].pop("seed") % 128 == 0
    assert body["sampling_params"] == {
        "max_tokens": 7, "temperature": 0.5, "n": 2, "stop_token_ids": [9], "logprobs": 1,
        "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    }  # fmt: skip
    assert first.token_ids.tolist() == [8, 2] and first.logprobs.tolist() == [-0.5, -0.25]
    assert (first.finish_reason, first.policy_versions.tolist()) == ("stop", [3, 4])
    assert asked == {"requests": 1, "prompt_tokens": 2, "sampled_tokens": 4}


async def test_a_frozen_model_has_no_policy_version_and_no_stop_token_is_added():
    async with scoring_one() as (engine, scoring):
        (found,) = await lent(scoring)[0].generate([5], max_tokens=1, stop_token_ids=[])
    assert found.policy_versions is None
    assert engine.asked[0]["sampling_params"]["stop_token_ids"] == []


async def ask(model, *requests, **shared):
    for group, ids in requests:
        await model.generate(ids, max_tokens=1, group_id=group, **shared)


async def test_no_two_requests_share_a_seed_unless_they_give_the_same_one():
    """Equal prompts, other groups, other envs, other runs; the last four repeat the first four."""
    async with scoring_one() as (engine, scoring):
        for salt in ("0 a", "0 b", "1 a"):
            model, _ = lent(scoring, salt)
            await ask(model, (1, [5]), (1, [5]), (2, [5]), (1, [6]))
            await ask(model, (1, [5]), (1, [5]), (2, [5]), (1, [6]), seed=0)
        await ask(lent(scoring)[0], (1, [5]), (1, [5]), (2, [5]), (1, [6]))
    found = [body["sampling_params"]["seed"] for body in engine.asked]
    assert len(found) == 28 and found[24:] == found[:4]
    for start in (0, 8, 16):
        assert found[start + 4] == found[start + 5]  # one prompt, group and seed
    assert len(set(found[:24])) == 21
    assert all(seed % 128 == 0 and 0 <= seed < 2**55 for seed in found)  # n = 128 choices fit


async def test_completions_wait_for_a_slot_and_are_tried_again():
    refusals = [(500, "oops"), (429, "slow down")]
    async with scoring_one({"max_concurrency": 2}, refusals=refusals) as (engine, scoring):
        model, asked = lent(scoring)
        engine.hold.clear()
        both = [model.generate([i], max_tokens=1) for i in range(4)]
        everything = asyncio.gather(*both, *(model.logprobs([1, 2]) for _ in range(4)))
        await until(lambda: engine.inflight == 2)
        engine.hold.set()
        await everything
    assert engine.most_inflight == 2
    assert asked == {"requests": 8, "prompt_tokens": 12, "sampled_tokens": 8}


async def test_a_prompt_without_room_for_a_token_is_refused_before_it_is_sent():
    async with scoring_one(max_model_len=4) as (engine, scoring):
        await scoring.logprobs([1, 2, 3, 4])
        with pytest.raises(OverlongError, match=r"takes 4 tokens .* has 4, before any is sampled"):
            await scoring.generate([1, 2, 3, 4], max_tokens=1)
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "got 0 choices, expected 1"),
        ([{"token_ids": [8], "finish_reason": "stop"}], "got 0 finite logprobs of 1 sampled"),
        (
            [
                {
                    "token_ids": [8, 2],
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": None}]},
                }
            ],
            "got 1 finite logprobs of 2 sampled tokens",
        ),
    ],
)
async def test_a_completion_without_its_logprobs_is_refused(choices, message):
    async with scoring_one(choices=lambda n: choices) as (_, scoring):
        with pytest.raises(EngineError, match=message):
            await scoring.generate([1], max_tokens=2)


def completion(**fields):
    known = {
        "prompt_ids": np.array([5, 6]), "token_ids": np.array([8, 2]), "finish_reason": "stop",
        "logprobs": np.array([-0.5, -0.25]), "policy_versions": np.array([3, 4]),
    }  # fmt: skip
    return Completion(**known | fields)


def test_a_completion_trains_as_a_sample_of_a_rollout():
    sample = completion(temperature=0.5).sample()
    assert sample.token_ids.tolist() == [5, 6, 8, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.inference_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert sample.policy_versions.tolist() == [-1, -1, 3, 4]
    assert sample.temperature == 0.5
    assert completion(policy_versions=None).sample().policy_versions is None


def test_a_greedy_completion_does_not_train():
    with pytest.raises(StreamError, match="a completion at temperature 0 is not sampled"):
        completion(temperature=0.0).sample()


# -- alternatives ------------------------------------------------------------------------------


async def test_the_likeliest_tokens_are_asked_for_and_the_prompts_own_is_left_out():
    def entries(ids):
        ranked = {"3": {"logprob": -0.5}, "4": {"logprob": -1.5}}
        return [None, {"7": {"logprob": -9.0}} | ranked, {"4": {"logprob": -1.5}} | ranked]

    async with scoring_one(entries=entries) as (engine, scoring):
        ids, logprobs = await scoring.top_logprobs([6, 7, 4], 2)
    assert engine.asked[0]["sampling_params"]["prompt_logprobs"] == 2
    assert ids.tolist() == [[0, 0], [3, 4], [3, 4]]
    assert logprobs.tolist() == [[0.0, 0.0], [-0.5, -1.5], [-0.5, -1.5]]


async def test_an_engine_that_gives_fewer_alternatives_is_refused():
    async with scoring_one() as (_, scoring):
        with pytest.raises(EngineError, match="position 1 of 2: got 1 alternatives, expected 3"):
            await scoring.top_logprobs([1, 2], 3)
