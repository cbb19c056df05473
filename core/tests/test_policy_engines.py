"""Episodes and scores of the live policy: at the engine that has the group, else at another."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from aiohttp import web
from fleets import Engine, fleet_of
from waiting import LIMIT, until

from prime_rl import EngineError
from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.inference.pool import GivenUp
from prime_rl.inference.scorer import PromptScorer
from prime_rl.inference.timing import EPISODE_TRIES
from prime_rl.orchestrator.engines import report_engines
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.plugins.status import read_status
from prime_rl.rundir.status import Status

GOOD = RolloutResult(ok=True, reward=1.0)
AWAY = RolloutResult(ok=False, error_type="ProviderError", error="away", status_code=503)
WRONG = RolloutResult(ok=False, error_type="TaskError", error="a bug")


class Scoring(Engine):
    """Gives token t the logprob -t / 8, by default."""

    def __init__(self, status=200):
        super().__init__()
        self.asked, self.status = [], status

    async def handle(self, request):
        if request.path != "/inference/v1/generate":
            return await super().handle(request)
        body = await request.json()
        self.asked.append(body)
        if self.away or self.status != 200:
            return web.Response(status=self.status if self.status != 200 else 503, text="why")
        entries = [{str(token): {"logprob": -token / 8}} for token in body["token_ids"][1:]]
        return web.json_response({"prompt_logprobs": [None, *entries]})


async def test_an_episode_is_played_at_its_groups_replica_under_its_address():
    seen = []

    async def episode(endpoint):
        seen.append(endpoint)
        return [GOOD]

    async with fleet_of(Engine(), Engine()) as fleet:
        router = EngineRouter(fleet, "m", "KEY")
        for group in (0, 0, 1):
            assert await router.run(group, episode) == [GOOD]
        urls = [f"{url}/v1" for url in fleet.urls]
    assert seen == [ModelEndpoint("m", urls[number], "KEY") for number in (0, 0, 1)]


async def test_an_outage_repeats_the_episode_and_any_other_failure_is_a_result():
    answers = [[GOOD, AWAY], [WRONG]]

    async def episode(endpoint):
        return answers.pop(0)

    async with fleet_of(Engine(), poll=0.001) as fleet:
        assert await EngineRouter(fleet, "m", "KEY").run(0, episode) == [WRONG]


async def test_an_episode_that_keeps_failing_at_a_live_engine_has_failed():
    broken = replace(AWAY, status_code=500)

    async def episode(endpoint):
        return [broken]

    async with fleet_of(Engine(), poll=0.001) as fleet:
        assert await EngineRouter(fleet, "m", "KEY").run(0, episode) == [broken]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_overloaded_has_more_tries_than_one_that_fails(status):
    answers = [[replace(AWAY, status_code=status)]] * (3 * EPISODE_TRIES) + [[GOOD]]

    async def episode(endpoint):
        return answers.pop(0)

    async with fleet_of(Engine(), poll=0.00001) as fleet:
        assert await EngineRouter(fleet, "m", "KEY").run(0, episode) == [GOOD]


async def test_an_episode_whose_engines_went_away_has_failed_and_says_so(monkeypatch):
    async with fleet_of(Engine()) as fleet:

        async def ask(key, work):
            raise GivenUp("4 engines have gone away under it")

        monkeypatch.setattr(fleet, "ask", ask)
        (result,) = await EngineRouter(fleet, "m", "KEY").run(0, None)
    assert (result.ok, result.error_type) == (False, "ProviderError")
    assert result.error == "4 engines have gone away under it"


async def test_scores_come_from_where_the_group_was_sampled_salted_by_the_present_version():
    engines, version = (Scoring(), Scoring()), iter("34")
    async with fleet_of(*engines) as fleet:
        scores = PromptScorer(fleet, "m", api_key="k", cache_salt=lambda: next(version))
        assert await fleet.ask(6, lambda e: asyncio.sleep(0, e.number)) == 0
        assert await fleet.ask(7, lambda e: asyncio.sleep(0, e.number)) == 1
        for _ in range(2):
            assert (await scores.logprobs([8, 4, 2], group_id=7)).tolist() == [0.0, -0.5, -0.25]
    assert engines[0].asked == []
    assert [body["cache_salt"] for body in engines[1].asked] == ["3", "4"]


async def test_a_request_to_the_live_policy_may_take_any_time_and_ends_when_its_engine_is_lost():
    async with fleet_of(Scoring()) as fleet:
        limits = []

        async def note(request):
            if request.url.path == "/inference/v1/generate":
                limits.append(request.extensions["timeout"])

        fleet.engines[0].client._http.event_hooks["request"].append(note)
        assert (await PromptScorer(fleet, "m").logprobs([1, 2])).tolist() == [0.0, -0.25]
    assert [(each["connect"], each["read"]) for each in limits] == [(10.0, None)]

    class Endless(Scoring):
        async def handle(self, request):
            if request.path == "/inference/v1/generate":
                self.asked.append(None)
                await asyncio.Event().wait()
            return await super().handle(request)

    endless = Endless()
    async with fleet_of(endless, Scoring()) as fleet:
        scores = PromptScorer(fleet, "m")
        asking = asyncio.create_task(scores.logprobs([1, 2]))
        await until(lambda: endless.asked)
        fleet.follow([fleet.engines[1].url])
        assert (await asking).tolist() == [0.0, -0.25]


async def test_scores_wait_while_the_engines_sleep():
    engine = Scoring()
    async with fleet_of(engine) as fleet:
        scores = PromptScorer(fleet, "m")
        await fleet.sleep()
        asking = asyncio.create_task(scores.logprobs([1, 2]))
        await asyncio.sleep(0.05)
        assert engine.asked == []
        await fleet.update_weights("v1", 1)
        assert (await asking).tolist() == [0.0, -0.25]


async def test_a_replica_that_goes_away_is_replaced_and_one_that_keeps_failing_ends_the_run():
    dying = Scoring()
    async with fleet_of(dying, Scoring(), poll=0.02) as fleet:
        scores = PromptScorer(fleet, "m")
        assert await fleet.ask(0, lambda e: asyncio.sleep(0, e.number)) == 0
        dying.away = True
        assert (await scores.logprobs([1, 2], group_id=0)).tolist() == [0.0, -0.25]
    async with fleet_of(Scoring(status=500), poll=0.001) as fleet:
        scores = PromptScorer(fleet, "m")
        with pytest.raises(EngineError, match=r"a request failed 11 times: engine .* 500 why"):
            await scores.logprobs([1, 2])


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_status_file_says_of_each_engine_how_it_is(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr("prime_rl.inference.timing.START_GRACE", 0.0)
    (tmp_path / "status").mkdir()
    engines = Engine(), Engine()

    def reported():
        report = read_status(tmp_path / "status" / "engines.json")
        return report.state, report.waiting_for, report.detail

    async with fleet_of(*engines, ready=False) as fleet:
        one, two = fleet.urls if elsewhere else ("inference", "inference_1")
        engines[1].away = True
        if not elsewhere:
            fleet.names = dict(zip(fleet.urls, (one, two), strict=True))
        fleet.on_change = partial(report_engines, fleet, Status(tmp_path / "status/engines.json"))
        fleet.on_change()
        assert reported() == ("0 of 2 serve", f"{one}, {two}", {one: "starting", two: "starting"})
        await fleet.wait_ready(LIMIT)
        await fleet.update_weights("v1", 1)
        assert reported() == ("1 of 2 serve", two, {one: "version 1", two: "starting"})
        engines[1].away = False
        await until(lambda: len(fleet.serving) == 2)
        assert reported()[2] == {one: "version 1", two: "version 1"}
        engines[1].refuse["/update_weights"] = 400
        await fleet.update_weights("v2", 2)
        await until(lambda: fleet.engines[1].reason != "")
        waits_for = reported()[1]
        assert waits_for.startswith(f"{two}: engine {fleet.urls[1]} refused /update_weights: 400")
        del engines[1].refuse["/update_weights"]
        await until(lambda: len(fleet.serving) == 2)
        await fleet.sleep()
        assert reported()[:2] == ("asleep", "trainer")
