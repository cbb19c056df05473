"""Algorithms of an env's agents: each sees its own rollouts, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl import Algorithm, ConfigError, Group, Rollout, hookimpl
from prime_rl.config.orchestrator import AlgoConfig, EnvConfig
from prime_rl.env.episode import EnvSettings
from prime_rl.orchestrator.agents import (
    AgentHost,
    action_loss_of,
    make_algorithm,
    parts_of,
)
from prime_rl.orchestrator.scoring import score_batch, score_group, score_rollout
from prime_rl.plugins.sampler import GroupProgress, RolloutPlan
from prime_rl.registry.manager import Hooks, scope
from prime_rl.testing import FakeHost, make_rollout


class Centered(Algorithm):
    """Credit is the reward minus the group's mean."""

    name = "centered"
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)


class Doubled(Algorithm):
    """Credit is twice the reward."""

    name = "doubled"
    action_loss = "other"

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        await asyncio.sleep(0)
        rollout.assign_advantages(2 * rollout.reward)

    @hookimpl
    def observation_weights(self, rollout: Rollout) -> list[Any]:
        return [0.25 * ~sample.loss_mask for sample in rollout.samples]

    @hookimpl
    async def prepare_rollout(self, plan: RolloutPlan) -> None:
        plan.max_completion_tokens = 5

    async def setup(self, host: Any) -> None:
        self.host = host


class Whitened(Algorithm):
    """Credit is the rank in the batch."""

    name = "ranked"

    @hookimpl
    def score_batch(self, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group]
        for rank, rollout in enumerate(sorted(rollouts, key=lambda each: each.reward)):
            rollout.assign_advantages(rank)

    @hookimpl
    def wanted_members(self, progress: GroupProgress) -> int:
        return len(progress.rollouts) + 1


class Plugin:
    @hookimpl
    def register_algorithms(self) -> list[type[Algorithm]]:
        return [Centered, Doubled, Whitened]


@pytest.fixture
def hooks() -> Hooks:
    manager = Hooks()
    manager.register(Plugin(), "agents")
    return manager


def env(**algorithms: str) -> EnvConfig:
    """The env ``duel``; ``algorithms`` by agent."""
    tables = {
        name: {"algo": algo if algo == "none" else {"type": algo}}
        for name, algo in algorithms.items()
    }
    return EnvConfig.model_validate({"id": "duel", "agents": tables})


def made(hooks: Hooks, agents: tuple[str, ...] | None = None, **algorithms: str) -> Algorithm:
    return make_algorithm(env(**algorithms), AlgoConfig(type="centered"), hooks, agents)


def group(*members: tuple[str, float]) -> list[Rollout]:
    rollouts = []
    for number, (agent, reward) in enumerate(members):
        rollout = make_rollout(reward)
        rollout.env = "duel"
        rollout.agent = agent
        rollout.episode_id = number // 2
        rollouts.append(rollout)
    return rollouts


async def credit(hooks: Hooks, algorithm: Algorithm, rollouts: list[Rollout]) -> list[float]:
    inside = scope("duel", hooks, [algorithm])
    for rollout in rollouts:
        await score_rollout(inside, rollout)
    await score_group(inside, rollouts)
    if inside.scores_batches:
        await score_batch(inside, rollouts)
    return [float(rollout.advantages[0]) for rollout in rollouts]  # type: ignore[index]


GAME = (("white", 1.0), ("black", -1.0), ("white", 0.0), ("black", 0.5))


async def test_each_agent_is_credited_by_its_own_algorithm(hooks: Hooks) -> None:
    # White: 1 and 0 around their mean 0.5. Black: twice -1 and 0.5.
    algorithm = made(hooks, ("white", "black"), white="centered", black="doubled")
    assert await credit(hooks, algorithm, group(*GAME)) == [0.5, -2.0, -0.5, 1.0]


async def test_agents_without_a_table_share_the_algorithm_of_the_env(hooks: Hooks) -> None:
    # The mean of 1, 0 (white) and 2 (referee) is 1: they are one group. Black is on its own.
    algorithm = made(hooks, ("white", "black", "referee"), black="doubled")
    rollouts = group(*GAME, ("referee", 2.0))
    assert await credit(hooks, algorithm, rollouts) == [0.0, -2.0, -1.0, 1.0, 1.0]


async def test_a_batch_hook_sees_the_rollouts_of_its_agent_only(hooks: Hooks) -> None:
    # Black's rewards -1 and 0.5 have the ranks 0 and 1, whatever white got.
    algorithm = made(hooks, ("white", "black"), white="doubled", black="ranked")
    assert await credit(hooks, algorithm, group(*GAME)) == [2.0, 0.0, 0.0, 1.0]


async def test_only_the_rollouts_of_its_agent_get_the_weights_of_a_part(hooks: Hooks) -> None:
    algorithm = made(hooks, ("white", "black"), white="centered", black="doubled")
    white, black = group(*GAME[:2])
    inside = scope("duel", hooks, [algorithm])
    assert inside.observation_weights(white) == [None]
    (weights,) = inside.observation_weights(black)
    assert weights is not None
    assert weights.tolist() == [0.25 * (not sampled) for sampled in black.samples[0].loss_mask]


