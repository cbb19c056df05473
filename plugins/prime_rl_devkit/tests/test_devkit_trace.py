"""``PRIME_RL_TRACE=1`` says who was called, for whom, and for how long."""

import asyncio
import os
import re

import pytest

from prime_rl import Algorithm, PluginConfig, PluginError, hookimpl
from prime_rl.registry.manager import Hooks, scope
from prime_rl.testing import make_group, make_rollout
from prime_rl_devkit import trace


class Slow(Algorithm):
    name = "slow"

    @hookimpl
    async def score_group(self, group):
        await asyncio.sleep(0.01)
        for rollout in group:
            rollout.assign_advantages(rollout.reward)

    @hookimpl
    def score_rollout(self, rollout):
        raise KeyError("judge")


class Clip:
    @hookimpl(wrapper=True)
    def score_group(self, group):
        result = yield
        for rollout in group:
            rollout.assign_advantages(0.5)
        return result


def env_hooks():
    shared = Hooks()
    shared.register(Clip(), "clip")
    return scope("math", shared, [Slow(PluginConfig())])


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_each_call_is_a_line_with_plugin_scope_and_time(monkeypatch, capsys):
    monkeypatch.setenv("PRIME_RL_TRACE", "1")
    group = make_group([1.0])
    asyncio.run(env_hooks().score_group(group))
    inner, outer = lines(capsys)
    pid = os.getpid()
    found = re.fullmatch(rf"\[hook {pid}\] score_group 'math' slow (\d+\.\d+) ms", inner)
    assert found and float(found[1]) >= 9, "the wait belongs to the call"
    wraps = re.fullmatch(rf"\[hook {pid}\] score_group 'math' clip (\d+\.\d+) ms \(wraps\)", outer)
    assert wraps and float(wraps[1]) >= float(found[1]), "a wrapper's time holds what it wraps"
    assert group[0].advantages[0] == 0.5, "tracing changes nothing"


def test_a_call_that_raises_is_printed_and_the_error_propagates(monkeypatch, capsys):
    monkeypatch.setenv("PRIME_RL_TRACE", "1")
    with pytest.raises(KeyError, match="judge"):
        asyncio.run(env_hooks().score_rollout(make_rollout()))
    (line,) = lines(capsys)
    assert line.endswith(" ms raised KeyError")


def test_shared_hooks_have_no_scope(monkeypatch, capsys):
    class Watch:
        @hookimpl
        def step_finished(self, step): ...

    monkeypatch.setenv("PRIME_RL_TRACE", "1")
    hooks = Hooks()
    hooks.register(Watch(), "watch")
    hooks.step_finished(1, {})
    (line,) = lines(capsys)
    assert re.search(r"\] step_finished watch \d", line)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_means_that_functions_are_unwrapped(monkeypatch, capsys, value):
    if value is None:
        monkeypatch.delenv("PRIME_RL_TRACE", raising=False)
    else:
        monkeypatch.setenv("PRIME_RL_TRACE", value)
    hooks = env_hooks()
    asyncio.run(hooks.score_group(make_group([1.0])))
    assert lines(capsys) == []
    impls = hooks.hook.score_group.get_hookimpls()
    assert {impl.function.__func__ for impl in impls} == {Slow.score_group, Clip.score_group}


def test_without_a_tracer_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("PRIME_RL_TRACE", "1")
    monkeypatch.setattr("prime_rl.registry.manager.entries", lambda group: ())
    with pytest.raises(PluginError, match="PRIME_RL_TRACE is set, and no tracer is installed"):
        Hooks().register(Clip(), "clip")


def test_a_call_that_has_not_returned_is_printed_again_and_again(monkeypatch, capsys):
    monkeypatch.setattr(trace, "_watch", lambda: None)  # the thread has a clock of its own
    with trace._timed(lambda seconds, outcome: print(seconds, outcome)):
        (call,) = trace.OPEN.values()
        for seconds in (4, 6, 9, 13):  # due after 5, then at twice the time of the last line
            trace.print_overdue(call.started + seconds)
    *overdue, done = capsys.readouterr().out.splitlines()
    assert overdue == ["None  has not returned for 6 s", "None  has not returned for 13 s"]
    assert float(done) >= 0 and not trace.OPEN
