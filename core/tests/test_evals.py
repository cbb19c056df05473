"""Evaluations: what they measure, by hand, and how they and training keep out of each other's
way."""

import asyncio
from dataclasses import dataclass, field

import pytest
from waiting import LIMIT, until

from prime_rl.env.environment import ModelEndpoint, RolloutResult, SamplingSettings
from prime_rl.env.episode import BranchTokens
from prime_rl.orchestrator.evals import (
    EvalEnv,
    EvalResult,
    Finished,
    measures,
    num_tokens,
    of_the_policy,
    pass_rates,
    standard_error,
)
from prime_rl.orchestrator.evaluator import Evaluator, Schedule, free_slots, jobs_of


@dataclass
class FakeEnvironment:
    """Rewards by example id; a negative one fails. With a gate, rollouts wait for it."""

    rewards: list[float]
    calls: list[tuple] = field(default_factory=list)
    gate: asyncio.Event | None = None
    inflight: int = 0
    most: int = 0
    order: list = field(default_factory=list)

    @property
    def num_examples(self):
        return len(self.rewards)

    @property
    def examples(self):
        return list(range(len(self.rewards)))

    async def run(self, example, *, model, sampling, group_id, cache_salt, seed):
        self.calls.append((example, group_id, cache_salt, seed))
        self.order.append((id(self), example))
        self.inflight += 1
        self.most = max(self.most, self.inflight)
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.inflight -= 1
        reward = self.rewards[example]
        if reward < 0:
            return [RolloutResult(ok=False, reward=9.0, error="broke", error_type="TaskError")]
        return [RolloutResult(ok=True, reward=reward, metrics={"m": reward})]


class OneEndpoint:
    """Stands for the router: always the same endpoint."""

    async def run(self, key, episode):
        return await episode(ModelEndpoint("m", "http://127.0.0.1:1/v1"))


def env_of(environment, num_examples=100, group_size=1, interval=None, name="held"):
    return EvalEnv(name, environment, SamplingSettings(), num_examples, group_size, interval)


def evaluator(
    *envs, slots=lambda: 100, version=0, last_version=100, max_hold_seconds=300.0, **more
):
    results = []
    schedule = Schedule(version, last_version, 1000, max_hold_seconds)
    made = Evaluator(envs, OneEndpoint(), schedule, slots=slots, on_result=results.append, **more)
    return made, results


async def evaluated(rewards, num_examples=100, group_size=1, inflight=100):
    environment, shares = FakeEnvironment(rewards), []
    env = env_of(environment, num_examples, group_size)
    made, _ = evaluator(
        env, slots=lambda: inflight, on_progress=lambda: shares.append(made.share)
    )  # fmt: skip
    (found,) = await made.evaluate([env], 7)
    return found, environment, shares


# -- one evaluation ---------------------------------------------------------------------------


async def test_a_failed_rollout_counts_as_reward_zero():
    found, _, shares = await evaluated([1.0, -1.0, 0.5, 0.5])
    assert (found.reward, found.num_rollouts, found.num_failed) == (0.5, 4, 1)
    assert found.metrics == {"m": pytest.approx(2 / 3)}
    assert shares == [0.25, 0.5, 0.75, 1.0]


async def test_the_first_examples_each_with_a_seed_of_its_own_at_one_version():
    found, environment, _ = await evaluated([0.0, 1.0, 0.5], num_examples=2, group_size=2)
    assert sorted(environment.calls) == [
        (0, 0, "7", 1000), (0, 0, "7", 1001), (1, 1, "7", 1002), (1, 1, "7", 1003)
    ]  # fmt: skip
    assert [shown["reward"] for shown in found.shown] == [0.0, 1.0]  # one an example


async def test_at_most_so_many_at_once():
    assert (await evaluated([0.0] * 9, inflight=2))[1].most == 2


def test_envs_take_turns():
    a, b = (env_of(FakeEnvironment([0.0] * n), group_size=2, name=n) for n in (2, 1))
    jobs = [(job.env.name, job.example, job.member) for job in jobs_of([a, b])]
    assert jobs == [(2, 0, 0), (1, 0, 0), (2, 0, 1), (1, 0, 1), (2, 1, 0), (2, 1, 1)]


def test_training_keeps_its_slots():
    assert free_slots(128, 0) == 128  # before and after training: all of them
    assert free_slots(128, 100) == 32  # never less than a quarter more
    assert free_slots(128, 128) == 32
    assert free_slots(128, 20) == 108  # what training leaves
    assert free_slots(1, 1) == 1


# -- what it measures ---------------------------------------------------------------------------


def test_pass_rates_by_hand():
    # n = 4; c = 2 and c = 0
    rates = pass_rates([[1, 0, 1, 0], [0, 0, 0, 0]])
    assert rates == pytest.approx(
        {
            "avg@4": 0.25,
            "pass@1": 0.25,
            "pass^1": 0.25,
            "pass@2": (1 - 1 / 6) / 2,  # C(2, 2) / C(4, 2) draws of two are both wrong
            "pass^2": (1 / 6) / 2,
            "pass@4": 0.5,
            "pass^4": 0.0,
        }
    )


