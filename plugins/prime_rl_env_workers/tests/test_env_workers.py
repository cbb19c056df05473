"""Whatever an environment does, its rollout fails as data and the others go on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("in_process", reason="needs the plugin prime-rl-environments")
from misbehaving import KINDS, ORPHAN
from renderers import Qwen3RendererConfig
from scripted_engine import scripted_engine
from typer.testing import CliRunner
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.types import HealthRequest
from waiting import LIMIT

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.loading import import_verifiers, load_environment
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.launch import ADMIN_KEY, ENV_SERVER_KEY
from prime_rl.rundir.machine import free_ports
from prime_rl_app.cli.app import app
from prime_rl_env_workers import pool as pools
from prime_rl_env_workers.client import Alive, WorkerClient
from prime_rl_env_workers.environment import (
    WorkerEnvironment,
    automatic_number,
    make_environment,
    named_keys,
    shared_by,
    to_wire,
)
from prime_rl_env_workers.forks import WorkerForks
from prime_rl_env_workers.placed import EnvServer, key_bytes, placed_key
from prime_rl_env_workers.server import WorkerServer, from_wire
from prime_rl_environments.tiny.tokenizer import build_tokenizer

KEY = "a key of serve-env, long enough"
HERE = str(Path(__file__).parent)
WORKERS = 3


def config_of(**orchestrator: Any) -> RunConfig:
    table = {"train": {"env": [{"id": "misbehaving"}]}, "env_workers": "auto"} | orchestrator
    return RunConfig.model_validate({"model": {"name": "m"}, "max_steps": 1, "orchestrator": table})


def made(config: RunConfig, folder: Path, **settings: Any) -> Any:
    (env,) = config.orchestrator.train.env
    return make_environment(EnvSettings.of(env, **settings), env, config, folder)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


# -- with processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_environment_takes_nothing_down_but_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LATE_SECONDS", 1.0)
    monkeypatch.setenv("PRIME_RL_ADMIN_KEY", "of the engines")
    monkeypatch.setenv(ENV_SERVER_KEY, KEY)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "status").mkdir()
    config = config_of(env_workers=WORKERS, workers={"hang_timeout": 10, "max_memory": 1.0})
    found = {"renderer": Qwen3RendererConfig(), "tokenizer_path": tmp_path / "model"}
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(WORKERS)]
    env = made(config, tmp_path, **found)
    env.add_workers(WORKERS, *config.orchestrator.train.env, config, shared_by(tmp_path), addresses)
    table = {"id": "misbehaving", "name": "remote", "address": addresses[:1]}
    remote = made(config_of(train={"env": [table]}), tmp_path, **found)
    with scripted_engine(tokenizer, "policy") as engine:
        asyncio.run(misbehave(env, remote, ModelEndpoint("policy", f"{engine.url}/v1")))


async def misbehave(
    env: WorkerEnvironment, remote: WorkerEnvironment, model: ModelEndpoint
) -> None:
    """``remote``: has the first worker of ``env`` as its server."""
    assert env.pool is not None
    pool, sampling = env.pool, SamplingSettings(temperature=1.0, max_completion_tokens=16)

    def begin(kind: str, at: WorkerEnvironment = env) -> asyncio.Task[list[RolloutResult]]:
        example = at.examples[KINDS.index(kind)]
        return asyncio.create_task(at.run(example, model=model, sampling=sampling, seed=1))

    async def fine(number: int) -> None:
        for (result,) in await asyncio.gather(*(begin("fine") for _ in range(number))):
            assert result.ok, result.error
            assert result.branches

    async def all_work() -> None:
        """Every worker, after those that have gone are replaced; each finishes a rollout."""
        await eventually(lambda: all(worker and worker.ready for worker in pool.workers))
        await fine(WORKERS)

    async def reasons(*kinds: str) -> list[str]:
        """Of the failures of rollouts that begin on workers of their own, while others go on."""
        await all_work()
        tasks = [begin(kind) for kind in kinds]
        await asyncio.sleep(0)
        await fine(1)
        results = [result for (result,) in await asyncio.gather(*tasks)]
        assert not any(result.ok for result in results)
        return [f"{result.error_type}: {result.error}" for result in results]

    def named(text: str, how: str) -> bool:
        return "WorkerLost: env 'misbehaving': worker " in text and how in text

    async with env:
        for (first, one), (second, other) in (
            (("os_exit", "exited with code 4"), ("segfault", "ended by SIGSEGV")),
            (("abort", "ended by SIGABRT"), ("stop_loop", "Event loop stopped")),
            (("cancel_all", "exited with code"), ("close_files", "")),
            (("leak", "it grew to "), ("orphan", "exited with code 5")),
            (("cpu_loop", "was blocked for 10 s"), ("blocking", "was blocked for 10 s")),
        ):
            texts = await reasons(first, second)
            assert named(texts[0], one), texts
            assert named(texts[1], other), texts
        assert pool.metrics()["replaced"] == pool.metrics()["lost_rollouts"] == 10.0
        lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
        assert not any(ORPHAN in line for line in lines)

        await all_work()
        processes = [worker and worker.fork and worker.fork.pid for worker in pool.workers]
        expected = {
            "raise_cancelled": "Cancelled: rollout aborted",
            "base_exception": "it raised Odd: not an Exception",
            "sys_exit": "SystemExit: 3",
            "keyboard_interrupt": "KeyboardInterrupt",
            "recursion": "RecursionError: maximum recursion depth",
            "nan": "BadResult: the reward 'behaves' is nan; expected a finite number",
            "infinite_metric": "BadResult: the metric 'size' is inf; expected",
            "surrogate": "surrogates not allowed",
            "cycle": "recursion limit exceeded",
            "nesting": "recursion limit exceeded",
            "huge_int": "Integer value out of range",
            "no_number": "traces.0.metrics.size: Input should be a valid number",
        }
        tasks = {kind: begin(kind) for kind in expected}
        await fine(4)
        for kind, task in tasks.items():
            (result,) = await task
            text = f"{result.error_type}: {result.error}"
            assert not result.ok, kind
            assert expected[kind] in text, (kind, text)
        pool.limits = pools.WorkerLimits(
            pool.limits.hang_timeout, pool.limits.max_memory, timeout=1.0
        )
        tasks = {kind: begin(kind) for kind in ("endless_await", "immortal")}
        for task in tasks.values():
            (result,) = await task
            assert "gave no result" in str(result.error)
        pool.limits = pools.WorkerLimits(
            pool.limits.hang_timeout, pool.limits.max_memory, timeout=None
        )
        await all_work()
        here = [worker.fork for worker in pool.workers if worker and worker.fork]
        assert [fork.pid for fork in here] == processes
        assert pool.metrics()["replaced"] == 10.0

        keys = [psutil.Process(fork.pid).environ() for fork in here]
        assert not any("PRIME_RL_ADMIN_KEY" in each for each in keys)
        assert not any(KEY in each.values() for each in keys)
        server = psutil.Process(here[0].pid).parent()
        assert server is not None
        async with remote:
            (first,), (lost,) = await begin("fine", remote), await begin("os_exit", remote)
            assert first.ok
            assert "env 'remote': server tcp://127.0.0.1:" in str(lost.error)
            assert "another process has taken its place" in str(lost.error)
            (again,) = await begin("fine", remote)
            assert again.ok

        await all_work()
        server.kill()
        await eventually(lambda: pool.metrics()["replaced"] == 14.0)
        await all_work()
        children = [worker.fork.pid for worker in pool.workers if worker and worker.fork]
    await eventually(lambda: not any(map(psutil.pid_exists, children)))


# -- the key of serve-env ------------------------------------------------------------------------


def served(address: str, key: bytes | None) -> WorkerServer:
    settings = EnvSettings(id="misbehaving")
    config = load_environment(import_verifiers(settings), settings).config
    return WorkerServer(config, address, key)


async def answers(client: EnvClient, seconds: float) -> bool:
    """Whether a server answers within the time, which is long if it is to, and short if not."""
    try:
        async with asyncio.timeout(seconds):
            await client._request(HealthRequest(), Alive)
    except TimeoutError:
        return False
    finally:
        await client.close()
    return True


def test_a_server_with_a_key_answers_those_who_have_it() -> None:
    async def check() -> None:
        (port,) = free_ports(1)
        address = f"tcp://127.0.0.1:{port}"
        server = served(address, key_bytes(KEY))
        serving = asyncio.create_task(server.run())
        try:
            # One after the other: each of the strangers has had the time of an answer.
            assert await answers(WorkerClient(address, key_bytes(KEY)), LIMIT)
            for stranger in (
                EnvClient(address),
                WorkerClient(address),
                WorkerClient(address, key_bytes(KEY[::-1])),
            ):
                assert not await answers(stranger, 0.3)
            assert await answers(WorkerClient(address, key_bytes(KEY)), LIMIT)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(check())


def test_a_peer_without_the_key_makes_a_server_hold_nothing() -> None:
    """A message of endless parts, which a socket keeps until the last one is there."""

    async def check() -> None:
        (port,) = free_ports(1)
        server = served(f"tcp://127.0.0.1:{port}", key_bytes(KEY))
        serving = asyncio.create_task(server.run())
        try:
            greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(greeting)
            part = b"\x03" + (1 << 20).to_bytes(8, "big") + b"x" * (1 << 20)
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(part)
                    async with asyncio.timeout(LIMIT):
                        await writer.drain()
                async with asyncio.timeout(LIMIT):
                    while await reader.read(1 << 16):  # the server ends the connection
                        pass
            writer.close()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    before = psutil.Process().memory_info().rss
    asyncio.run(check())
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_server_for_other_machines_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SERVER_KEY, raising=False)
    result = CliRunner().invoke(app, ["serve-env", "none.toml", "--host", "10.0.0.5"])
    assert result.exit_code == 2
    assert ENV_SERVER_KEY in result.output
    assert "token_hex" in result.output
    with pytest.raises(ConfigError, match="at least 16 characters, found 5"):
        key_bytes("short")


def test_servers_that_a_launcher_places_have_a_key_of_the_run(tmp_path: Path) -> None:
    orchestrator = {ADMIN_KEY: "a", ENV_SERVER_KEY: "of the user", PROCESS: "1:orchestrator:x"}
    server = EnvServer("env_train_0_0", "train/a", 1, [], tmp_path / "file")
    own = server.environment(orchestrator)
    assert ADMIN_KEY not in own
    assert own[ENV_SERVER_KEY] == placed_key(orchestrator)
    assert own[ENV_SERVER_KEY] != placed_key({**orchestrator, ADMIN_KEY: "b"})


# -- without -------------------------------------------------------------------------------------


async def test_an_episode_is_sent_to_a_worker_that_has_room_for_it() -> None:
    """Its time begins when it is sent. Two workers take two episodes each."""
    limits = pools.WorkerLimits(60.0, 1.0, None, max_episodes=2)
    pool = pools.Pool("a", 2, limits, {}, WorkerForks())
    ends: list[asyncio.Future[str]] = []

    class Client:
        async def run(self, *asked: Any) -> str:
            end: asyncio.Future[str] = asyncio.Future()
            ends.append(end)
            return await end

    for number in range(2):
        worker = pools.Worker(number, f"w{number}", Client(), asyncio.Future(), "", instance="i")  # type: ignore[arg-type]
        pool.workers[number] = worker

    context: Any = SimpleNamespace(client=None, model="m", sampling=None)
    episodes = [asyncio.create_task(pool.run(context, {})) for _ in range(7)]
    for sent in (4, 5, 6, 7):
        await eventually(lambda sent=sent: len(ends) >= sent)  # type: ignore[misc]
        assert len(ends) == sent
        assert max(each.inflight for each in pool.workers if each is not None) == 2
        await pool.ready()  # a worker without room is ready
        ends[sent - 4].set_result("done")
    for end in ends[4:]:
        end.set_result("done")
    assert await asyncio.gather(*episodes) == ["done"] * 7


async def test_the_limit_that_the_environment_holds_begins_when_an_episode_is_sent() -> None:
    """While engines sleep it stands still, so neither pool nor worker has one."""
    pool = pools.Pool("a", 1, pools.WorkerLimits(60.0, 1.0, None), {}, WorkerForks())
    calls: list[str] = []

    class Client:
        async def run(self, *asked: Any) -> None:
            calls.append("sent")
            try:
                await asyncio.Event().wait()
            finally:
                calls.append("ended")

    class Held(AbstractAsyncContextManager[None]):
        async def __aenter__(self) -> None:
            calls.append("limit")

        async def __aexit__(self, *error: object) -> None:
            calls.append("over")
            raise TimeoutError("as it says")

    context: Any = SimpleNamespace(client=None, model="m", sampling=None)
    playing = asyncio.create_task(pool.run(context, {}, Held()))
    await asyncio.sleep(0)
    assert calls == []
    pool.workers[0] = pools.Worker(0, "w", Client(), asyncio.Future(), "", instance="i")  # type: ignore[arg-type]
    pool._came.set()
    await eventually(lambda: calls == ["limit", "sent"])
    playing.cancel()
    with pytest.raises(TimeoutError, match=r"^as it says$"):
        await playing
    assert calls == ["limit", "sent", "ended", "over"]


def test_trusted_tasksets_run_in_process_and_others_have_half_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    harness = {"default_harness": {"id": "in-process"}}
    env = made(config_of(), tmp_path, **harness)
    assert env.pool is not None
    assert len(env.pool.workers) == 6
    monkeypatch.setattr(type(env._env.taskset), "RUNS_IN_PROCESS", True, raising=False)
    assert automatic_number(env, config_of()) == 0
    assert made(config_of(), tmp_path, **harness).pool is None
    assert made(config_of(env_workers=0), tmp_path, **harness).pool is None
    given = {"train": {"env": [{"id": "misbehaving", "address": ["tcp://10.0.0.5:5000"]}]}}
    assert made(config_of(**given), tmp_path, **harness).pool.workers == [None]


def test_workers_get_the_keys_that_the_config_names_and_no_other() -> None:
    config = {
        "judge": {"client": {"api_key_var": "JUDGE_KEY", "headers_from_env": {"X-Team": "TEAM"}}},
        "agents": [{"harness": {"forward_env": ["SEARCH_KEY"]}}, {"api_key_var": None}],
        "models": {"big": {"api_key_var": ["BIG_KEY", "BIG_KEY_2"]}},
    }
    keys = ["BIG_KEY", "BIG_KEY_2", "JUDGE_KEY"]
    assert sorted(named_keys(config)) == [*keys, "SEARCH_KEY", "TEAM"]


async def test_closing_does_not_wait_for_a_fork_server_that_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    blocks = f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep({10 * LIMIT})"
    (tmp_path / "renderers.py").write_text(blocks)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forks = WorkerForks()
    fork = await forks.start("misbehaving 0", "ipc:///nowhere", {})
    await eventually(began.exists)
    await asyncio.wait_for(forks.close(), LIMIT)
    assert "was ended by SIGTERM" in fork.ended.result()


def test_the_settings_of_an_env_arrive_in_its_workers_as_they_were() -> None:
    engine = ModelEndpoint(
        name="m",
        base_url="http://127.0.0.1:8001/v1",
        api_key_var="KEY",
        timeout=3.0,
        headers=(("a", "b"),),
        headers_from_env=(("c", "D"),),
    )
    settings = EnvSettings(
        id="reversal-duel",
        name="duel",
        args={"size": 3},
        harness={"id": "in-process"},
        timeout=2.0,
        max_turns=4,
        renderer=Qwen3RendererConfig(enable_thinking=False),
        tokenizer_path=Path("models") / "m",
        untrained=frozenset({"black"}),
        past_agents=frozenset({"black"}),
        past=engine,
    )
    assert from_wire(json.loads(json.dumps(to_wire(settings)))) == settings
    plain = EnvSettings(id="reversal-duel")
    assert from_wire(json.loads(json.dumps(to_wire(plain)))) == plain


def test_an_env_that_an_earlier_version_plays_is_not_served(tmp_path: Path) -> None:
    config = tmp_path / "duel.toml"
    config.write_text(
        'max_steps = 1\nmodel.name = "m"\n[[orchestrator.train.env]]\nid = "reversal-duel"\n'
        '[orchestrator.train.env.agents.black]\nmodel = "past"\n'
    )
    result = CliRunner().invoke(app, ["serve-env", str(config)])
    assert result.exit_code == 2
    assert "an earlier version plays agent 'black', and only the run knows" in result.output
