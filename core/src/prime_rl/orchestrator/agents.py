"""The algorithms of an env whose agents have algorithms of their own.

    a group of the env  ->  the rollouts of agent A     ->  A's algorithm
                        ->  the rollouts of the others  ->  the env's algorithm

The group of an algorithm is what its agents left in the episodes of one group. In the env's scope
the algorithms are one plugin, so a wrapper and a hook of the env see the whole group, as they do in
every env of several agents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_rl.config.orchestrator import AlgoConfig, EnvConfig
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.plugins.sampler import GroupProgress, RolloutPlan
from prime_rl.registry.checks import marked_hooks
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import ALGORITHM, make
from prime_rl.rollout import Group, Rollout
from prime_rl.streams import LossComponent


@dataclass(frozen=True, eq=False)
class Part:
    """One algorithm of an env, and the agents whose rollouts it credits."""

    algorithm: Algorithm
    agent: str | None = None
    """None: every agent without an algorithm of its own."""
    hooks: Hooks | None = None
    """A manager with this algorithm alone. None: it is the env's only algorithm."""

    def where(self, env: str) -> str:
        """How errors name it."""
        agent = "" if self.agent is None else f", agent {self.agent!r}"
        return f"env {env!r}{agent}: algorithm {self.algorithm.name!r}"

    def folder(self, env: str) -> str:
        """The folder of its state in a checkpoint."""
        return f"algorithms/{env}" if self.agent is None else f"agents/{env}/{self.agent}"


class AgentAlgorithms(Algorithm):
    """Gives each algorithm of an env the rollouts of its agents."""

    name = "agents"
    parts: Sequence[Part]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> AgentAlgorithms:
        """One with the hooks that its parts have, and no others: core asks which hooks there
        are."""
        algorithms = [part.algorithm for part in parts]
        temperatures = (each.needs_temperature for each in algorithms)
        attributes: dict[str, Any] = {
            "needs_siblings": any(each.compares_siblings for each in algorithms),
            "grows_groups": any(each.grows_groups for each in algorithms),
            "needs_temperature": next((each for each in temperatures if each is not None), None),
        }

        implemented = {name for part in parts for name in marked_hooks(part.algorithm)}
        attributes |= {name: HOOKS[name] for name in implemented}
        # A class of its own, because core asks the class which hooks it has.
        instance: AgentAlgorithms = type(cls.__name__, (cls,), attributes)(PluginConfig())
        instance.parts = parts

        limits = [each.trains_at_most for each in algorithms]
        if None not in limits:
            # A member of the group is an episode: it trains if any of its agents does.
            instance.trains_at_most = sum(limit for limit in limits if limit is not None)
        return instance

    def part_of(self, agent: str) -> Part:
        """The part that credits an agent's rollouts."""
        named = next((part for part in self.parts if part.agent == agent), None)
        return named or next(part for part in self.parts if part.agent is None)

    def share(self, part: Part, group: Group) -> list[Rollout]:
        """The rollouts of a group that a part credits, in their order."""
        return [rollout for rollout in group if self.part_of(rollout.agent) is part]

    def share_of_groups(self, part: Part, groups: Sequence[Group]) -> list[list[Rollout]]:
        """The same of several groups; none that is empty."""
        shares = [self.share(part, group) for group in groups]
        return [share for share in shares if share]

    def shares(self, group: Group) -> Iterator[tuple[Hooks, list[Rollout]]]:
        """The rollouts of each part, in the order of the group; no part without rollouts."""
        for part in self.parts:
            share = self.share(part, group)
            if share and part.hooks is not None:
                yield part.hooks, share

    async def setup(self, host: Host) -> None:
        """Each part sees its own agents."""
        named = {part.agent for part in self.parts}
        for part in self.parts:
            agents = (
                (part.agent,) if part.agent else tuple(a for a in host.agents if a not in named)
            )
            lent: Any = AgentHost(host, agents, part.agent)
            await part.algorithm.setup(lent)

    async def close(self) -> None:
        for part in self.parts:
            await part.algorithm.close()


class AgentHost:
    """A host for the algorithm of some agents of an env."""

    def __init__(self, host: Host, agents: tuple[str, ...], agent: str | None) -> None:
        self._host = host
        self._agent = agent
        self.agents = agents

    @property
    def folder(self) -> Path:
        """A folder of its own within the env's."""
        if self._agent is None:
            return self._host.folder
        path = self._host.folder / self._agent
        path.mkdir(parents=True, exist_ok=True)
        return path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


