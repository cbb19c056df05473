"""Faults that would be silent in a run: each is refused, with plugin, hook, env and group."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Algorithm, Loss, PluginConfig, PluginError, Source, StreamError, hookimpl
from prime_rl.orchestrator.scoring import open_for_credit, stamp
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.sampler import Sampler
from prime_rl.registry.calls import fault, raise_late
from prime_rl.registry.manager import Hooks, load_plugins, scope
from prime_rl.registry.members import problem_of
from prime_rl.registry.offers import (
    ALGORITHM,
    FILTER,
    LOSS,
    MONITOR,
    OBSERVER,
    SAMPLER,
    SOURCE,
    collect,
    construct,
)
from prime_rl.registry.shared_state import SharedState
from prime_rl.rollout import LATE
from prime_rl.streams import as_credit, as_stream, concatenate
from prime_rl.testing import make_group, make_rollout, make_sample, score, score_batch

WHO = "plugin 'demo' (demo-plugin 1.2)"


class Faulty(Algorithm):
    """Sound; each test plants one fault."""

    name = "faulty"

    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


def fault_of(algorithm: type[Algorithm], *plugins: object) -> str:
    """The line with which a run would end."""
    group = make_group([1.0, 0.5, 0.0])
    for rollout in group:
        rollout.env = "math"
        rollout.group_id = 7
    with pytest.raises((PluginError, StreamError)) as caught:
        score(algorithm(PluginConfig()), group, *plugins)
    return str(fault(caught.value))


# -- members of a group, and samples ---------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.pop(),
        lambda group: group.remove(group[1]),
        lambda group: group.clear(),
        lambda group: group.append(make_rollout()),
        lambda group: group.extend([make_rollout()]),
        lambda group: group.__setitem__(0, make_rollout()),
        lambda group: group.__setitem__(slice(None), group[:1]),
        lambda group: group.__delitem__(0),
        lambda group: group.__iadd__([make_rollout()]),
    ],
)
@pytest.mark.parametrize("hook", ["score_group", "score_batch"])
def test_a_hook_may_not_change_who_is_in_a_group(change, hook):
    class Changes(Faulty):
        @hookimpl
        def score_batch(self, groups):
            if hook == "score_batch":
                change(groups[0])

        @hookimpl
        async def score_group(self, group):
            if hook == "score_group":
                change(group)

    assert re.match(
        rf"plugin 'faulty', {hook}.*env 'math', group 7: the list of a group's members is read",
        fault_of(Changes),
    )


def test_a_sample_in_two_rollouts_of_a_group():
    class Shares(Faulty):
        @hookimpl
        async def score_group(self, group):
            group[2].samples.append(group[0].samples[0])

    said = fault_of(Shares)
    assert said.startswith("plugin 'faulty', score_group: env 'math', group 7: sample 1 is in")
    assert "and in another rollout" in said


def test_a_sample_twice_in_one_rollout():
    class Doubles(Faulty):
        @hookimpl
        async def score_rollout(self, rollout):
            rollout.samples *= 2

    assert "plugin 'faulty', score_rollout: env 'math', group 7: sample 1 is" in fault_of(Doubles)


def test_a_sample_that_an_algorithm_keeps_for_every_group():
    class Keeps(Faulty):
        kept = None

        def __init__(self, config):
            super().__init__(config)
            self.demonstration = make_sample()

        @hookimpl
        async def score_rollout(self, rollout):
            if rollout.reward == 1.0:
                rollout.samples.append(self.demonstration)

    groups = [make_group([1.0, 0.0]), make_group([1.0, 0.0])]
    with pytest.raises(PluginError, match="is in this rollout and in another rollout"):
        score_batch(Keeps(PluginConfig()), groups)


def test_a_copy_of_a_sample_is_a_sample_of_its_own():
    class Copies(Faulty):
        @hookimpl
        async def score_group(self, group):
            for rollout in group:
                rollout.samples.append(replace(group[0].samples[0], streams={}))
                rollout.assign_advantages(rollout.reward)

    score(Copies(PluginConfig()), make_group([1.0, 0.0]))


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
def test_a_sample_that_is_removed(hook):
    class Removes(Faulty):
        @hookimpl
        async def score_rollout(self, rollout):
            if hook == "score_rollout":
                rollout.samples = []

        @hookimpl
        async def score_group(self, group):
            if hook == "score_group":
                group[1].samples.pop()

    assert f"'faulty', {hook}: env 'math', group 7: sample 0 was removed" in fault_of(Removes)


def test_a_wrapper_is_named_for_what_it_does_after_its_yield():
    class Wraps:
        name = "wraps"

        @hookimpl(wrapper=True)
        def score_group(self, group):
            result = yield
            group[0].samples.append(group[1].samples[0])
            return result

    assert fault_of(Faulty, Wraps()).startswith("plugin 'wraps', score_group: env 'math', group 7:")


# -- work that nothing awaits ----------------------------------------------------------------------


def later(kind: str) -> type[Algorithm]:
    class Later(Faulty):
        tasks: tuple = ()

        async def write(self, group):
            await asyncio.sleep(0)
            for rollout in group:
                rollout.assign_advantages(2.0)

        @hookimpl
        async def score_group(self, group):
            loop = asyncio.get_running_loop()
            if kind == "task":
                self.task = asyncio.create_task(self.write(group))
            elif kind == "future":
                self.task = asyncio.ensure_future(self.write(group))
            elif kind == "callback":
                loop.call_soon(functools.partial(group[0].assign_advantages, 1.0))
            elif kind == "executor":
                self.task = loop.run_in_executor(None, self.slow, group)
            elif kind == "thread":
                await super().score_group(group)
                self.done = threading.Event()
                self.thread = threading.Thread(target=self.slow, args=(group,))
                self.thread.start()

        def slow(self, group):
            while group[0].open:
                pass
            with pytest.raises(StreamError):
                group[0].assign_advantages(1.0)

        async def close(self):
            if kind == "thread":
                self.thread.join()

    return Later


@pytest.mark.parametrize("kind", ["task", "future"])
def test_credit_from_a_task_that_the_hook_has_left_behind(kind):
    said = fault_of(later(kind))
    assert said.startswith(
        "plugin 'faulty', score_group: env 'math', group 7: advantages were written outside of a "
        "scoring hook"
    )


def test_credit_from_a_thread_that_the_hook_has_left_behind():
    LATE.clear()
    group = make_group([1.0])
    algorithm = later("thread")(PluginConfig())
    hooks = scope("test", Hooks(), [algorithm])

    async def run():
        with open_for_credit(group):
            await hooks.score_group(group)
        await asyncio.to_thread(algorithm.thread.join)

    asyncio.run(run())
    with pytest.raises(StreamError, match="advantages were written outside of a scoring hook"):
        raise_late()
    raise_late()  # once


@pytest.mark.parametrize("kind", ["executor", "thread", "pool"])
def test_credit_from_a_thread_without_the_hooks_context_is_refused_before_the_hook_ends(kind):
    """Also where the hook waits: core cannot see that it does."""

    class Threads(Faulty):
        @hookimpl
        async def score_group(self, group):
            await super().score_group(group)
            write = quietly(group[0].assign_advantages)
            if kind == "executor":
                await asyncio.get_running_loop().run_in_executor(None, write, 1.0)
            elif kind == "thread":
                thread = threading.Thread(target=write, args=(1.0,))
                thread.start()
                thread.join()
            else:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(write, 1.0).result()

    with pytest.raises(StreamError, match="group 0: advantages were written in a thread that no h"):
        score(Threads(PluginConfig()), make_group([1.0, 0.5]))


def quietly(write):
    def call(*arguments):
        with contextlib.suppress(StreamError):
            write(*arguments)

    return call


def test_a_thread_that_the_hook_awaits_by_to_thread_may_write():
    class Threads(Faulty):
        def write(self, group):
            for rollout in group:
                rollout.assign_advantages(rollout.reward)

        @hookimpl
        async def score_group(self, group):
            await asyncio.to_thread(self.write, group)

    group = make_group([1.0, 0.5])
    score(Threads(PluginConfig()), group)
    assert [rollout.advantages[0] for rollout in group] == [1.0, 0.5]

    # Between runs of the hooks, rollouts are the test's own.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(group[0].assign_advantages, 2.0).result()
    assert group[0].advantages[0] == 2.0


def test_tasks_that_the_hook_awaits_may_write():
    class Gathers(Faulty):
        async def write(self, rollout):
            await asyncio.sleep(0)
            rollout.assign_advantages(rollout.reward)

        @hookimpl
        async def score_group(self, group):
            await asyncio.gather(*map(self.write, group))

    group = make_group([1.0, 0.5])
    score(Gathers(PluginConfig()), group)
    assert [rollout.advantages[0] for rollout in group] == [1.0, 0.5]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("writes", [1, 3])
def test_a_task_that_fails_in_the_middle_of_its_credit(writes, keeps):
    """It ends before the hook does, which does not await it."""

    class Fails(Faulty):
        async def write(self, group):
            for number, rollout in enumerate(group, 1):
                rollout.assign_advantages(rollout.reward)
                if number == writes:
                    raise KeyError("score of the judge")

        @hookimpl
        async def score_group(self, group):
            await super().score_group(group)
            task = asyncio.create_task(self.write(group))
            self.kept = task if keeps else None
            await asyncio.wait({task})

    said = fault_of(Fails)
    assert said.startswith("plugin 'faulty', score_group, env 'math', group 7: a task that writes")
    assert "KeyError: 'score of the judge'" in said


@pytest.mark.parametrize("way", ["caught", "gathered", "asked"])
def test_a_task_whose_error_the_hook_has_seen_may_fail(way):
    class Retries(Faulty):
        async def write(self, group):
            group[0].assign_advantages(1.0)
            raise KeyError

        @hookimpl
        async def score_group(self, group):
            task = asyncio.create_task(self.write(group))
            if way == "caught":
                with pytest.raises(KeyError):
                    await task
            elif way == "gathered":
                await asyncio.gather(task, return_exceptions=True)
            else:
                await asyncio.wait({task})
                assert task.exception()
            await super().score_group(group)

    group = make_group([1.0, 0.5])
    score(Retries(PluginConfig()), group)
    assert [rollout.advantages[0] for rollout in group] == [1.0, 0.5]


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_coroutine_that_was_never_awaited(word):
    scope_of = {"Faulty": Faulty, "hookimpl": hookimpl, "__name__": __name__}
    exec(
        "class Forgets(Faulty):\n"
        "    async def write(self, group): ...\n"
        f"    @hookimpl\n    {word} score_group(self, group):\n"
        "        self.write(group)\n",
        scope_of,
    )
    said = fault_of(scope_of["Forgets"])
    assert said.startswith("plugin 'faulty', score_group, env 'math', group 7: the coroutine")
    assert "Forgets.write() was never awaited" in said


# -- errors that do not come through ---------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, None, "bye"])
@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
def test_an_exit_in_a_hook_is_an_error_of_the_plugin(code, hook):
    class Exits(Faulty):
        @hookimpl
        async def score_rollout(self, rollout):
            if hook == "score_rollout":
                raise SystemExit(code)

        @hookimpl
        def score_group(self, group):
            raise SystemExit(code)

    assert fault_of(Exits).startswith(
        f"plugin 'faulty', {hook}, env 'math', group 7: it raised SystemExit({code!r})"
    )


class Panic(BaseException):
    """As ``pyo3_runtime.PanicException``, which libraries in Rust raise."""


@pytest.mark.parametrize(
    ("error", "is_async"),
    # Of a StopIteration in an ``async def`` Python makes a RuntimeError with its traceback.
    [
        (StopIteration, False),
        (StopAsyncIteration, False),
        (StopAsyncIteration, True),
        (Panic, False),
        (Panic, True),
    ],
)
def test_an_error_that_python_itself_would_take_for_another_names_its_hook(error, is_async):
    class Sync(Faulty):
        @hookimpl
        def score_group(self, group):
            raise error

    class Async(Faulty):
        @hookimpl
        async def score_group(self, group):
            raise error

    said = fault_of(Async if is_async else Sync)
    assert said.startswith("plugin 'faulty', score_group, env 'math', group 7: ")
    assert error.__name__ in said


def test_a_wrapper_that_swallows_is_named_with_what_it_swallowed():
    class Fails(Faulty):
        @hookimpl
        async def score_group(self, group):
            raise KeyError("x")

    class Swallows:
        name = "swallows"

        @hookimpl(wrapper=True)
        def score_group(self, group):
            try:
                return (yield)
            except Exception:
                return None

    said = fault_of(Fails, Swallows())
    assert said.startswith("plugin 'swallows', score_group, env 'math', group 7: this wrapper")
    assert "plugin 'faulty', score_group, env 'math', group 7: KeyError: 'x'" in said


def test_a_sync_wrapper_that_swallows():
    class Fails:
        name = "fails"

        @hookimpl
        def filter_rollout(self, rollout):
            raise KeyError("x")

    class Swallows:
        name = "swallows"

        @hookimpl(wrapper=True)
        def filter_rollout(self, rollout):
            try:
                return (yield)
            except KeyError:
                return []

    hooks = scope("slot", Hooks(), [Fails(), Swallows()])
    rollout = make_rollout(env="math")
    with pytest.raises(PluginError, match="swallowed the error of what it wraps"):
        hooks.hook.filter_rollout(rollout=rollout, group=[rollout])


@pytest.mark.parametrize("value", ["0.5", None, [1.0], {"a": 1.0}])
def test_a_metric_of_a_rollout_that_is_no_number(value):
    class Texts(Faulty):
        @hookimpl
        async def score_rollout(self, rollout):
            rollout.metrics["verdict"] = value

    said = fault_of(Texts)
    assert said.startswith("plugin 'faulty', score_rollout: env 'math', group 7: rollout.metrics[")
    assert repr(value) in said


# -- state of a class ------------------------------------------------------------------------------


class OnClass(Faulty):
    name = "on_class"
    history: list = []
    mean = 0.0
    stats = type("Stats", (), {"n": 0})()
    array = np.zeros(2)


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        ("history", lambda cls: cls.history.append(1.0)),
        ("mean", lambda cls: setattr(cls, "mean", 0.5)),
        ("new", lambda cls: setattr(cls, "new", 0.5)),
        ("stats", lambda cls: setattr(cls.stats, "n", cls.stats.n + 1)),
        ("array", lambda cls: cls.array.__iadd__(1.0)),
    ],
)
def test_state_on_a_class_that_two_envs_share(attribute, change):
    mine = type("Mine", (OnClass,), {"history": [], "array": np.zeros(2)})
    algorithms = {"math": mine(PluginConfig()), "code": mine(PluginConfig())}
    state = SharedState(algorithms)
    arguments = {"group": make_group([1.0])}
    state.check("math", "score_group", arguments)
    change(mine)
    with pytest.raises(PluginError, match=rf"\.{attribute} has changed .* 'math' and 'code'"):
        state.check("math", "score_group", arguments)


@pytest.mark.parametrize("name", ["seen", "by_name", "static", "of_class", "wrapped"])
def test_a_default_argument_that_two_envs_share(name):
    def noted(method):
        @functools.wraps(method)
        def run(self):
            return method(self)

        return run

    class Defaults(Faulty):
        def seen(self, rewards=[]):  # noqa: B006
            rewards.append(1.0)

        def by_name(self, *, rewards={}):  # noqa: B006
            rewards["a"] = 1.0

        @staticmethod
        def static(rewards=[]):  # noqa: B006
            rewards.append(1.0)

        @classmethod
        def of_class(cls, rewards=OnClass.stats):
            rewards.n += 1

        @noted
        def wrapped(self, rewards=set()):  # noqa: B006
            rewards.add(1.0)

        @hookimpl
        def sound(self, marker=object(), rewards=[]):  # noqa: B006, B008
            return [*rewards, 1.0]

    math, code = Defaults(PluginConfig()), Defaults(PluginConfig())
    state = SharedState({"math": math, "code": code})
    math.sound()
    arguments = {"group": make_group([1.0])}
    state.check("math", "score_group", arguments)
    getattr(math, name)()
    said = rf"a default argument of .*Defaults\.{name} has changed .* 'math' and 'code'"
    with pytest.raises(PluginError, match=said):
        state.check("math", "score_group", arguments)


def test_state_on_a_class_of_one_env_and_state_of_an_instance_pass():
    mine = type("Mine", (OnClass,), {"history": []})
    other = type("Other", (Faulty,), {})
    algorithms = {"math": mine(PluginConfig()), "code": other(PluginConfig())}
    state = SharedState(algorithms)
    mine.history.append(1.0)
    algorithms["math"].own = 1.0
    state.check("math", "score_group", {})


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (2**31, "integer 2147483648, which int32 cannot hold"),
        ([0, -(2**31), 1], "integer -2147483648, which int32"),
        ([1, 2**63], "integer 9223372036854775808, which int32"),
        (2**70, "int32 cannot hold"),
        (np.uint64(2**40), "int32 cannot hold"),
        (1 + 2j, "complex numbers"),
        (np.array([1 + 0j]), "complex numbers"),
        ("1.5", "text"),
        (["1", "2"], "text"),
        ([b"1"], "bytes"),
        ([None, 1.0], "None, expected real numbers"),
        (np.array(["2026-01-01"], "datetime64[D]"), "dates"),
        (1e39, "inf"),
    ],
)
def test_a_stream_keeps_numbers_and_refuses_what_it_would_have_to_cast(values, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        as_stream(values)


@pytest.mark.parametrize("number", [2**24 + 1, -(2**24) - 1, 2**31 - 1])
def test_credit_refuses_integers_beyond_float32(number):
    with pytest.raises(ValueError, match=f"integer {number}, which float32 cannot hold exactly"):
        as_credit([number])
    assert as_stream([number]).tolist() == [number]


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5))
def test_an_integer_arrives_as_it_was_or_not_at_all(numbers):
    for cast in (as_stream, as_credit):
        try:
            assert cast(numbers).astype(np.float64).tolist() == numbers
        except ValueError:
            assert max(map(abs, numbers)) > 2**24


def test_fractions_and_numpy_scalars_are_numbers():
    assert as_stream([Fraction(1, 2), 1]).tolist() == [0.5, 1.0]
    assert as_stream(np.float64(0.5)).tolist() == 0.5
    assert as_stream([True, False]).tolist() == [1, 0]


@pytest.mark.parametrize("credit", [True, np.True_, [True, False, True], np.array([True] * 3)])
def test_bool_is_no_credit(credit):
    with pytest.raises(StreamError, match="env 'test', group 0: advantages: got bool"):
        make_rollout().assign_advantages(credit)
    make_rollout().assign_weights("ce", credit)


def test_a_stream_with_a_method_of_its_own_is_written_by_it():
    with pytest.raises(StreamError, match="Use assign_advantages"):
        make_rollout().assign_stream("advantages", 1.0)


@pytest.mark.parametrize("values", [[-1.0, -2.0, -3.0], [0.0, 0.0, -1.0, -2.0, -3.0]])
def test_a_reference_assigned_as_a_stream_is_checked_as_by_its_own_method(values):
    """Plugins of contract 2 write it so."""
    as_stream, by_method = make_rollout(), make_rollout()
    as_stream.assign_stream("ref_logprobs", values)
    by_method.assign_ref_logprobs(values)
    (one,), (other,) = as_stream.samples, by_method.samples
    assert one.ref_logprobs is not None and other.ref_logprobs is not None
    assert one.ref_logprobs.tolist() == other.ref_logprobs.tolist()
    with pytest.raises(StreamError, match="ref_logprobs: got nan"):
        as_stream.assign_stream("ref_logprobs", [float("nan")] * 3)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (np.zeros(5), "is float64"),
        (np.zeros(5, complex), "is complex128"),
        ([0.0] * 5, "is list"),
        (np.zeros(4, np.float32), r"has the shape \(4,\) for 5 tokens"),
        (np.full(5, np.nan, np.float32), "has the value nan"),
        (np.zeros(5, np.int32), "is int32"),
    ],
)
def test_a_column_that_was_written_past_the_checks(column, says):
    rollout = make_rollout()
    rollout.samples[0].advantages = column
    with pytest.raises(StreamError, match=f"group 0: advantages of sample 0 {says}"):
        stamp(rollout, "rl")


def test_large_integers_beside_fractions_are_not_rounded():
    whole = np.array([2**24 + 1], np.int32)
    half = np.array([0.5], np.float32)
    with pytest.raises(StreamError, match="'x' has integers beyond 16777216 in some samples"):
        concatenate([(1, whole), (1, half)], "x")
    small = concatenate([(1, np.array([3], np.int32)), (1, half)], "x")
    assert small is not None and small.tolist() == [3.0, 0.5]


# -- names that nothing reads, and what a class lacks ----------------------------------------------

KINDS = {
    "Algorithm": ALGORITHM,
    "Filter": FILTER,
    "Loss": LOSS,
    "Monitor": MONITOR,
    "Observer": OBSERVER,
    "Sampler": SAMPLER,
    "Source": SOURCE,
}
COMPLETE = {
    "Filter": "    @hookimpl\n    def filter_rollout(self): ...\n",
    "Monitor": "    def log(self, step, metrics): ...\n",
    "Sampler": "    def next_example(self): ...\n",
    "Source": "    async def group(self, request): ...\n    num_examples = None\n",
}


def refused(install, base: str, body: str, complete: bool = True) -> str:
    group = "prime_rl.trainer" if base == "Loss" else "prime_rl"
    kind = KINDS[base]
    install(
        f"from prime_rl import {base}\n"
        f"class Mine({base}):\n    name = 'mine'\n    {body}\n"
        + (COMPLETE.get(base, "") if complete else "")
        + f"@hookimpl\ndef {kind.hook}(): return [Mine]\n",
        group=group,
    )
    with pytest.raises(PluginError) as caught:
        collect(load_plugins(group), kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "body", "meant"),
    [
        ("Observer", "def step_traned(self, step, metrics): ...", "step_trained"),
        ("Observer", "async def before_trainig(self): ...", "before_training"),
        ("Observer", "def rollout_lost(self, env, outcome, number): ...", "rollouts_lost"),
        ("Observer", "async def batches_taken(self, batch): ...", "batch_taken"),
        ("Loss", "normalise_by = 'sequences'", "normalize_by"),
        ("Loss", "read = ('advantages',)", "reads"),
        ("Loss", "compare_with_sampler = False", "compares_with_sampler"),
        ("Algorithm", "needs_temprature = 1.0", "needs_temperature"),
        ("Algorithm", "action_los = 'ce'", "action_loss"),
        ("Algorithm", "need_heads = ('values',)", "needs_heads"),
        ("Algorithm", "group_relativ: bool = True", "group_relative"),
        ("Algorithm", "config_clas = PluginConfig", "config_class"),
        ("Algorithm", "@property\n    def action_los(self): return 'ce'", "action_loss"),
        ("Algorithm", "async def score_groups(self, group): ...", "score_group"),
        ("Algorithm", "async def set_up(self, host): ...", "setup"),
        ("Monitor", "def log_rollout(self, step, rollouts, dropped): ...", "log_rollouts"),
        ("Sampler", "def observes(self, group): ...", "observe"),
        ("Source", "isready = True", "is_ready"),
        ("Loss", "scope = 'tokens'", "token"),
        ("Loss", "normalize_by = 'token'", "tokens"),
    ],
)
def test_a_member_that_looks_like_one_of_the_base_class(install, base, body, meant):
    said = refused(install, base, body)
    assert said.startswith(f"{WHO}: Mine.") and f"did you mean {meant!r}?" in said


@pytest.mark.parametrize(
    ("base", "body", "lacks"),
    [
        ("Sampler", "pass", "has no next_example, which core calls on every Sampler"),
        ("Monitor", "pass", "has no log, which core calls on every Monitor"),
        ("Filter", "pass", "filter 'mine' has no filter_rollout"),
    ],
)
def test_a_class_without_what_core_calls(install, base, body, lacks):
    said = refused(install, base, body, complete=False)
    assert said.startswith(f"{WHO}: ") and lacks in said


@pytest.mark.parametrize(
    ("base", "method"),
    [
        ("Algorithm", "setup(self, host)"),
        ("Algorithm", "close(self)"),
        ("Observer", "setup(self)"),
        ("Observer", "run(self)"),
        ("Observer", "batch_taken(self, batch)"),
        ("Source", "setup(self, host)"),
    ],
)
def test_a_plain_method_that_core_awaits(install, base, method):
    said = refused(install, base, f"def {method}: ...")
    name = method.partition("(")[0]
    assert said.startswith(f"{WHO}: Mine.{name} is a plain 'def' and core awaits it.")


def test_a_decorated_async_method_is_one(install):
    install(
        "import functools\n"
        "def retried(f):\n"
        "    @functools.wraps(f)\n    def call(*a): return f(*a)\n    return call\n"
        "class Mine(Algorithm):\n    name = 'mine'\n"
        "    @retried\n    async def setup(self, host): ...\n"
        "@hookimpl\ndef register_algorithms(): return [Mine]\n"
    )
    assert "mine" in collect(load_plugins(), ALGORITHM)


@pytest.mark.parametrize("name", ["Faulty Algo!", "a b", "-x", "a/b/", "ü", "x\n", "a=b", ""])
def test_a_name_that_no_toml_key_or_metric_can_be(install, name):
    body = f"pass\n    name = {name!r}"
    assert "name" in refused(install, "Algorithm", body)


@pytest.mark.parametrize("name", ["grpo", "deepseek-r1", "glm-4.5", "Mine_2"])
def test_a_name_of_letters_digits_and_marks(install, name):
    install(
        f"class Mine(Algorithm):\n    name = {name!r}\n"
        "@hookimpl\ndef register_algorithms(): return [Mine]\n"
    )
    assert name in collect(load_plugins(), ALGORITHM)


def test_a_text_where_names_are_expected(install):
    assert "Mine.needs_heads is 'values', expected a tuple of names" in refused(
        install, "Algorithm", "needs_heads = 'values'"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("action_loss = 3", "Mine.action_loss is 3, expected a text"),
        ("action_loss = None", "Mine.action_loss is None, expected a text"),
        ("losses = 3", "Mine.losses is 3, expected a tuple of names"),
        ("needs_heads = True", "Mine.needs_heads is True, expected a tuple of names"),
    ],
)
def test_a_value_of_another_sort(install, line, said):
    assert said in refused(install, "Algorithm", line)


@pytest.mark.parametrize("decorator", ["property", "functools.cached_property"])
@pytest.mark.parametrize("name", ["action_loss", "losses", "needs_initial"])
def test_a_property_may_decide_for_each_instance(install, name, decorator):
    value = {"action_loss": "'rl'", "losses": "('rl',)", "needs_initial": "False"}[name]
    install(
        "import functools\nclass Mine(Algorithm):\n    name = 'mine'\n"
        f"    @{decorator}\n    def {name}(self): return {value}\n"
        "@hookimpl\ndef register_algorithms(): return [Mine]\n"
    )
    assert "mine" in collect(load_plugins(), ALGORITHM)


def test_two_classes_of_one_plugin_share_a_name(install):
    install(
        "class One(Algorithm):\n    name = 'faulty'\n"
        "class Two(Algorithm):\n    name = 'faulty'\n"
        "@hookimpl\ndef register_algorithms(): return [One, Two]\n"
    )
    with pytest.raises(PluginError) as caught:
        collect(load_plugins(), ALGORITHM)
    assert str(caught.value) == (
        f"{WHO} registers two algorithms 'faulty': demo_plugin.One and demo_plugin.Two. Give each "
        "class a 'name' of its own."
    )


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("async def score_grup(group): ...", "score_group"),
        ("def filter_rollouts(rollout, group): ...", "filter_rollout"),
        ("def register_algorithm(): return []", "register_algorithms"),
        ("prime_rl_contact = 1", "prime_rl_contract"),
    ],
)
def test_a_module_with_a_name_that_looks_like_a_hook(install, source, meant):
    install(source)
    with pytest.raises(PluginError, match=f"did you mean '{meant}'"):
        load_plugins()


def test_a_helper_that_takes_something_else_is_a_helper(install):
    install("def score_groups(rewards): ...\ndef _score_grup(group): ...")
    assert "demo" in load_plugins().sources


@pytest.mark.parametrize(
    ("base", "body", "said"),
    [
        ("Loss", "scope = 'batch'", "scope is 'batch', expected one of 'token', 'sequence', "),
        ("Algorithm", "group_relative = 'no'", "group_relative is the text 'no', expected bool"),
        ("Algorithm", "needs_temperature = '1.0'", "the text '1.0', expected float or None"),
        ("Algorithm", "trains_at_most = '1'", "the text '1', expected int or None"),
    ],
)
def test_a_declaration_that_has_another_value_than_declared(install, base, body, said):
    found = refused(install, base, body)
    assert found.startswith(f"{WHO}: Mine.") and said in found


def test_a_loss_without_its_call_is_refused_when_it_is_made():
    class Forwards(Loss):
        name = "forwards"

        def forward(self, inputs): ...

    with pytest.raises(PluginError, match="Forwards has no __call__, which core calls on every Lo"):
        construct(Forwards, PluginConfig())


def test_a_hook_that_nobody_has_cancelled_is_named_where_what_it_awaits_was():
    class Cancels(Faulty):
        @hookimpl
        async def score_group(self, group):
            judge = asyncio.ensure_future(asyncio.sleep(10))
            judge.cancel()
            await judge

    assert fault_of(Cancels).startswith(
        "plugin 'faulty', score_group, env 'math', group 7: it raised CancelledError, and nothing "
    )


def test_a_hook_that_is_cancelled_stays_cancelled():
    class Waits(Faulty):
        @hookimpl
        async def score_group(self, group):
            await asyncio.sleep(60)

    async def cancel() -> None:
        hooks = scope("math", Hooks(), own=[Waits(PluginConfig())])
        task = asyncio.ensure_future(hooks.score_group(make_group([1.0])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_an_attribute_of_an_instance_that_looks_like_one_of_the_contract():
    class Sets(Faulty):
        def __init__(self, config):
            super().__init__(config)
            self.action_los = "ce"

    with pytest.raises(PluginError, match=r"self.action_los is read by nothing; did you mean 'act"):
        construct(Sets, PluginConfig())


@pytest.mark.parametrize(
    ("body", "lacks"),
    [
        ({"num_examples": None}, "Mine has no group, which core calls on every Source"),
        ({"group": None}, "Mine has no num_examples"),
    ],
)
def test_a_source_without_what_core_calls_is_refused_when_it_is_made(body, lacks):
    mine = type("Mine", (Source,), {"name": "mine", **body})
    with pytest.raises(PluginError, match=f"plugin 'mine', __init__: {lacks}"):
        construct(mine, PluginConfig())


def lacks_host():
    class Mine(Algorithm):
        name = "mine"

        async def setup(self):
            pass

    return Mine, Algorithm


def takes_more():
    class Mine(Sampler):
        name = "mine"

        def observe(self, group, version):
            pass

    return Mine, Sampler


def other_keyword():
    class Mine(Observer):
        name = "mine"

        def rollouts_lost(self, env, *, outcome, number):
            pass

    return Mine, Observer


@pytest.mark.parametrize("made", [lacks_host, takes_more, other_keyword])
def test_a_method_that_cannot_take_what_core_calls_it_with(made):
    cls, base = made()
    said = problem_of(cls, base, hooks=())
    assert "does not take what core calls it with" in said
    assert "Write it as " in said and "def " in said


def plain(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Called:
    def __call__(self, group):
        pass


@pytest.mark.parametrize(
    "observe",
    [
        plain(lambda self, group: None),
        functools.wraps(print)(lambda self, group: None),
        lambda *args: None,
        Mock(),
        Called(),
        functools.partial(lambda x, group: None, 1),
        functools.partialmethod(lambda self, x, group: None, 1),
        functools.lru_cache(lambda self, group: None),
        staticmethod(lambda group: None),
        print,
        property(lambda self: print),
    ],
    ids=lambda made: type(made).__name__,
)
def test_a_method_that_may_take_anything_is_not_refused(observe):
    mine = type("Mine", (Sampler,), {"name": "mine", "observe": observe})
    assert problem_of(mine, Sampler, hooks=()) == ""


@pytest.mark.parametrize(
    "observe",
    [lambda self: None, staticmethod(lambda: None), staticmethod(lambda a, b: None)],
    ids=["method", "static, none", "static, two"],
)
def test_one_that_cannot_is(observe):
    mine = type("Mine", (Sampler,), {"name": "mine", "observe": observe})
    assert "Mine.observe does not take" in problem_of(mine, Sampler, hooks=())


def test_methods_may_name_their_arguments_otherwise_and_take_more_with_a_default():
    class Mine(Observer):
        name = "mine"

        async def setup(self, *args):
            pass

        def rollouts_lost(self, environment, why, how_many=1, *, note=None):
            pass

        @classmethod
        def check(cls, *args, **kwargs):
            pass

    assert problem_of(Mine, Observer, hooks=()) == ""
