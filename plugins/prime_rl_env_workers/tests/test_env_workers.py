"""Whatever an environment does, its rollout fails as data and the others go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("in_process", reason="needs the plugin prime-rl-environments")
from misbehaving import KINDS, ORPHAN
from renderers import Qwen3RendererConfig
from scripted_engine import scripted_engine
from waiting import LIMIT

from prime_rl.config.run import RunConfig
from prime_rl.env.environment import SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.rundir.machine import free_ports
from prime_rl_env_workers import pool as pools
from prime_rl_env_workers.environment import (
    WorkerEnvironment,
    automatic_number,
    make_environment,
    named_keys,
    shared_by,
)
from prime_rl_env_workers.forks import Forks
from prime_rl_environments.tiny.tokenizer import build_tokenizer

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
            (("sys_exit", "exited with code 3"), ("os_exit", "exited with code 4")),
            (("segfault", "ended by SIGSEGV"), ("abort", "ended by SIGABRT")),
            (("stop_loop", "Event loop stopped"), ("cancel_all", "exited with code")),
            (("close_files", ""), ("keyboard_interrupt", "exited with code")),
            (("leak", "it grew to "), ("orphan", "exited with code 5")),
            (("cpu_loop", "was blocked for 10 s"), ("blocking", "was blocked for 10 s")),
        ):
            texts = await reasons(first, second)
            assert named(texts[0], one), texts
            assert named(texts[1], other), texts
        assert pool.metrics()["replaced"] == pool.metrics()["lost_rollouts"] == 12.0
        lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
        assert not any(ORPHAN in line for line in lines)

        await all_work()
        processes = [worker and worker.fork and worker.fork.pid for worker in pool.workers]
        expected = {
            "raise_cancelled": "Cancelled: rollout aborted",
            "base_exception": "it raised Odd: not an Exception",
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
        pool.limits = pools.Limits(pool.limits.hang_timeout, pool.limits.max_memory, timeout=1.0)
        tasks = {kind: begin(kind) for kind in ("endless_await", "immortal")}
        for task in tasks.values():
            (result,) = await task
            assert "gave no result" in str(result.error)
        pool.limits = pools.Limits(pool.limits.hang_timeout, pool.limits.max_memory, timeout=None)
        await all_work()
        here = [worker.fork for worker in pool.workers if worker and worker.fork]
        assert [fork.pid for fork in here] == processes
        assert pool.metrics()["replaced"] == 12.0

        keys = [psutil.Process(fork.pid).environ() for fork in here]
        assert not any("PRIME_RL_ADMIN_KEY" in each for each in keys)
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
        await eventually(lambda: pool.metrics()["replaced"] == 16.0)
        await all_work()
        children = [worker.fork.pid for worker in pool.workers if worker and worker.fork]
    await eventually(lambda: not any(map(psutil.pid_exists, children)))


# -- without -------------------------------------------------------------------------------------


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
    }
    assert sorted(named_keys(config)) == ["JUDGE_KEY", "SEARCH_KEY", "TEAM"]


async def test_closing_does_not_wait_for_a_fork_server_that_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    blocks = f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep({10 * LIMIT})"
    (tmp_path / "renderers.py").write_text(blocks)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forks = Forks()
    fork = await forks.start("misbehaving 0", "ipc:///nowhere", {})
    await eventually(began.exists)
    await asyncio.wait_for(forks.close(), LIMIT)
    assert "was ended by SIGTERM" in fork.ended.result()