def test_pass_rates_are_what_drawing_k_of_n_gives():
    """Against every way to draw k of n."""
    from itertools import combinations

    rewards = [1, 1, 1, 0, 0, 0, 0, 0]
    rates = pass_rates([rewards])
    for k in (1, 2, 4, 8):
        draws = list(combinations(rewards, k))
        assert rates[f"pass@{k}"] == pytest.approx(sum(map(any, draws)) / len(draws))
        assert rates[f"pass^{k}"] == pytest.approx(sum(map(all, draws)) / len(draws))
    assert "pass@3" not in rates and "pass@16" not in rates


def test_rewards_that_are_not_binary_have_no_pass_rates():
    assert pass_rates([[0.5, 1.0], [0.0, 0.0]]) == {"avg@2": 0.375}
    assert pass_rates([]) == {}


def test_examples_with_too_few_rollouts_are_left_out_of_k():
    rates = pass_rates([[1, 0], [1]])  # one was cut short
    assert (rates["pass@1"], rates["pass@2"], rates["pass^2"]) == (0.75, 1.0, 0.0)


def branch(mask, nodes, versions):
    n = len(mask)
    return BranchTokens([0] * n, mask, [0.0] * n, ["user"] * n, [None] * n, nodes, versions)


def test_tokens_of_shared_nodes_count_once():
    first = branch([False, True, True], [0, 1, 1], [-1, 3, 3])
    second = branch([False, True, True, False, True], [0, 1, 1, 2, 3], [-1, 3, 3, -1, 4])
    result = RolloutResult(ok=True, branches=[first, second])
    assert num_tokens(result) == (2, 3)
    found = measures("eval/a", [Finished(0, result)])
    assert found["eval/a/all/num_output_tokens/mean"] == 3.0
    assert found["eval/a/all/num_input_tokens/mean"] == 2.0
    assert found["eval/a/all/num_total_tokens/mean"] == 5.0
    assert found["eval/a/num_policy_versions"] == 2.0  # 3 and 4: a swap went through it


def test_failed_rollouts_are_in_all_and_not_in_effective():
    ok = RolloutResult(ok=True, reward=1.0, num_turns=3, is_truncated=True)
    broken = RolloutResult(ok=False, reward=9.0, num_turns=9)
    found = measures("eval/a", [Finished(0, ok), Finished(1, broken)])
    assert found["eval/a/all/reward/mean"] == 0.5 and found["eval/a/all/reward/max"] == 1.0
    assert found["eval/a/effective/reward/mean"] == 1.0
    assert found["eval/a/all/num_turns/mean"] == 3.0
    assert found["eval/a/all/is_truncated/mean"] == 1.0
    # The failed one is a wrong example of two, not left out.
    assert found["eval/a/pass@1"] == found["eval/a/avg@1"] == 0.5
    assert found["eval/a/all/is_completed/mean"] == 0.5


def test_the_standard_error_counts_examples_not_rollouts():
    # means 1, 0, 0.5, 0.5: their sample variance is (0.25 + 0.25) / 3, over 4 examples
    groups = [[1, 1], [0, 0], [1, 0], [0, 1]]
    assert standard_error(groups) == pytest.approx((0.5 / 3 / 4) ** 0.5)
    finished = [
        Finished(number, RolloutResult(ok=True, reward=reward))
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]
    assert measures("x", finished)["x/all/reward/stderr"] == pytest.approx((0.5 / 12) ** 0.5)
    assert "x/all/reward/stderr" not in measures("x", finished[:2])  # one example tells nothing


def test_endings_terms_and_stages_of_an_evaluation():
    done = RolloutResult(
        ok=True,
        stop_condition="done",
        rewards={"lcs": 0.5},
        timing={"agent": 2.0, "agent/model": 1},
    )
    cut = RolloutResult(ok=True, stop_condition="max_turns", rewards={"lcs": 1.0})
    broken = RolloutResult(ok=False, error_type="TaskError", stop_condition="error")
    found = measures("x", [Finished(0, each) for each in (done, cut, broken, broken)])
    assert found["x/all/is_completed/mean"] == 0.5
    assert found["x/all/stop_condition/done"] == found["x/all/stop_condition/max_turns"] == 0.5
    assert "x/all/stop_condition/error" not in found
    assert found["x/all/error/TaskError"] == 2.0
    assert (found["x/all/rewards/lcs/mean"], found["x/all/rewards/lcs/max"]) == (0.75, 1.0)
    assert found["x/all/timing/agent/mean"] == 2.0 and found["x/all/timing/agent/model/max"] == 1.0


def test_eval_metrics_by_name():
    result = EvalResult("held", 3, 0.25, 8, 1, {"lcs": 0.5}, [], {"eval/held/pass@2": 1.0})
    assert result.as_metrics() == {
        "eval/held/pass@2": 1.0,
        "eval/held/all/metrics/lcs/mean": 0.5,
        "eval/held/all/reward/mean": 0.25,
        "eval/held/all/has_error/mean": 0.125,
        "eval/held/num_failed": 1.0,
        "eval/held/policy_version": 3.0,
    }


