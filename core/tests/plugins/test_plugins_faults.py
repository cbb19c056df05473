"""Which plugin an error comes from, and which call has not returned."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_rl import Algorithm, PluginConfig, PluginError, hookimpl
from prime_rl.orchestrator.scoring import score_group, score_rollout
from prime_rl.plugins.sampler import RolloutPlan
from prime_rl.registry import calls
from prime_rl.registry.calls import RUNNING, ReadOnly, fault
from prime_rl.registry.manager import Hooks, scope
from prime_rl.testing import make_group, make_sample


class Oops(Algorithm):
    """Fails in ``score_group``."""

    name = "oops"

    @hookimpl
    def score_group(self, group: Any) -> None:
        {}["oops"]


class Passes:
    """A wrapper that is innocent."""

    @hookimpl(wrapper=True)
    def score_group(self, group: Any) -> Any:
        yield


class FailsAfter:
    """A wrapper that fails after its ``yield``."""

    @hookimpl(wrapper=True)
    def score_group(self, group: Any) -> Any:
        yield
        raise ZeroDivisionError("after")


class TooLong(Algorithm):
    name = "too_long"

    @hookimpl
    async def score_rollout(self, rollout: Any) -> None:
        await asyncio.sleep(0)
        rollout.assign_advantages([1.0] * 99)


def error_of(algorithm: type[Algorithm], *plugins: object) -> Exception:
    hooks = scope("math", Hooks(), [*plugins, algorithm(PluginConfig())])
    group = make_group([1.0, 0.0])
    for rollout in group:
        rollout.env, rollout.group_id = "math", 11

    async def run() -> None:
        for rollout in group:
            await score_rollout(hooks, rollout)
        await score_group(hooks, group)

    with pytest.raises(Exception) as caught:
        asyncio.run(run())
    assert RUNNING == {}
    return caught.value


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module belongs to the distribution ``my-dist``."""
    entry = SimpleNamespace(
        name="mine",
        value=f"{__name__}.part:Mine",
        dist=SimpleNamespace(name="my-dist", version="0.1"),
    )
    monkeypatch.setattr(calls, "entries", lambda group: [entry])


@pytest.mark.usefixtures("installed")
def test_one_line_names_plugin_hook_env_and_group_above_the_plugins_frames() -> None:
    first, *frames = (fault(error_of(Oops, Passes())) or "").splitlines()
    expected = "plugin 'oops' (my-dist 0.1), score_group, env 'math', group 11: KeyError: 'oops'"
    assert first == expected
    assert any('{}["oops"]' in line for line in frames)
    assert not any("prime_rl/plugins" in line or "pluggy" in line for line in frames)


class TopP(Algorithm):
    name = "top_p"

    @hookimpl
    def score_group(self, group: Any) -> None:
        RolloutPlan().top_p = 0.9  # type: ignore[attr-defined]


def test_the_frames_of_a_library_that_the_plugin_calls_are_left_out() -> None:
    found = fault(error_of(TopP)) or ""
    assert "ValidationError" in found and "RolloutPlan().top_p = 0.9" in found
    assert "site-packages" not in found and "__setattr__" not in found


def test_a_wrapper_that_fails_is_named_instead_of_what_it_wraps() -> None:
    class Fine(Algorithm):
        name = "fine"

    assert (fault(error_of(Fine, FailsAfter())) or "").startswith(
        "plugin 'FailsAfter', score_group, env 'math', group 11: ZeroDivisionError: after"
    )


def test_an_error_of_ours_is_kept_and_the_plugin_stands_before_it() -> None:
    text = fault(error_of(TooLong)) or ""
    assert text.startswith("plugin 'too_long', score_rollout: env 'math', group 11: advantages: ")


@pytest.mark.usefixtures("installed")
def test_a_fault_outside_of_the_hooks_is_found_by_its_module() -> None:
    def next_example() -> None:
        raise IndexError("empty")

    with pytest.raises(IndexError) as caught:
        next_example()
    assert (fault(caught.value) or "").startswith("plugin 'mine' (my-dist 0.1), test_a_fault_")
    assert (fault(caught.value) or "").splitlines()[0].endswith("IndexError: empty")


def test_an_error_of_core_is_nobodys() -> None:
    with pytest.raises(PluginError) as caught:
        ReadOnly(a=1.0)["b"] = 2.0
    assert fault(caught.value) is None


def test_metrics_that_a_plugin_gets_are_read_only() -> None:
    metrics = ReadOnly(a=1.0)
    for change in (lambda: metrics.update(b=2.0), lambda: metrics.setdefault("b", 2.0)):
        with pytest.raises(PluginError, match=r"log_metric"):
            change()
    assert metrics | {"b": 2.0} == {"a": 1.0, "b": 2.0} and dict(metrics) == {"a": 1.0}


@pytest.mark.parametrize("stream", ["advantages", "returns"])
def test_batch_packed_may_not_replace_a_stream(stream: str) -> None:
    class Rebinds:
        @hookimpl
        def batch_packed(self, samples: Any) -> None:
            samples[1].set_stream(stream, np.zeros(len(samples[1]), np.float32))

    samples = [make_sample(), make_sample()]
    hooks = Hooks()
    hooks.batch_packed(1, samples)
    hooks.register(Rebinds(), "rebinds")
    with pytest.raises(PluginError, match=f"step 7: batch_packed of rebinds replaced {stream} of"):
        hooks.batch_packed(7, samples)
