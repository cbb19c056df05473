"""What an evaluation measures, against hand-computed numbers."""

from types import SimpleNamespace

import pytest

from prime_rl.config.orchestrator import EvalConfig
from prime_rl.env.environment import SamplingSettings
from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl_evals.figures import (
    EvalEnv,
    EvalResult,
    Finished,
    jobs_of,
    measures,
    num_tokens,
    of_the_policy,
    pass_rates,
    standard_error,
)


def env_of(num_examples, known=100, group_size=1, interval=None, name="held"):
    environment = SimpleNamespace(num_examples=known)
    return EvalEnv(name, environment, SamplingSettings(), num_examples, group_size, interval)


def test_an_env_is_sampled_as_configured():
    """A parameter that is None is the engine's default."""
    table = EvalConfig(
        sampling={"top_p": 0.9}, env=[{"id": "held", "num_examples": 5, "interval": 3}]
    )
    env = EvalEnv.of(table.env[0], table, SimpleNamespace(num_examples=4))
    assert (env.name, env.num_rollouts, env.group_size, env.interval) == ("held", 4, 1, 3)
    assert (env.sampling.temperature, env.sampling.top_p, env.sampling.top_k) == (None, 0.9, None)


def test_envs_take_turns():
    a, b = (env_of(100, known=n, group_size=2, name=n) for n in (2, 1))
    jobs = [(job.env.name, job.example, job.member) for job in jobs_of([a, b])]
    assert jobs == [(2, 0, 0), (1, 0, 0), (2, 0, 1), (1, 0, 1), (2, 1, 0), (2, 1, 1)]


def test_an_evaluation_is_due_at_the_first_version_at_or_after_a_multiple():
    env = env_of(1, interval=10)
    assert env.is_due(10, 9) and not env.is_due(10, 10)
    assert env.is_due(11, 9)  # 10 was skipped: the engines went from 9 to 11
    assert not env.is_due(19, 11)
    assert not env_of(1).is_due(10, 9)


def test_pass_rates_in_numbers():
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
    assert "x/all/reward/stderr" not in measures("x", finished[:2])  # undefined for one example


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


def test_an_episode_of_several_agents_counts_as_their_mean_and_fixed_players_do_not():
    def result(agent, reward, trainable=True, **metrics):
        return RolloutResult(
            ok=True, reward=reward, agent=agent, trainable=trainable, metrics=metrics
        )

    merged = of_the_policy(
        [
            result("proposer", 0.5, valid=1.0),
            result("solver", 1.0, exact=1.0),
            result("solver", 0.0, exact=0.0),
            result("judge", 9.0, trainable=False),
        ]
    )
    assert merged.reward == 0.5
    assert merged.metrics == {
        "reward/proposer": 0.5,
        "reward/solver": 0.5,
        "valid": 1.0,
        "exact": 0.5,
    }
    broken = RolloutResult(ok=False, error_type="TaskError", agent="solver")
    assert of_the_policy([result("proposer", 1.0), broken]) is broken
    alone = result("agent", 0.25)
    assert of_the_policy([alone, result("judge", 9.0, trainable=False)]) is alone


def test_rewards_that_are_binary_up_to_rounding_have_pass_rates():
    """1 of 2 and 2 of 2 are right."""
    rates = pass_rates([[0.7 + 0.2 + 0.1, 0.3 - 0.1 - 0.2], [1.0, 0.1 + 0.2 + 0.7]])
    assert rates["pass@1"] == 0.75 and rates["pass@2"] == 1.0 and rates["pass^2"] == 0.5
