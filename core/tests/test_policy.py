"""New weights: only whole versions, the newest first, each step in its order, over real HTTP."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from prime_rl import EngineError
from prime_rl.inference.client import EngineAdmin, RetryPolicy
from prime_rl.orchestrator.policy import Policy, TrainerLog, WeightWatcher, newest_version

ONCE = RetryPolicy(attempts=1)


def publish(run_dir, version, stable=True):
    folder = run_dir / "broadcasts" / f"step_{version}"
    folder.mkdir(parents=True)
    if stable:
        (folder / "STABLE").touch()
    return folder


class Engine:
    """A stand-in server on loopback that notes every request."""

    def __init__(self):
        self.calls, self.done, self.refuse, self.models = [], [], {}, [{"id": "m"}]
        self.slow = set()
        self.on_update = lambda: None

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, dict(request.query), body))
        self.key = request.headers.get("Authorization")
        if request.path == "/update_weights":
            self.on_update()
        if request.path in self.slow:
            await asyncio.sleep(0.2)
        self.done.append(request.path)
        if request.path in self.refuse:
            return web.Response(status=self.refuse[request.path], text="the reason")
        if request.path == "/v1/models":
            return web.json_response({"data": self.models})
        return web.json_response({"status": "ok"})

    @property
    def paths(self):
        return [path for path, _, _ in self.calls]


@asynccontextmanager
async def serving(engine):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(*engines, key="k"):
    async with serving(engines[0]) as first:
        if len(engines) == 1:
            admin = EngineAdmin([first], key, retry=ONCE)
            yield admin
        else:
            async with serving(engines[1]) as second:
                admin = EngineAdmin([first, second], key, retry=ONCE)
                yield admin
        await admin.close()


# -- which version --------------------------------------------------------------------------


def test_only_a_whole_version_counts(tmp_path):
    broadcasts = tmp_path / "broadcasts"
    assert newest_version(broadcasts) is None
    publish(tmp_path, 1, stable=False)
    assert newest_version(broadcasts) is None
    publish(tmp_path, 2)
    publish(tmp_path, 10)
    publish(tmp_path, 11, stable=False)
    for stray in ("step_x", "tmp_12", "step_"):
        (broadcasts / stray).mkdir()
    assert newest_version(broadcasts) == 10  # by number: not "2" > "10"


async def test_waiting_for_a_version_ends_when_it_or_a_later_one_is_there():
    policy = Policy(0)
    waiting = asyncio.create_task(policy.wait_for(2))
    await policy.advance(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy.advance(3)
    await waiting
    await policy.wait_for(3)


# -- the watcher ----------------------------------------------------------------------------


class Watch:
    """A watcher over a real engine that notes in which order things happen."""

    def __init__(self, run_dir, admin, engine, version=0):
        self.events = []
        engine.on_update = lambda: self.events.append("update")
        self.policy = Policy(version)
        self.watcher = WeightWatcher(
            run_dir,
            self.policy,
            admin,
            on_pending=self.pending,
            on_version=lambda v: self.events.append(f"version {v} ({self.policy.version})"),
            on_step=lambda step: self.events.append(f"step {step.step}"),
        )

    async def pending(self, version):
        self.events.append(f"pending {version}")

    async def until(self, version):
        task = asyncio.create_task(self.watcher.run())
        try:
            waiting = asyncio.create_task(self.policy.wait_for(version))
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                waiting.cancel()
                task.result()
            await asyncio.sleep(0.05)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await task


def log_steps(run_dir, *steps, tail=""):
    with (run_dir / "trainer.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "time": 1.0, "metrics": {"loss": None}}
            file.write(json.dumps(row) + "\n")
        file.write(tail)


async def test_each_step_of_an_update_in_its_order(tmp_path):
    engine = Engine()
    async with connected(engine) as admin:
        watch = Watch(tmp_path, admin, engine)
        log_steps(tmp_path, 1)
        folder = publish(tmp_path, 1)
        await watch.until(1)
    # Metrics first, what is stale is dropped before the pause, the version is live when it is told.
    assert watch.events == ["step 1", "pending 1", "update", "version 1 (1)"]
    assert engine.calls == [
        ("/pause", {"mode": "keep", "clear_cache": "false"}, None),
        ("/update_weights", {}, {"weight_dir": str(folder), "version": 1}),
        ("/resume", {}, None),
    ]
    assert engine.key == "Bearer k"
    assert watch.watcher.update_count == 1 and watch.watcher.update_seconds > 0


async def test_versions_are_skipped_and_steps_are_not(tmp_path):
    engine = Engine()
    async with connected(engine) as admin:
        watch = Watch(tmp_path, admin, engine)
        log_steps(tmp_path, 1, 2, 3)
        for version in (1, 2, 3):
            publish(tmp_path, version)
        await watch.until(3)
    assert watch.events == ["step 1", "step 2", "step 3", "pending 3", "update", "version 3 (3)"]


async def test_an_old_or_half_written_version_is_left_alone(tmp_path):
    engine = Engine()
    async with connected(engine) as admin:
        watch = Watch(tmp_path, admin, engine, version=2)
        publish(tmp_path, 2)
        publish(tmp_path, 3, stable=False)
        task = asyncio.create_task(watch.watcher.run())
        await asyncio.sleep(0.1)
        assert not task.done() and watch.events == [] and engine.calls == []
        task.cancel()


async def test_an_update_that_is_refused_ends_the_watcher(tmp_path):
    engine = Engine()
    engine.refuse["/update_weights"] = 500
    async with connected(engine) as admin:
        watch = Watch(tmp_path, admin, engine)
        publish(tmp_path, 1)
        with pytest.raises(EngineError, match=r"refused /update_weights: 500 the reason"):
            await watch.until(1)
    assert watch.policy.version == 0 and "version 1 (1)" not in watch.events


def test_the_trainers_log_is_read_by_whole_lines(tmp_path):
    log = TrainerLog(tmp_path / "trainer.jsonl")
    assert log.read_new() == []
    log_steps(tmp_path, 1, tail='{"step": 2, "ti')
    assert [step.step for step in log.read_new()] == [1]
    assert log.read_new() == []
    log_steps(tmp_path, tail='me": 2.0, "metrics": {"a": 0.5}}\n')
    (second,) = log.read_new()
    assert (second.step, second.time, second.metrics) == (2, 2.0, {"a": 0.5})


# -- the engines' admin routes ----------------------------------------------------------------


async def test_engines_resume_even_when_the_update_fails(tmp_path):
    engine = Engine()
    engine.refuse["/update_weights"] = 422
    async with connected(engine) as admin:
        with pytest.raises(EngineError) as caught:
            await admin.update_weights(tmp_path, 1)
        assert (
            str(caught.value) == f"engine {admin.urls[0]} refused /update_weights: 422 the reason"
        )
    assert engine.paths == ["/pause", "/update_weights", "/resume"]


async def test_the_first_failure_is_the_one_reported(tmp_path):
    engine = Engine()
    engine.refuse = {"/update_weights": 500, "/resume": 503}
    async with connected(engine) as admin:
        with pytest.raises(EngineError, match="refused /update_weights: 500"):
            await admin.update_weights(tmp_path, 1)


async def test_a_resume_that_fails_is_an_error():
    engine = Engine()
    engine.refuse = {"/resume": 503}
    async with connected(engine) as admin:
        with pytest.raises(EngineError, match="refused /resume: 503 the reason"):
            await admin.update_weights("somewhere", 1)


async def test_one_engine_that_cannot_pause_leaves_no_other_one_paused(tmp_path):
    good, bad = Engine(), Engine()
    bad.refuse = {"/pause": 500}
    async with connected(good, bad) as admin:
        with pytest.raises(EngineError, match="refused /pause: 500"):
            await admin.update_weights(tmp_path, 1)
    assert good.paths == ["/pause", "/resume"]


async def test_no_resume_overtakes_a_slow_pause(tmp_path):
    slow, bad = Engine(), Engine()
    slow.slow, bad.refuse = {"/pause"}, {"/pause": 500}
    async with connected(slow, bad) as admin:
        with pytest.raises(EngineError, match="refused /pause: 500"):
            await admin.update_weights(tmp_path, 1)
    assert slow.done == ["/pause", "/resume"]


async def test_an_engine_that_is_gone_is_named():
    async with serving(Engine()) as url:
        pass
    admin = EngineAdmin([url], "k", retry=ONCE)
    with pytest.raises(EngineError, match=rf"engine {url} did not answer /pause: ConnectError"):
        await admin.update_weights("somewhere", 1)
    await admin.close()


async def test_ready_means_healthy_and_a_model_listed():
    engine = Engine()
    engine.models = []
    engine.refuse = {"/health": 503}
    async with connected(engine) as admin:
        waiting = asyncio.create_task(admin.wait_ready(30))
        await asyncio.sleep(0.15)
        engine.refuse = {}
        await asyncio.sleep(0.15)
        assert not waiting.done()
        engine.models = [{"id": "m"}]
        await waiting


async def test_an_engine_that_never_gets_ready_is_named_with_its_log():
    engine = Engine()
    engine.refuse = {"/health": 503}
    async with connected(engine) as admin:
        with pytest.raises(EngineError) as caught:
            await admin.wait_ready(0)
        assert str(caught.value) == (
            f"engine {admin.urls[0]} is not healthy after 0 s (inference.ready_timeout). Its log "
            "is logs/latest/inference.log of the run directory."
        )