# -- while training goes on ---------------------------------------------------------------------


def test_due_at_the_first_version_at_or_after_a_multiple():
    env = env_of(FakeEnvironment([0.0]), interval=10)
    assert env.is_due(10, 9) and not env.is_due(10, 10)
    assert env.is_due(11, 9)  # 10 was skipped: the engines went from 9 to 11
    assert not env.is_due(19, 11)
    assert not env_of(FakeEnvironment([0.0])).is_due(10, 9)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Between:
    """An evaluator at work beside a watcher that has versions to load."""

    def __init__(self, **more):
        self.environment = FakeEnvironment([1.0, 0.0, 1.0, 0.0], gate=asyncio.Event())
        self.env = env_of(self.environment, interval=2)
        self.made, self.results = evaluator(self.env, slots=lambda: 2, **more)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.made.run())
        return self

    async def __aexit__(self, *exc):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_the_next_version_waits_until_the_present_one_is_measured():
    async with Between() as world:
        world.made.on_version(2)
        await settle()
        hold = asyncio.create_task(world.made.hold())
        await settle()
        assert not hold.done() and world.made.is_running
        metrics = world.made.take_metrics()
        assert metrics["dispatcher/inflight/eval"] == 2.0
        assert metrics["dispatcher/queued/eval"] == 2.0
        world.environment.gate.set()
        await asyncio.wait_for(hold, LIMIT)
        assert world.results[0].policy_version == 2 and world.results[0].reward == 0.5
        assert {salt for _, _, salt, _ in world.environment.calls} == {"2"}
        assert world.made.take_metrics()["time/hold_weights_for_eval"] > 0
        assert not world.made.is_running
        await asyncio.wait_for(world.made.hold(), LIMIT)  # nothing to wait for


async def test_an_evaluation_that_takes_too_long_is_cut_short_and_says_so(caplog):
    async with Between(max_hold_seconds=0.05) as world:
        world.environment.gate.set()
        world.made.on_version(2)
        while len(world.environment.calls) < 2:
            await asyncio.sleep(0)
        world.environment.gate.clear()
        while world.environment.inflight != 2 or len(world.environment.calls) != 4:
            await asyncio.sleep(0)  # two are done, two hang
        await asyncio.wait_for(world.made.hold(), LIMIT)
        (result,) = world.results
        assert (result.num_rollouts, result.num_failed) == (2, 0)
        assert result.as_metrics()["eval/held/cancelled"] == 2.0
        assert world.environment.inflight == 0
        assert "the evaluation of version 2 is cut short: 2 of 4 rollouts are left out" in (
            caplog.text
        )
        world.environment.gate.set()
        world.made._max_hold = LIMIT
        world.made.on_version(4)  # the next one is whole again
        await asyncio.wait_for(world.made.hold(), LIMIT)
        assert world.results[1].num_rollouts == 4 and world.results[1].policy_version == 4


async def test_versions_between_and_the_last_are_not_evaluated_in_passing():
    async with Between(last_version=6) as world:
        world.environment.gate.set()
        for version in (1, 3, 6):
            world.made.on_version(version)
            await asyncio.wait_for(world.made.hold(), LIMIT)
        assert [result.policy_version for result in world.results] == [3]


async def test_what_fell_due_and_was_cut_off_is_made_up_for_by_a_run_that_goes_on():
    async with Between(version=4) as world:  # its interval is 2
        world.environment.gate.set()
        world.made.make_up({"held": 4})
        assert not world.made.is_running
        world.made.make_up({"held": 2})
        await asyncio.wait_for(world.made.hold(), LIMIT)
        world.made.on_version(5)
        await asyncio.wait_for(world.made.hold(), LIMIT)
        assert [result.policy_version for result in world.results] == [4]


async def test_more_slots_are_seen_when_training_leaves_them():
    free = 1
    environment = FakeEnvironment([1.0] * 6, gate=asyncio.Event())
    env = env_of(environment)
    made, _ = evaluator(env, slots=lambda: free)
    task = asyncio.create_task(made.evaluate([env], 1))
    await settle()
    assert environment.inflight == 1
    free = 4
    await until(lambda: environment.inflight >= 4)
    environment.gate.set()
    await asyncio.wait_for(task, LIMIT)
    assert environment.most <= 6


def test_an_episode_of_several_agents_counts_as_their_mean_and_fixed_players_do_not():
    def result(agent, reward, trainable=True, **metrics):
        return RolloutResult(
            ok=True, reward=reward, agent=agent, trainable=trainable, metrics=metrics
        )

    told = of_the_policy(
        [
            result("proposer", 0.5, valid=1.0),
            result("solver", 1.0, exact=1.0),
            result("solver", 0.0, exact=0.0),
            result("judge", 9.0, trainable=False),
        ]
    )
    assert told.reward == 0.5
    assert told.metrics == {
        "reward/proposer": 0.5,
        "reward/solver": 0.5,
        "valid": 1.0,
        "exact": 0.5,
    }
    alone = result("agent", 0.25)
    assert of_the_policy([alone, result("judge", 9.0, trainable=False)]) is alone