@hookimpl
async def prepare_rollout(self: AgentAlgorithms, plan: RolloutPlan) -> None:
    """Every part may change how the episode is sampled."""
    for part in self.parts:
        assert part.hooks is not None
        await part.hooks.prepare_rollout(plan)


@hookimpl
def wanted_members(self: AgentAlgorithms, progress: GroupProgress) -> int | None:
    """The largest answer, each by the rollouts of its own agents."""
    answers = [
        hooks.wanted_members(replace(progress, rollouts=share))
        for hooks, share in self.shares(progress.rollouts)
        if hooks.decides_sizes
    ]
    return max(answers, default=None)


@hookimpl
async def score_rollout(self: AgentAlgorithms, rollout: Rollout) -> None:
    for hooks, _ in self.shares([rollout]):
        await hooks.score_rollout(rollout)


@hookimpl
def observation_weights(self: AgentAlgorithms, rollout: Rollout) -> Any:
    # A rollout belongs to one agent, so only one part answers.
    for hooks, _ in self.shares([rollout]):
        return hooks.observation_weights(rollout)
    return None


@hookimpl
async def score_group(self: AgentAlgorithms, group: Group) -> None:
    for hooks, share in self.shares(group):
        await hooks.score_group(share)


@hookimpl
async def score_batch(self: AgentAlgorithms, groups: Sequence[Group]) -> None:
    for part in self.parts:
        assert part.hooks is not None
        shares = self.share_of_groups(part, groups)
        if shares:
            await part.hooks.score_batch(shares)


@hookimpl
async def score_envs(self: AgentAlgorithms, batches: Mapping[str, Sequence[Group]]) -> None:
    """An env with algorithms of its agents shares them with no other env."""
    for part in self.parts:
        assert part.hooks is not None
        shares = {env: self.share_of_groups(part, groups) for env, groups in batches.items()}
        present = {env: groups for env, groups in shares.items() if groups}
        if present:
            await part.hooks.score_envs(present)


HOOKS = {
    hook.__name__: hook
    for hook in (
        prepare_rollout,
        wanted_members,
        score_rollout,
        observation_weights,
        score_group,
        score_batch,
        score_envs,
    )
}


def make_algorithm(
    env: EnvConfig,
    shared: AlgoConfig,
    hooks: Hooks,
    agents: Collection[str] | None = None,
) -> Algorithm:
    """The algorithm of a training env, or those of its agents in one.

    ``shared``: the run's, for an env without its own. ``agents``: those of the env that train;
    None: unknown, so that the env's algorithm is made whether or not an agent is left for it.
    Raises ``ConfigError``.
    """
    where = f"env {env.label!r}: "
    by_agent = {}

    for name, agent in env.agents.items():
        if isinstance(agent.algo, AlgoConfig):
            by_agent[name] = make(
                ALGORITHM,
                agent.algo.type,
                table=agent.algo.settings,
                hooks=hooks,
                where=f"{where}agents.{name}.algo",
            )

    is_left = agents is None or bool({*agents} - by_agent.keys())
    rest = None
    if is_left:
        algo = env.algo or shared
        rest = make(ALGORITHM, algo.type, table=algo.settings, hooks=hooks, where=f"{where}algo")

    if not by_agent:
        assert rest is not None
        return rest

    parts = [
        _part(algorithm, agent=agent, env=env.label, shared=hooks)
        for agent, algorithm in by_agent.items()
    ]
    if rest is not None:
        parts.append(_part(rest, agent=None, env=env.label, shared=hooks))
    return AgentAlgorithms.of(parts)


def _part(algorithm: Algorithm, agent: str | None, env: str, shared: Hooks) -> Part:
    label = env if agent is None else f"{env}.{agent}"
    hooks = Hooks(shared.group, label)
    hooks.register(algorithm, f"{label}:{algorithm.name}")
    return Part(algorithm, agent, hooks)


def parts_of(algorithm: Algorithm) -> Sequence[Part]:
    """The algorithms of an env: one, or those of its agents."""
    return algorithm.parts if isinstance(algorithm, AgentAlgorithms) else [Part(algorithm)]


def action_loss_of(algorithm: Algorithm, rollout: Rollout) -> LossComponent:
    """The loss that trains what the policy sampled in this rollout."""
    if isinstance(algorithm, AgentAlgorithms):
        return algorithm.part_of(rollout.agent).algorithm.action_loss
    return algorithm.action_loss
