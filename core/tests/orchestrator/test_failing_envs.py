"""Which envs the sampler may choose while one of them fails."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.orchestrator.build import _may_be_sampled

ENVS = ("a", "b", "c")


def may_be_sampled(name: str, **states: set[str]) -> bool:
    """``states``: the envs that are failing, asked, closed, empty, or of weight 0."""

    def has(state: str, env: str) -> bool:
        return env in states.get(state, set())

    envs: list[Any] = [
        SimpleNamespace(
            name=env, source=SimpleNamespace(is_ready=lambda env=env: not has("empty", env))
        )
        for env in ENVS
    ]
    curriculum: Any = SimpleNamespace(
        is_open=lambda env: not has("closed", env), weight=lambda env: not has("light", env)
    )
    dispatcher: Any = SimpleNamespace(
        is_failing=lambda env: has("failing", env), is_asked=lambda env: has("asked", env)
    )
    return _may_be_sampled(envs[ENVS.index(name)], envs, curriculum, lambda: dispatcher)


def test_an_env_that_fails_is_asked_by_one_group_at_a_time() -> None:
    assert may_be_sampled("a", failing={"a"})
    assert not may_be_sampled("a", failing={"a"}, asked={"a"})
    assert may_be_sampled("a", failing={"a"}, asked={"b"})
    assert may_be_sampled("b", failing={"a"}, asked={"a", "b"})


@pytest.mark.parametrize("state", ["failing", "closed", "empty", "light"])
def test_unless_the_others_have_nothing_to_give(state: str) -> None:
    states = {"failing": {"a"}, "asked": {*ENVS}}
    states[state] = states.get(state, set()) | {"b", "c"}
    assert may_be_sampled("a", **states)


def test_some_env_may_always_be_sampled_that_has_something() -> None:
    """All states of three envs: the sampler would end the run if none were left."""
    subsets = [
        {e for e, x in zip(ENVS, bits, strict=True) if x} for bits in product((0, 1), repeat=3)
    ]
    for failing, asked, closed in product(subsets, repeat=3):
        states = {"failing": failing, "asked": asked, "closed": closed}
        allowed = {env for env in ENVS if may_be_sampled(env, **states)}
        assert allowed <= {*ENVS} - closed
        assert bool(allowed) == bool({*ENVS} - closed)
        sound = {*ENVS} - closed - failing
        assert sound <= allowed
        if sound:
            assert allowed & failing == (failing - closed) - asked
