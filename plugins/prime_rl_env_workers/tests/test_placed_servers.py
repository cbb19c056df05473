"""Servers of environments that a launcher places: their commands, and how the pool finds them."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

from prime_rl import RunError
from prime_rl.config.run import RunConfig
from prime_rl_env_workers.forks import WorkerForks
from prime_rl_env_workers.placed import (
    SERVERS,
    announce,
    automatic_shares,
    give_up,
    orchestrator_environment,
    placed_number,
    placed_workers,
    servers_of,
)
from prime_rl_env_workers.pool import Pool, WorkerLimits

TRAIN = [{"id": "a", "env_workers": 3}, {"id": "b", "address": ["tcp://10.0.0.5:5000"]}]
EVAL = [{"id": "a"}, {"id": "c", "env_workers": "auto"}]


def written(folder: Path, **orchestrator: Any) -> RunConfig:
    table = {"train": {"env": TRAIN}, "eval": {"env": EVAL}, "env_workers": 1} | orchestrator
    config = RunConfig.model_validate(
        {"model": {"name": "m"}, "max_steps": 1, "orchestrator": table}
    )
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "run.json").write_text(config.model_dump_json())
    return config


def test_each_worker_is_with_one_server_which_has_no_admin_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path)
    servers = servers_of(tmp_path, 2)
    found = [(server.name, server.env, server.num_workers) for server in servers]
    assert found == [
        ("env_train_0_0", "train/a", 2),
        ("env_train_0_1", "train/a", 1),
        ("env_eval_0_0", "eval/a", 1),
    ]
    given = {"PRIME_RL_ADMIN_KEY": "admin", "PRIME_RL_ENGINE_API_KEY": "engine"}
    given |= {"PRIME_RL_PROCESS": "2:orchestrator:/runs/one:two"}
    environment = servers[0].environment(given)
    key = environment.pop("PRIME_RL_ENV_SERVER_KEY")
    assert len(bytes.fromhex(key)) == 32
    assert environment == {
        "PRIME_RL_ENGINE_API_KEY": "engine",
        "PRIME_RL_PROCESS": "2:env_train_0_0:/runs/one:two",
    }

    (train, other), (evaluation, _) = config.orchestrator.train.env, config.orchestrator.eval.env
    assert placed_workers(train, 3) == []  # without a launcher that places them
    for name, value in orchestrator_environment(servers).items():
        assert name == SERVERS
        monkeypatch.setenv(name, value)
    assert placed_workers(other, 1) == []
    finds = placed_workers(train, 3)
    assert [find() for find in finds] == [None, None, None]
    announce(servers[0].file, ["tcp://h0:1", "tcp://h0:2"])
    announce(servers[1].file, ["tcp://h1:1"])
    announce(servers[2].file, ["tcp://h2:1"])
    assert {find() for find in finds} == {"tcp://h0:1", "tcp://h0:2", "tcp://h1:1"}
    assert [find() for find in placed_workers(evaluation, 1)] == ["tcp://h2:1"]

    def refuse(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:  # an address that changes would end the worker
        patch.setattr(Path, "read_bytes", refuse)
        assert {find() for find in finds} == {"tcp://h0:1", "tcp://h0:2", "tcp://h1:1"}
    with pytest.raises(RunError, match=r"orchestrator\.env_workers is 'auto'"):
        written(tmp_path, env_workers="auto", train={"env": [{"id": "a"}]})
        servers_of(tmp_path, 2)


@pytest.mark.slow
def test_auto_places_equal_workers_of_envs_that_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two envs share the 9, 8, 1 and 40 CPUs that machines spare: 4, 4, 0 and 20 each, and 4 is the
    least of those that have one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    train = [{"id": "reverse-text"}, {"id": "misbehaving"}, {"id": "misbehaving", "name": "two"}]
    train += [{"id": "misbehaving", "name": "three", "env_workers": 3}]
    config = written(tmp_path, train={"env": train}, eval={"env": []}, env_workers="auto")
    shares = automatic_shares(tmp_path, [9, 8, 1, 40])
    assert shares == {"train/misbehaving": [4, 4, 4], "train/two": [4, 4, 4]}
    assert automatic_shares(tmp_path, [1, 1]) == {}  # one worker cannot be shared
    assert automatic_shares(tmp_path, []) == {}
    servers = servers_of(tmp_path, 0, shares)
    assert [(server.env, server.num_workers) for server in servers] == [
        *[("train/misbehaving", 4)] * 3,
        *[("train/two", 4)] * 3,
    ]
    monkeypatch.setenv(SERVERS, orchestrator_environment(servers)[SERVERS])
    numbers = [placed_number(env) for env in config.orchestrator.train.env]
    assert numbers == [0, 12, 12, 0]
    assert len(placed_workers(config.orchestrator.train.env[1], 12)) == 12
    assert servers_of(tmp_path, 0) == []  # nothing was asked for
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(RunError, match=r"which environments need workers: .*misbehaving"):
        automatic_shares(tmp_path, [9])


async def test_a_server_that_cannot_start_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (env, _) = written(tmp_path).orchestrator.eval.env
    servers = [each for each in servers_of(tmp_path, 1) if each.env == "eval/a"]
    monkeypatch.setenv(SERVERS, orchestrator_environment(servers)[SERVERS])
    pool = Pool("a", 1, WorkerLimits(60.0, 1.0, None), {}, WorkerForks(), placed_workers(env, 1))
    await pool.start()
    waiting = asyncio.create_task(pool.ready())
    give_up(servers[0].file, "env_eval_0_0 ended 3 times before it was ready: no module named a")
    async with asyncio.timeout(LIMIT):
        with pytest.raises(RunError, match="no module named a"):
            await waiting
    await pool.close()


def test_an_env_that_an_earlier_version_plays_is_not_placed(tmp_path: Path) -> None:
    """Its servers would ask the policy in the place of the earlier version."""
    duel = {"id": "duel", "env_workers": 3, "agents": {"black": {"model": "past"}}}
    written(tmp_path, train={"env": [TRAIN[0], duel]})
    assert [each.env for each in servers_of(tmp_path, 1)] == ["train/a", "eval/a"]
