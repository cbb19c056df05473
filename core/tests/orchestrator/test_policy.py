"""New weights: only complete versions, the newest first, in the order of steps, over real HTTP."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from loopback import listening
from waiting import LIMIT, until

from prime_rl import EngineError, Observer, RunError
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.inference.timing import RetryPolicy
from prime_rl.orchestrator import policy
from prime_rl.orchestrator.policy import LivePolicy, WeightWatcher, newest_version
from prime_rl.weights.versions import Weights

ONCE = RetryPolicy(attempts=1)


def publish(run_dir, version, stable=True):
    folder = run_dir / "broadcasts" / f"step_{version}"
    folder.mkdir(parents=True)
    if stable:
        (folder / "STABLE").touch()
    return folder


class Engine:
    """A stand-in server on loopback that notes every request but for looks."""

    def __init__(self):
        self.calls, self.done, self.refuse, self.models = [], [], {}, [{"id": "m"}]
        self.slow, self.away, self.version = set(), False, 0
        self.on_update = lambda: None

    async def handle(self, request):
        if self.away:
            request.transport.abort()
        body = await request.json() if request.can_read_body else None
        if request.method == "POST":
            self.calls.append((request.path, dict(request.query), body))
        self.key = request.headers.get("Authorization")
        if request.path == "/update_weights":
            self.on_update()
        if request.path in self.slow:
            await asyncio.sleep(0.2)
        self.done.append(request.path)
        if request.path in self.refuse:
            return web.Response(status=self.refuse[request.path], text="the reason")
        if request.path == "/update_weights":
            self.version = body["version"]
        if request.path == "/health":
            return web.json_response({"version": self.version})
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
    async with listening(app) as url:
        yield url


@asynccontextmanager
async def connected(engine, key="k", version=0):
    async with serving(engine) as url:
        fleet = Fleet(
            [url], key, Weights(Path("first"), version), FleetOptions(retry=ONCE, poll=0.02)
        )
        try:
            await fleet.wait_ready(LIMIT)
            engine.calls.clear()
            yield fleet
        finally:
            await fleet.close()


# -- which version --------------------------------------------------------------------------


def test_only_a_complete_version_counts(tmp_path):
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


async def test_waiting_for_a_version_ends_with_it_or_a_later_one():
    policy = LivePolicy(0)
    waiting = asyncio.create_task(policy.wait_for(2))
    await policy.advance(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy.advance(3)
    await waiting
    await policy.wait_for(3)


# -- the watcher ----------------------------------------------------------------------------


class Watch(Observer):
    """A watcher over a real engine that notes in which order things happen."""

    def __init__(self, run_dir, fleet, engine, version=0):
        self.events = []
        engine.on_update = lambda: self.events.append("update")
        self.policy = LivePolicy(version)
        self.watcher = WeightWatcher(run_dir, self.policy, fleet, [self])

    async def version_pending(self, version):
        self.events.append(f"pending {version}")

    def version_served(self, version):
        self.events.append(f"version {version} ({self.policy.version})")

    def step_trained(self, step, metrics):
        self.events.append(f"step {step}")

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


async def test_the_order_of_an_update(tmp_path):
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        log_steps(tmp_path, 1)
        folder = publish(tmp_path, 1)
        await watch.until(1)
    # Metrics first, stale groups are dropped before the pause, and observers see the live version.
    assert watch.events == ["step 1", "pending 1", "update", "version 1 (1)"]
    assert engine.calls == [
        ("/pause", {"mode": "keep", "clear_cache": "false"}, None),
        ("/update_weights", {}, {"weight_dir": str(folder), "version": 1}),
        ("/resume", {}, None),
    ]
    assert engine.key == "Bearer k"
    metrics = watch.watcher.take_metrics()
    assert metrics["watcher/update_count"] == 1
    assert metrics["watcher/last_update_weights_time"] > metrics["time/engines_paused"] > 0
    assert watch.watcher.take_metrics()["time/engines_paused"] == 0.0


async def test_versions_are_skipped_and_steps_are_not(tmp_path):
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        log_steps(tmp_path, 1, 2, 3)
        for version in (1, 2, 3):
            publish(tmp_path, version)
        await watch.until(3)
    assert watch.events == ["step 1", "step 2", "step 3", "pending 3", "update", "version 3 (3)"]
    metrics = watch.watcher.take_metrics()
    assert metrics["watcher/update_count"] == 1 and metrics["watcher/policy_version"] == 3
    watch.watcher._num_updates = 5
    assert watch.watcher.take_metrics()["watcher/update_count"] == 5.0


async def test_an_old_or_incomplete_version_is_ignored(tmp_path):
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine, version=2)
        publish(tmp_path, 2)
        publish(tmp_path, 3, stable=False)
        task = asyncio.create_task(watch.watcher.run())
        await asyncio.sleep(0.1)
        assert not task.done() and watch.events == [] and engine.calls == []
        task.cancel()


async def test_an_update_that_is_refused_ends_the_watcher(tmp_path):
    engine = Engine()
    engine.refuse["/update_weights"] = 500
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        publish(tmp_path, 1)
        with pytest.raises(EngineError, match=r"refused /update_weights: 500 the reason"):
            await watch.until(1)
    assert watch.policy.version == 0 and "version 1 (1)" not in watch.events


async def test_without_an_engine_the_watcher_retries_until_one_is_back(tmp_path, monkeypatch):
    """The engine comes back with its first weights, and does not serve before it has version 1."""
    monkeypatch.setattr("prime_rl.orchestrator.policy.GONE_SECONDS", 0.02)
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        keeping = asyncio.create_task(fleet.run())
        engine.away = True
        await until(lambda: not fleet.serving)
        publish(tmp_path, 1)
        waiting = asyncio.create_task(watch.until(1))
        await asyncio.sleep(0.1)
        assert not waiting.done() and "/update_weights" not in engine.done
        engine.away = False
        await waiting
        keeping.cancel()
    assert watch.events.count("update") == 1 and watch.events[-1] == "version 1 (1)"


# -- a stop ---------------------------------------------------------------------------------


def drained(tmp_path, version, within=60.0):
    """A watcher that waits for the last version of a run, and the steps it has read of."""
    (tmp_path / "broadcasts").mkdir(exist_ok=True)
    steps = []
    observer = SimpleNamespace(step_trained=lambda step, metrics: steps.append(step))
    watcher = WeightWatcher(tmp_path, LivePolicy(0), None, [observer])
    return asyncio.create_task(watcher.drain(version, within)), steps


async def eventually(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_last_version_of_a_stopped_run_needs_no_engine(tmp_path):
    draining, steps = drained(tmp_path, 2)
    (publish(tmp_path, 1) / "model.safetensors").touch()
    line = json.dumps({"step": 2, "time": 0.0, "metrics": {}})
    (tmp_path / "trainer.jsonl").write_text(f"{line}\n")
    (publish(tmp_path, 2) / "model.safetensors").touch()
    await asyncio.wait_for(draining, 60)
    assert steps == [2]


async def test_a_steps_metrics_are_read_once_though_old_lines_become_shorter(tmp_path):
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        log_steps(tmp_path, 1, 2)
        publish(tmp_path, 2)
        await watch.until(2)
        shorter = tmp_path / "shorter"  # another file in the place of the first
        shorter.mkdir()
        log_steps(shorter, 1, 2, 3)
        (shorter / "trainer.jsonl").replace(tmp_path / "trainer.jsonl")
        publish(tmp_path, 3)
        await watch.until(3)
    assert [each for each in watch.events if each.startswith("step")] == [
        *("step 1", "step 2", "step 3")
    ]


async def test_a_resumed_run_reports_the_steps_that_the_attempt_before_trained_and_did_not_report(
    tmp_path,
):
    """It was killed while an evaluation held the weights of step 2, and step 4 was saved."""
    log_steps(tmp_path, 1, 2, 3, 4)
    rows = [{"step": step, "train/x": 0.5} for step in (1, 2, 3, 4)]
    rows.insert(2, {"step": 1, "loss/mean": 0.5})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 2, "loss/mean"\n{"step": 3, "lo')
    engine = Engine()
    async with connected(engine, version=4) as fleet:
        watch = Watch(tmp_path, fleet, engine, version=4)
        log_steps(tmp_path, 5)
        publish(tmp_path, 5)
        await watch.until(5)
    steps = [each for each in watch.events if each.startswith("step")]
    assert steps == ["step 2", "step 3", "step 4", "step 5"]


@pytest.mark.parametrize("steps", [(), (1, 2)])
async def test_steps_of_which_the_file_has_no_batch_were_reported_elsewhere(tmp_path, steps):
    """The monitor ``file`` was not in use then: other monitors have them."""
    log_steps(tmp_path, 1, 2, 3, 4)
    rows = [{"step": step, name: 0.5} for step in steps for name in ("train/x", "loss/mean")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = Engine()
    async with connected(engine, version=4) as fleet:
        watch = Watch(tmp_path, fleet, engine, version=4)
        log_steps(tmp_path, 5)
        publish(tmp_path, 5)
        await watch.until(5)
    assert [each for each in watch.events if each.startswith("step")] == ["step 5"]


async def test_a_damaged_line_of_the_trainer_hides_no_other_step(tmp_path, caplog):
    engine = Engine()
    async with connected(engine) as fleet:
        watch = Watch(tmp_path, fleet, engine)
        log_steps(tmp_path, 1)
        with (tmp_path / "trainer.jsonl").open("ab") as file:
            file.write(b'[]\n{"step": "2"}\nnull\n\xff\n{"step": 2, "metr\n' + b"[" * 9999 + b"\n")
        log_steps(tmp_path, 2)
        publish(tmp_path, 2)
        await watch.until(2)
    assert [each for each in watch.events if each.startswith("step")] == ["step 1", "step 2"]
    assert caplog.text.count("trainer.jsonl: a line is left out") == 6


async def test_last_weights_that_do_not_come_end_the_stop_with_an_error(tmp_path):
    (publish(tmp_path, 1) / "model.safetensors").touch()
    draining, _ = drained(tmp_path, 2, within=0.1)
    with pytest.raises(RunError, match=r"weights of step 2, .* after 0\.1 s in which the trainer"):
        await asyncio.wait_for(draining, 60)


async def test_each_version_that_comes_renews_the_time_for_the_last(tmp_path, monkeypatch):
    """At each look 4 seconds have passed, of 10; a version comes with every other one."""
    clock = SimpleNamespace(now=0.0, looks=0)

    def look(run_dir):
        clock.now += 4.0
        clock.looks += 1
        if clock.looks % 2 == 0:
            folder = publish(tmp_path, clock.looks // 2, stable=False)
            (folder / "model.safetensors").touch()
            (folder / "STABLE").touch()
        return False

    monkeypatch.setattr(policy, "trainer_works", look)
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: clock.now))
    draining, _ = drained(tmp_path, 3, within=10.0)
    await asyncio.wait_for(draining, LIMIT)
    assert clock.looks == 6


async def test_versions_in_the_trainers_memory_are_requested_as_files(tmp_path):
    draining, _ = drained(tmp_path, 2)
    wanted = tmp_path / "broadcasts" / "FILES_WANTED"
    for version in (1, 2):
        folder = publish(tmp_path, version, stable=False)
        (folder / "MEMORY").touch()
        (folder / "STABLE").touch()
        await eventually(wanted.exists)
        assert not draining.done()
        (folder / "model.safetensors").touch()
        wanted.unlink()
    await asyncio.wait_for(draining, 60)