def test_a_part_decides_the_size_of_groups_by_its_own_rollouts(hooks: Hooks) -> None:
    algorithm = made(hooks, ("white", "black"), white="centered", black="ranked")
    inside = scope("duel", hooks, [algorithm])
    progress = GroupProgress(
        env="duel",
        group_id=0,
        example_id=0,
        rollouts=group(("white", 0), ("black", 1), ("white", 0), ("white", 1)),
        ended=2,
        size=2,
        group_size=2,
        max_group_size=8,
    )
    assert inside.wanted_members(progress) == 2  # one rollout of black, and one more


async def test_every_part_prepares_the_episode(hooks: Hooks) -> None:
    algorithm = made(hooks, ("white", "black"), black="doubled")
    plan = RolloutPlan(temperature=1.0)
    await scope("duel", hooks, [algorithm]).prepare_rollout(plan)
    assert plan.max_completion_tokens == 5


def test_it_has_the_hooks_of_its_parts_and_no_others(hooks: Hooks) -> None:
    plain = scope("duel", hooks, [made(hooks, ("white", "black"), white="doubled")])
    assert not plain.scores_batches
    assert not plain.decides_sizes
    ranked = scope("duel", hooks, [made(hooks, ("white", "black"), white="ranked")])
    assert ranked.scores_batches
    assert ranked.decides_sizes


def test_it_compares_siblings_if_a_part_does(hooks: Hooks) -> None:
    assert made(hooks, ("white", "black"), white="doubled").compares_siblings
    alone = made(hooks, ("white", "black"), white="doubled", black="doubled")
    assert not alone.compares_siblings


def test_the_loss_of_a_rollout_is_that_of_its_agent(hooks: Hooks) -> None:
    algorithm = made(hooks, ("white", "black"), black="doubled")
    white, black = group(*GAME[:2])
    assert action_loss_of(algorithm, white) == "rl"
    assert action_loss_of(algorithm, black) == "other"


def test_an_env_without_tables_has_its_algorithm_itself(hooks: Hooks) -> None:
    assert type(made(hooks)) is Centered
    assert type(made(hooks, ("white",), black="none")) is Centered


def test_the_algorithm_of_the_env_is_not_made_if_no_agent_is_left(hooks: Hooks) -> None:
    names = [
        [(part.agent, part.algorithm.name) for part in parts_of(algorithm)]
        for algorithm in (
            made(hooks, ("white", "black"), white="doubled"),
            made(hooks, ("white",), white="doubled", black="none"),
            made(hooks, None, white="doubled"),
        )
    ]
    assert names == [
        [("white", "doubled"), (None, "centered")],
        [("white", "doubled")],
        [("white", "doubled"), (None, "centered")],
    ]


async def test_each_part_sees_its_agents_and_has_a_folder(hooks: Hooks) -> None:
    algorithm = made(hooks, ("white", "black", "referee"), white="doubled")
    host = FakeHost(env="duel", agents=("white", "black", "referee"))
    await algorithm.setup(host)
    lent = parts_of(algorithm)[0].algorithm.host  # type: ignore[attr-defined]
    assert lent.agents == ("white",)
    assert lent.folder == host.folder / "white"
    assert lent.env == "duel"
    rest: Any = AgentHost(host, ("black", "referee"), None)
    assert rest.folder == host.folder


def test_each_part_has_a_place_in_a_checkpoint(hooks: Hooks) -> None:
    parts = parts_of(made(hooks, ("white", "black"), white="doubled"))
    assert [part.folder("duel") for part in parts] == ["agents/duel/white", "algorithms/duel"]
    assert [part.folder("duel") for part in parts_of(made(hooks))] == ["algorithms/duel"]


def test_an_unknown_algorithm_is_an_error_at_the_agent(hooks: Hooks) -> None:
    with pytest.raises(ConfigError, match=r"agents\.white\.algo.*Did you mean 'doubled'"):
        made(hooks, white="doubledd")


def test_an_agent_has_no_source_of_its_own() -> None:
    algo = {"type": "centered", "sampling": {"source": {"type": "dataset"}}}
    with pytest.raises(ValidationError, match="Set it in the env's own algo"):
        EnvConfig.model_validate({"id": "duel", "agents": {"white": {"algo": algo}}})


def test_the_agents_that_do_not_train_are_named() -> None:
    table = env(white="none", black="centered")
    assert table.untrained == {"white"}
    assert EnvSettings.of(table).untrained == {"white"}


def test_what_an_error_names(hooks: Hooks) -> None:
    parts = parts_of(made(hooks, ("white", "black"), white="doubled"))
    assert [part.where("duel") for part in parts] == [
        "env 'duel', agent 'white': algorithm 'doubled'",
        "env 'duel': algorithm 'centered'",
    ]
