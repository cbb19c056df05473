"""Three useful wrappers, and the fault of a naive one around an async hook."""

import asyncio
import time

import numpy as np
import pluggy
import pytest
from waiting import Clock, skipping

from prime_rl import Algorithm, FrozenModel, PluginConfig, PluginError, StreamError, hookimpl
from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import PROJECT
from prime_rl.registry.manager import Hooks, scope
from prime_rl.testing import FakeHost, FakeReference, make_group, score


class Centred(Algorithm):
    """Credit is the reward above the mean, after waiting: as with a judge or a pool of workers."""

    name = "centred"
    group_relative = True

    @hookimpl
    async def score_group(self, group):
        await asyncio.sleep(0)
        first = group[0].reward
        mean = np.mean([rollout.reward - first for rollout in group])
        for rollout in group:
            rollout.assign_advantages(rollout.reward - first - mean)


class Distils(Algorithm):
    """Credit comes from a teacher."""

    name = "distils"
    action_loss = "ref_kl"

    async def setup(self, host):
        self.teacher = host.connect(FrozenModel(name="t", base_url=("http://127.0.0.1:1/v1",)))

    @hookimpl
    async def score_rollout(self, rollout):
        columns = [await self.teacher.logprobs(sample.token_ids) for sample in rollout.samples]
        rollout.assign_ref_logprobs(np.concatenate(columns))


def credit(group):
    return [float(rollout.advantages[0]) for rollout in group]


# -- 1: clip credit --------------------------------------------------------------------------------


class ClipCredit:
    """Clips the credit of any algorithm."""

    limit = 0.25

    @hookimpl(wrapper=True)
    def score_group(self, group):
        result = yield  # the algorithm runs here, and has finished when this goes on
        for rollout in group:
            if rollout.advantages is not None:  # opd, opsd and sft give none
                rollout.assign_advantages(np.clip(rollout.advantages, -self.limit, self.limit))
        return result


def test_credit_is_clipped_whatever_the_algorithm():
    group = make_group([1.0, 0.0, 0.5])
    score(Centred(PluginConfig()), group, ClipCredit())
    assert credit(group) == [0.25, -0.25, 0.0]


def test_an_algorithm_without_credit_passes_through_the_clip():
    group = make_group([1.0])
    score(Distils(PluginConfig()), group, ClipCredit())
    assert group[0].advantages is None and group[0].samples[0].ref_logprobs is not None


# -- 2: cache a teacher ----------------------------------------------------------------------------


class Cached:
    """A reference model that asks for each token sequence once.

    The answer that is awaited is kept, not the one that came: two rollouts that arrive together
    with the same tokens share one request.
    """

    def __init__(self, model):
        self.model = model
        self.answers = {}

    async def logprobs(self, token_ids, *, group_id=0):
        key = tuple(int(token) for token in token_ids)
        if key not in self.answers:
            request = self.model.logprobs(token_ids, group_id=group_id)
            self.answers[key] = asyncio.ensure_future(request)
        return await asyncio.shield(self.answers[key])


class CachingHost:
    """Lends what another host lends, with a cache in front of every frozen model.

    A wrapper cannot keep the algorithm from running, so a cache goes below it, not around it.
    """

    def __init__(self, host):
        self.host = host

    def __getattr__(self, name):
        return getattr(self.host, name)

    def connect(self, model):
        return Cached(self.host.connect(model))


class DistilsCached(Distils):
    """Any algorithm that connects a teacher, asking it once for each token sequence."""

    name = "distils_cached"

    async def setup(self, host):
        await super().setup(CachingHost(host))


def test_equal_rollouts_cost_one_request_and_score_the_same():
    host, group, plain = FakeHost(), make_group([1.0, 0.0, 0.5]), make_group([1.0, 0.0, 0.5])
    score(DistilsCached(PluginConfig()), group, host=host)
    score(Distils(PluginConfig()), plain)
    assert len(host.frozen.asked) == 1
    for cached, asked in zip(group, plain, strict=True):
        ours, theirs = (each.samples[0].ref_logprobs for each in (cached, asked))
        np.testing.assert_array_equal(ours, theirs)


def test_rollouts_that_arrive_together_share_the_request_too():
    model = FakeReference()
    cached = Cached(model)

    async def together():
        return await asyncio.gather(*(cached.logprobs([1, 2, 3]) for _ in range(4)))

    answers = asyncio.run(together())
    assert len(model.asked) == 1
    assert [answer.tolist() for answer in answers] == [[0.0, -0.5, -0.5]] * 4


# -- 3: time the hooks -----------------------------------------------------------------------------


