"""What sampling tells observers, the sampler and the sources, and what it reports: in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prime_rl import Algorithm, PluginConfig, Rollout, hookimpl
from prime_rl.config.run import RunConfig
from prime_rl.env.episode import RolloutResult
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.context import Engines, GroupLimits, Outages, RunContext
from prime_rl.orchestrator.dispatcher import OpenGroup
from prime_rl.orchestrator.policy import LivePolicy
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import ExternalSource, RolloutFailed, RolloutRequest
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.testing import make_rollout

Calls = list[tuple[Any, ...]]


class Plain(Algorithm):
    name = "plain"

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        rollout.assign_advantages(rollout.reward)


class Listener:
    """An observer that keeps what it is told."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def rollouts_lost(self, *arguments: Any) -> None:
        self.calls.append(("lost", *arguments))

    def rollout_failed(self, *arguments: Any) -> None:
        self.calls.append(("failed", *arguments))

    def group_scored(self, group: Sequence[Rollout], version: int) -> None:
        self.calls.append(("scored", len(group), version))


class World:
    """Two envs, in groups of two; ``calls`` has what the parts around sampling were told."""

    def __init__(self, tmp_path: Path, produce: Any = None, rejects: str | None = None) -> None:
        config = RunConfig.model_validate(
            {
                "model": {"name": "m"},
                "max_steps": 9,
                "seed": 7,
                "orchestrator": {
                    "batch_size": 4,
                    "group_size": 2,
                    "train": {"env": [{"id": "a"}, {"id": "b"}]},
                },
            }
        )
        launch = Launch(
            model_path="m",
            served_model_name="m",
            engine_urls=[],
            transport_type="zmq",
            transport_host="",
            transport_ports=[],
        )
        hooks = Hooks()
        run = RunContext(config, launch, run_dir=tmp_path, hooks=hooks, status=Status(None))
        self.calls: Calls = []
        self.envs: list[Any] = []
        for name in ("a", "b"):
            algorithm = Plain(PluginConfig())
            source = SimpleNamespace(
                is_live=True,
                produce=produce,
                observe=lambda group, name=name: self.calls.append(("source", name, len(group))),
                settled=lambda rollouts, reason, name=name: self.calls.append(
                    ("settled", name, len(rollouts), reason)
                ),
            )
            self.envs.append(
                SimpleNamespace(
                    name=name,
                    source=source,
                    algorithm=algorithm,
                    hooks=scope(name, hooks, [algorithm]),
                    group_size=2,
                    limits=None,
                    host=SimpleNamespace(agents=("agent",)),
                )
            )
        sampler: Any = SimpleNamespace(
            observe=lambda group: self.calls.append(("sampler", len(group))),
            reject=lambda group: rejects,
            metrics=lambda: {"sampler/own": 6.0},
        )
        self.buffer = Buffer(
            batch_size=4,
            max_off_policy_steps=8,
            pre=FilterSlot("pre", hooks, []),
            post=FilterSlot("post", hooks, []),
            max_empty_batches=9,
        )
        fleet: Any = SimpleNamespace(asleep=False, serving=[])
        self.sampling = Sampling(
            run,
            Engines(fleet, LivePolicy(3), Outages()),
            envs=self.envs,
            sampler=sampler,
            buffer=self.buffer,
            installed=[Listener(self.calls)],  # type: ignore[list-item]
        )
        self.dispatcher: Any = SimpleNamespace(
            taken=lambda group: self.calls.append(("taken", group.group_id)),
            version_served=lambda version: self.calls.append(("served", version)),
            batch_sent=lambda step: self.calls.append(("sent", step)),
            wake=lambda: self.calls.append(("wake",)),
        )

    def group(self, number: int = 0, **members: Any) -> OpenGroup:
        return OpenGroup(
            env_name="a",
            size=2,
            env=self.envs[0],
            group_id=number,
            example_id=5,
            requested=[0, 1],
            **members,
        )


async def test_a_failed_rollout_is_told_with_its_class_and_how_far_it_came(tmp_path: Path) -> None:
    """Three turns, of which the policy sampled two, of 5 and 4 tokens."""
    nodes = [
        SimpleNamespace(sampled=sampled, mask=[sampled] * length)
        for sampled, length in ((True, 5), (False, 7), (True, 4))
    ]
    result = RolloutResult(
        ok=False,
        error_type="ToolError",
        error="no tool 17",
        num_turns=3,
        trace=SimpleNamespace(nodes=nodes),
    )

    async def produce(request: RolloutRequest) -> None:
        raise RolloutFailed(result)

    world = World(tmp_path, produce)
    assert await world.sampling._run_rollout(world.group(), 0) is None
    assert world.calls == [("lost", "a", "error/ToolError", 1), ("failed", "a", "ToolError", 9, 3)]


