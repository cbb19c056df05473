"""Earlier versions of the policy: which are kept, and that no answer is of two versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prime_rl import EngineGone, VersionGone
from prime_rl.config.orchestrator import EnvConfig, PastConfig
from prime_rl.env.episode import EnvSettings
from prime_rl.orchestrator.past import PastModel, PastPolicies
from prime_rl.testing import FakeReference


class Fleet:
    """Loads at once, and writes down what."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []
        self.gone = 0

    async def update_weights(self, folder: Path, version: int) -> float:
        await asyncio.sleep(0)
        if self.gone:
            self.gone -= 1
            raise EngineGone("it does not answer")
        self.loads.append((folder.name, version))
        return 0.0


def pool(tmp_path: Path, *, every: int = 2, keep: int = 2, step: int = 0, seed: int = 0) -> Any:
    fleet: Any = Fleet()
    first = tmp_path / "first"
    config = PastConfig(every=every, keep=keep)
    return PastPolicies(tmp_path, config, fleet=fleet, first=first, step=step, seed=seed)


async def publish(past: Any, tmp_path: Path, *versions: int) -> None:
    for version in versions:
        folder = tmp_path / "broadcasts" / f"step_{version}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights {version}")
        await past.version_pending(version)


async def test_the_first_version_of_each_period_is_kept_and_the_newest_of_them(
    tmp_path: Path,
) -> None:
    past = pool(tmp_path)
    await publish(past, tmp_path, 1, 2, 3)
    assert past.versions == (0, 2)
    await publish(past, tmp_path, 5)  # 4 was skipped: engines load the newest
    assert past.versions == (0, 2, 5)
    await publish(past, tmp_path, 6)
    assert past.versions == (0, 5, 6)
    assert (tmp_path / "past/step_6/model.safetensors").read_text() == "weights 6"


async def test_a_kept_version_outlives_its_broadcast(tmp_path: Path) -> None:
    past = pool(tmp_path)
    await publish(past, tmp_path, 2)
    kept = tmp_path / "past/step_2/model.safetensors"
    published = tmp_path / "broadcasts/step_2/model.safetensors"
    assert kept.stat().st_ino == published.stat().st_ino  # a link takes no disk
    published.unlink()
    assert kept.read_text() == "weights 2"


async def test_users_of_one_version_run_side_by_side_and_another_waits(tmp_path: Path) -> None:
    past = pool(tmp_path)
    await publish(past, tmp_path, 2)
    seen: list[str] = []
    release = asyncio.Event()

    async def use(name: str, version: int) -> None:
        async with past.at(version):
            seen.append(name)
            await release.wait()

    tasks = [asyncio.create_task(use(*each)) for each in (("a", 0), ("b", 0), ("c", 2), ("d", 0))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen == ["a", "b"]  # c waits for them, and d for c
    assert past.fleet.loads == []
    release.set()
    await asyncio.gather(*tasks)
    assert seen == ["a", "b", "c", "d"]
    assert past.fleet.loads == [("step_2", 2), ("first", 0)]
    assert past.take_metrics() == {"past/version": 0.0, "past/loads": 2.0}


async def test_a_cancelled_user_leaves_the_engine_to_the_others(tmp_path: Path) -> None:
    past = pool(tmp_path)
    await publish(past, tmp_path, 2)
    async with past.at(0):
        waiting = asyncio.create_task(past.at(2).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with past.at(0):
            pass
    async with past.at(2):
        assert past.fleet.loads == [("step_2", 2)]


async def test_what_is_used_or_waited_for_is_not_removed(tmp_path: Path) -> None:
    past = pool(tmp_path, every=1, keep=1)
    await publish(past, tmp_path, 1)
    async with past.at(0):
        waiting = asyncio.create_task(past.at(1).__aenter__())
        await asyncio.sleep(0)
        await publish(past, tmp_path, 2, 3)
        assert past.versions == (0, 1, 3)
    await waiting
    assert past.fleet.loads == [("step_1", 1)]


async def test_a_version_that_is_gone_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    past = pool(tmp_path)
    await publish(past, tmp_path, 2)
    model = PastModel(past, 7, FakeReference())
    with pytest.raises(VersionGone, match=r"version 7 .*keeps 0, 2\..*host\.past_versions"):
        await model.logprobs([1, 2])
    model = PastModel(past, 2, FakeReference())
    assert len(await model.logprobs([1, 2])) == 2


async def test_it_waits_for_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.past.RETRY_SECONDS", 0)
    past = pool(tmp_path)
    await publish(past, tmp_path, 2)
    past.fleet.gone = 3
    async with past.at(2):
        assert past.fleet.loads == [("step_2", 2)]


async def test_the_draw_is_the_same_within_a_period_and_in_a_repeated_run(tmp_path: Path) -> None:
    past = pool(tmp_path, every=2, keep=9)
    await publish(past, tmp_path, 2, 4, 6, 8)
    draws = [past.draw(version) for version in range(10)]
    assert draws == [pool(tmp_path, every=2, keep=9, step=8).draw(v) for v in range(10)]
    assert draws[0::2] == draws[1::2]
    assert all(drawn <= version for version, drawn in enumerate(draws))
    drawn = [pool(tmp_path, step=8, seed=seed).draw(9) for seed in range(200)]
    assert {*drawn} == {0, 2, 4, 6, 8}


async def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    await publish(pool(tmp_path, keep=9), tmp_path, 2, 4, 6)
    assert pool(tmp_path, step=4).versions == (0, 2, 4)


def test_an_agent_of_an_earlier_version_does_not_train() -> None:
    env = EnvConfig.model_validate({"id": "duel", "agents": {"black": {"model": "past"}}})
    assert env.untrained == env.past_agents == {"black"}
    assert EnvSettings.of(env).past_agents == {"black"}
    with pytest.raises(ValueError, match="which does not train"):
        EnvConfig.model_validate(
            {"id": "duel", "agents": {"black": {"model": "past", "algo": {"type": "grpo"}}}}
        )
