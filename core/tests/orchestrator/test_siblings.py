"""Which envs hand their rollouts on alone: those in which nothing compares siblings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl import (
    Algorithm,
    ConfigError,
    Filter,
    Group,
    PluginConfig,
    Rollout,
    SampledEnv,
    Sampler,
    Source,
    hookimpl,
)
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.build import compared_by
from prime_rl.orchestrator.sources import ExternalSource, RolloutSource
from prime_rl.registry.manager import Hooks, scope


class Alone(Algorithm):
    name = "alone"

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        rollout.assign_advantages(rollout.reward)


class Whitened(Alone):
    name = "whitened"

    @hookimpl
    def score_batch(self, groups: Sequence[Group]) -> None: ...


class Together(Algorithm):
    name = "together"

    @hookimpl
    def score_group(self, group: Group) -> None: ...


class OneByOne(Together):
    """Its ``score_group`` looks at each rollout alone."""

    name = "one_by_one"
    needs_siblings = False


class Declared(Alone):
    name = "declared"
    group_relative = True


class OfPairs(Alone):
    name = "of_pairs"
    action_loss = "pairs"


class Around:
    name = "around"

    @hookimpl(wrapper=True)
    def score_group(self, group: Group) -> Generator[None, None, None]:
        yield


class Prepares:
    @hookimpl
    async def prepare_rollout(self, plan: Any) -> None: ...


class LooksAtOne(Filter):
    name = "looks_at_one"

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None: ...


class LooksAtAll(Filter):
    name = "looks_at_all"

    @hookimpl
    def filter_rollout(self, rollout: Rollout, group: Group) -> str | None: ...


class InTurn(Sampler):
    name = "in_turn"


class Learns(Sampler):
    name = "learns"

    def observe(self, group: Group) -> None: ...


class Rejects(Sampler):
    name = "rejects"

    def reject(self, group: Group) -> str | None: ...


class Keeps(Source):
    name = "keeps"

    def observe(self, group: Group) -> None: ...


class Notes(Keeps):
    name = "notes"
    needs_siblings = False


class Gives(Source):
    name = "gives"


def compared(
    *algorithms: type[Algorithm],
    plugins: Sequence[object] = (),
    filters: Sequence[type[Filter]] = (),
    sampler: type[Sampler] = InTurn,
    source: type[Source] | None = None,
    **settings: Any,
) -> dict[str, list[str]]:
    """For an env per algorithm; ``source`` is that of another one."""
    shared = Hooks()
    envs: list[Any] = []
    for algorithm in algorithms:
        made = algorithm(PluginConfig())
        hooks = scope(algorithm.name, shared, [*plugins, made])
        envs.append(
            SimpleNamespace(
                name=algorithm.name,
                algorithm=made,
                hooks=hooks,
                source=RolloutSource(),
                limits=None,
            )
        )
    if source is not None:
        made = Alone(PluginConfig())
        external: Any = ExternalSource("other", None, source(PluginConfig()))  # type: ignore[arg-type]
        hooks = scope("other", shared, [made])
        envs.append(
            SimpleNamespace(name="other", algorithm=made, hooks=hooks, source=external, limits=None)
        )

    made_filters = [(each(PluginConfig()), False) for each in filters]
    buffer = Buffer(
        batch_size=8,
        max_off_policy_steps=1,
        pre=FilterSlot("pre", shared, []),
        post=FilterSlot("post", shared, made_filters),
        max_empty_batches=1,
    )
    loss = SimpleNamespace(scope="rollout")
    run: Any = SimpleNamespace(
        config=SimpleNamespace(orchestrator=OrchestratorConfig(**settings)),
        losses={"rl": loss, "pairs": SimpleNamespace(scope="group")},
    )
    chosen = sampler(PluginConfig(), [SampledEnv("e", 1, None)], 0)
    return compared_by(run, envs, chosen, buffer)


@pytest.mark.parametrize(
    ("algorithm", "reasons"),
    [
        (Alone, []),
        (Whitened, []),
        (OneByOne, []),
        (Together, ["algorithm 'together'"]),
        (Declared, ["algorithm 'declared'"]),
        (OfPairs, ["loss 'pairs'"]),
    ],
)
def test_an_algorithm_compares_siblings(algorithm: type[Algorithm], reasons: list[str]) -> None:
    assert compared(algorithm)[algorithm.name] == reasons


def test_a_plugin_of_the_envs_scope_compares_siblings() -> None:
    assert compared(Alone, plugins=[Around()]) == {"alone": ["plugin 'around'"]}
    assert compared(Alone, plugins=[Prepares()]) == {"alone": []}


def test_envs_are_told_apart() -> None:
    assert compared(Alone, Together) == {"alone": [], "together": ["algorithm 'together'"]}


@pytest.mark.parametrize(
    ("parts", "reasons"),
    [
        ({"filters": [LooksAtOne]}, []),
        ({"filters": [LooksAtOne, LooksAtAll]}, ["filter 'looks_at_all'"]),
        ({"sampler": Learns}, ["sampler 'learns'"]),
        ({"sampler": Rejects}, ["sampler 'rejects'"]),
        ({"source": Gives}, []),
        ({"source": Keeps}, ["the source of env 'other'"]),
        ({"source": Notes}, []),
    ],
)
def test_what_every_env_passes_compares_siblings(parts: dict[str, Any], reasons: list[str]) -> None:
    assert compared(Alone, **parts)["alone"] == reasons


def test_a_loss_that_compares_whole_groups_refuses_parts_of_them() -> None:
    table = {"partial_groups": {"at_least": 4}}
    assert compared(Together, **table)
    with pytest.raises(ConfigError, match="env 'of_pairs': its loss 'pairs' compares whole groups"):
        compared(OfPairs, **table)


def test_partial_groups_without_groups_are_refused() -> None:
    table = {"partial_groups": {"at_least": 4}}
    assert compared(Alone, Together, **table)["alone"] == []
    with pytest.raises(ConfigError, match="nothing compares the members of a group in any env"):
        compared(Alone, **table)