async def test_every_member_of_every_group_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """(7 * 1,000,003 + group) * 4096 mod 2**31, plus the member."""
    requests: list[RolloutRequest] = []

    async def produce(request: RolloutRequest) -> list[Rollout]:
        requests.append(request)
        return []

    world = World(tmp_path, produce)
    for number in (0, 1):
        for index in (0, 1):
            group = world.group(number)
            group.policy_version = 2 + number
            await world.sampling._run_rollout(group, index)
    assert [each.seed for each in requests] == [754798592, 754798593, 754802688, 754802689]
    assert [(each.group_id, each.member, each.policy_version) for each in requests] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 3),
        (1, 1, 3),
    ]
    assert {each.example_id for each in requests} == {5}


async def test_a_member_that_joins_a_group_is_of_newer_weights_and_ages_with_the_group(
    tmp_path: Path,
) -> None:
    """The group was opened at version 1, and the engines serve version 3."""
    requested: list[int] = []

    async def produce(request: RolloutRequest) -> list[Rollout]:
        requested.append(request.policy_version)
        rollout = make_rollout(1.0, env="a")
        rollout.policy_version = request.policy_version
        return [rollout]

    world = World(tmp_path, produce)
    ages = []
    for limits in (None, GroupLimits(size=4, trained=4)):
        world.envs[0].limits = limits
        group = world.group()
        group.policy_version = 1
        rollouts = await world.sampling._run_rollout(group, 0)
        assert rollouts is not None
        ages.append(rollouts[0].policy_version)
    assert requested == [1, 3]
    assert ages == [1, 1]


async def test_what_a_group_of_a_decided_size_was_cut_to_is_stopped(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.sampling.dispatcher = world.dispatcher
    world.envs[0].limits = GroupLimits(size=4, trained=4)
    await world.sampling._credit(world.group(members={0: scored(1.0)}, num_cut_off=2))
    assert world.calls[0] == ("lost", "a", "stopped", 2)


def scored(*rewards: float) -> list[Rollout]:
    made = [make_rollout(reward, env="a") for reward in rewards]
    for rollout in made:
        rollout.assign_advantages(rollout.reward)
    return made


async def test_a_scored_group_is_shown_to_observers_sampler_and_the_sources_of_all_envs(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.sampling.dispatcher = world.dispatcher
    group = world.group(4, members={0: scored(1.0, 2.0), 1: None}, num_cut_off=3)
    await world.sampling._credit(group)
    assert world.calls == [
        ("lost", "a", "cancelled", 3),
        ("scored", 2, 3),
        ("sampler", 2),
        ("source", "a", 2),
        ("source", "b", 2),
        ("settled", "a", 2, None),
        ("taken", 4),
    ]
    assert [rollout.reward for rollout in world.buffer.batch.kept] == [1.0, 2.0]
    assert all(rollout.frozen for rollout in world.buffer.batch.kept)


async def test_a_rejected_group_is_shown_to_no_source_and_takes_no_place(tmp_path: Path) -> None:
    world = World(tmp_path, rejects="every reward is 1.0")
    world.sampling.dispatcher = world.dispatcher
    await world.sampling._credit(world.group(members={0: scored(1.0), 1: scored(1.0)}))
    assert [call[0] for call in world.calls] == ["scored", "sampler", "settled", "taken"]
    assert world.buffer.batch.kept == []
    assert list(world.buffer.batch.objections.values()) == [{"sampler": "every reward is 1.0"}] * 2


async def test_the_dispatcher_hears_of_batches_and_versions(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.sampling.dispatcher = world.dispatcher
    await world.sampling.batch_taken(world.buffer.batch)
    world.sampling.batch_sent(world.buffer.batch, [])
    world.sampling.version_served(6)
    assert world.calls == [("wake",), ("sent", 1), ("served", 6)]


def test_what_sampling_reports(tmp_path: Path) -> None:
    world = World(tmp_path)
    external = ExternalSource.__new__(ExternalSource)
    external.source = SimpleNamespace(metrics=lambda: {"left": 12.0})  # type: ignore[assignment]
    world.envs[1].source = external
    world.sampling._num_cut = 5
    world.sampling.dispatcher = SimpleNamespace(  # type: ignore[assignment]
        counts=Counter(dispatched=9, finished=4, failed=1, cancelled=2),
        num_inflight=2,
        max_inflight=8,
        admission=SimpleNamespace(leads=SimpleNamespace(take_metrics=lambda: {"pace/lead": 1.5})),
        cancelled=Counter(a=2),
        versions_behind=[0, 1, 3],
    )
    assert world.sampling.take_metrics() == {
        "dispatcher/dispatched": 9.0,
        "dispatcher/finished": 4.0,
        "dispatcher/failed": 1.0,
        "dispatcher/cancelled": 2.0,
        "dispatcher/cancelled/a": 2.0,
        "dispatcher/cancelled/b": 0.0,
        "dispatcher/inflight/train": 2.0,
        "dispatcher/max_inflight": 8.0,
        "dispatcher/off_policy/mean": 4 / 3,
        "dispatcher/off_policy/max": 3.0,
        "batch/truncated_samples": 5.0,
        "pace/lead": 1.5,
        "source/b/left": 12.0,
        "sampler/own": 6.0,
    }
    assert world.sampling.take_metrics()["batch/truncated_samples"] == 0.0