class Stopwatch:
    """Seconds a rollout's and a group's scoring take, model I/O included."""

    def __init__(self, clock=time):
        self.seconds = {"score_rollout": [], "score_group": []}
        self.clock = clock

    @hookimpl(wrapper=True, tryfirst=True)
    def score_rollout(self, rollout):
        start = self.clock.perf_counter()
        try:
            return (yield)
        finally:  # also when scoring fails
            self.seconds["score_rollout"].append(self.clock.perf_counter() - start)

    @hookimpl(wrapper=True, tryfirst=True)
    def score_group(self, group):
        start = self.clock.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds["score_group"].append(self.clock.perf_counter() - start)


class Slow(Centred):
    @hookimpl
    async def score_rollout(self, rollout):
        await asyncio.sleep(0.02)
        if rollout.reward < 0:
            raise StreamError("a judge said no")


def test_the_time_of_an_async_hook_is_the_time_until_it_is_done():
    watch = Stopwatch()
    score(Slow(PluginConfig()), make_group([1.0, 0.0]), watch)
    assert [len(each) for each in watch.seconds.values()] == [2, 1]
    assert min(watch.seconds["score_rollout"]) >= 0.015


def test_a_failure_is_timed_and_raised():
    watch = Stopwatch()
    with pytest.raises(StreamError, match="a judge said no"):
        score(Slow(PluginConfig()), make_group([-1.0]), watch)
    assert len(watch.seconds["score_rollout"]) == 1


# -- together --------------------------------------------------------------------------------------


def test_wrappers_of_two_packages_nest():
    watch, group = Stopwatch(), make_group([1.0, 0.0])
    score(Centred(PluginConfig()), group, ClipCredit(), watch)
    assert credit(group) == [0.25, -0.25]
    assert len(watch.seconds["score_group"]) == 1


# -- what a naive wrapper gets wrong ---------------------------------------------------------------


def plain_pluggy(*plugins):
    """pluggy's own manager, as most projects use it: ``await asyncio.gather(*hook(...))``."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        manager.register(plugin)
    return manager


def test_under_plain_pluggy_the_wrapper_ends_before_the_hook_runs():
    """There the hook call only makes coroutines: what follows the ``yield`` sees no credit yet, so
    a clip clips nothing, a stopwatch reads nothing, and both in silence."""
    clock = Clock()
    seen, watch = [], Stopwatch(clock)

    class Watch:
        @hookimpl(wrapper=True)
        def score_group(self, group):
            result = yield
            seen.append([rollout.advantages for rollout in group])
            return result

    group = make_group([1.0, 0.0])

    async def naive():
        manager = plain_pluggy(Slow(PluginConfig()), ClipCredit(), Watch(), watch)
        await asyncio.gather(*manager.hook.score_rollout(rollout=group[0]))
        await asyncio.gather(*manager.hook.score_group(group=group))

    skipping(clock, naive)
    assert seen == [[None, None]], "nothing had been scored"
    assert credit(group) == [0.5, -0.5], "and nothing was clipped"
    assert watch.seconds["score_rollout"] == [0.0], "20 ms of waiting were not seen"


def test_ours_continues_after_the_yield_when_the_work_is_done():
    seen = []

    class Watch:
        @hookimpl(wrapper=True)
        def score_group(self, group):
            result = yield
            seen.append([round(float(rollout.advantages[0]), 2) for rollout in group])
            return result

    group = make_group([1.0, 0.0])
    hooks = scope("env", Hooks(), [Centred(PluginConfig()), ClipCredit(), Watch()])
    asyncio.run(hooks.score_group(group))
    assert seen == [[0.25, -0.25]]


def test_a_wrapper_that_catches_sees_errors_of_async_hooks_only_here():
    class Catch:
        def __init__(self):
            self.caught = []

        @hookimpl(wrapper=True)
        def score_rollout(self, rollout):
            try:
                return (yield)
            except StreamError as error:
                self.caught.append(str(error))
                raise

    naive, ours, (rollout,) = Catch(), Catch(), make_group([-1.0])

    async def under_pluggy():
        manager = plain_pluggy(Slow(PluginConfig()), naive)
        await asyncio.gather(*manager.hook.score_rollout(rollout=rollout))

    with pytest.raises(StreamError):
        asyncio.run(under_pluggy())
    with pytest.raises(StreamError):
        asyncio.run(scope("env", Hooks(), [Slow(PluginConfig()), ours]).score_rollout(rollout))
    assert naive.caught == [] and ours.caught == ["a judge said no"]


class Forgets:
    @hookimpl(wrapper=True)
    def score_group(self, group):
        return None


class Asynchronous:
    @hookimpl(wrapper=True)
    async def score_group(self, group):
        yield


@pytest.mark.parametrize("wrapper", [Forgets, Asynchronous])
def test_a_wrapper_that_is_no_plain_generator_is_refused(wrapper):
    with pytest.raises(PluginError) as caught:
        Hooks().register(wrapper(), "mine")
    assert str(caught.value) == (
        "plugin 'mine': 'score_group' is a wrapper and not a generator function. A wrapper is a "
        "plain 'def' with one 'yield', around an async hook too: what follows the 'yield' runs "
        "when everything it wraps is done."
    )
