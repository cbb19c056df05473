"""Length penalties: hand-computed values and config errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import ConfigError
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import check_algorithm, make_rollout, score
from prime_rl_grpo import GRPO, GRPOConfig, MaxRL, centred, efficiency_shaped, linear_shaped

REWARDS, OUTPUT = [1, 0, 1, 0], [100, 300, 200, 50]
TOTAL, TURNS = [150, 400, 260, 100], [1, 3, 2, 1]


def grpo(**penalty):
    return GRPO(GRPOConfig.model_validate({"length_penalty": penalty}))


def credit(algorithm, rewards, output=OUTPUT, total=TOTAL, turns=TURNS, tools=None):
    group = []
    for index, reward in enumerate(rewards):
        rollout = make_rollout(
            reward, prompt=total[index] - output[index], completion=output[index]
        )
        rollout.num_turns = turns[index]
        if tools:
            rollout.metrics["shell_total_tool_response_tokens"] = tools[index]
        group.append(rollout)
    score(algorithm, group)
    return [float(rollout.advantages[0]) for rollout in group]


def approximately(*values):
    return pytest.approx(values, abs=1e-6)


def test_tokens_prefers_the_shorter_right_answer():
    expected = approximately(0.75, -0.583333, 0.416667, -0.583333)
    assert credit(grpo(type="tokens"), REWARDS) == expected


def test_tokens_ranks_answers_that_are_all_right():
    expected = approximately(0.115385, -0.269231, -0.269231, 0.423077)
    assert credit(grpo(type="tokens"), [1, 1, 1, 1]) == expected


@pytest.mark.parametrize("kind", ["tokens", "turns", "linear"])
def test_length_does_not_count_if_no_reward_is_positive(kind):
    assert credit(grpo(type=kind), [0, 0, 0, 0]) == [0, 0, 0, 0]


def test_efficiency_shaping_does_not_change_negative_rewards():
    assert credit(grpo(type="tokens"), [-1, -2, -1, -2]) == [0.5, -0.5, 0.5, -0.5]


def test_tool_responses_have_their_own_weight():
    # Costs 1 * 100 + 0.5 * 100 = 150 and 1 * 200 + 0.5 * 500 = 450, mean 300: bonuses 0.5 and 0.
    algorithm = grpo(type="tokens", tool_response_weight=0.5)
    assert credit(algorithm, REWARDS, tools=[100, 0, 500, 0]) == approximately(
        1.5 - 0.625, -0.625, 1 - 0.625, -0.625
    )


def test_completions_have_their_own_weight():
    # Only the tools count: costs 100 and 300, mean 200: bonuses 0.5 and 0.
    algorithm = grpo(type="tokens", completion_weight=0)
    assert credit(algorithm, REWARDS, tools=[100, 0, 300, 0]) == approximately(
        1.5 - 0.625, -0.625, 1 - 0.625, -0.625
    )


def test_rewards_do_not_change_if_the_best_cost_nothing():
    assert credit(grpo(type="tokens", completion_weight=0), REWARDS) == [0.5, -0.5, 0.5, -0.5]


def test_turns_prefers_the_right_answer_with_fewer_turns():
    # Turns of the right answers 1 and 2, mean 1.5: bonuses 1/3 and 0.
    assert credit(grpo(type="turns"), REWARDS) == approximately(
        4 / 3 - 7 / 12, -7 / 12, 1 - 7 / 12, -7 / 12
    )


def test_linear_subtracts_a_share_of_the_mean():
    expected = approximately(0.546042, -0.595625, 0.482708, -0.433125)
    assert credit(grpo(type="linear"), REWARDS) == expected


def test_linear_divides_by_the_longest_and_at_least_by_one():
    assert linear_shaped([1.0, 0.0], [(1.0, [0.5, 0.25])]) == [0.75, -0.125]


def test_linear_counts_a_repeated_token_once():
    long, short = make_rollout(1.0, prompt=8), make_rollout(1.0, prompt=4)
    long.samples[0].is_repeat = np.array([True] * 4 + [False] * 7)
    algorithm = grpo(type="linear", output_weight=0, turns_weight=0)
    score(algorithm, [long, short])
    assert long.advantages.tolist() == short.advantages.tolist() == [0, 0, 0]


@given(st.sampled_from(["tokens", "turns", "linear"]), st.floats(0, 1), st.integers(1, 16))
def test_equal_answers_get_exactly_zero(kind, reward, size):
    same = {"output": [7] * size, "total": [10] * size, "turns": [3] * size}
    assert credit(grpo(type=kind), [reward] * size, **same) == [0.0] * size


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 500)), min_size=1, max_size=12))
def test_efficiency_never_ranks_a_worse_answer_above_a_better_one(answers):
    rewards, costs = zip(*answers, strict=True)
    shaped = efficiency_shaped(rewards, costs)
    assert sum(centred(shaped)) == pytest.approx(0, abs=1e-9)
    for one, its in zip(rewards, shaped, strict=True):
        assert one <= its <= 2 * one
        assert all(its <= others for r, others in zip(rewards, shaped, strict=True) if one < r)


@pytest.mark.parametrize("kind", ["tokens", "turns", "linear"])
def test_it_passes_the_conformance_checks_with(kind):
    check_algorithm(grpo(type=kind))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("tokens", ': expected a table such as { type = "tokens" }, with type among "tokens", '
                   '"turns", "linear" (got \'tokens\')'),
        ({}, ': the table has no type; expected one of "tokens", "turns", "linear"'),
        ({"type": "token"}, ": got type = 'token', expected one of \"tokens\", \"turns\", "
                            '"linear"'),
        ({"type": "linear", "outputs_weight": 1}, ": unknown key 'outputs_weight' of type = "
                                                  '"linear"; did you mean \'output_weight\'?'),
        ({"type": "turns", "weight": 1}, ": unknown key 'weight' of type = \"turns\"; known: none"),
        ({"type": "tokens", "completion_weight": -1},
         ".completion_weight: Input should be greater than or equal to 0 (got -1)"),
        ({"type": "tokens", "completion_weight": 0, "tool_response_weight": 0},
         ": completion_weight, tool_response_weight are all 0, so length would not count: raise "
         "one of them, or remove length_penalty"),
    ],
)  # fmt: skip
def test_an_invalid_table_is_refused(table, message):
    with pytest.raises(ConfigError) as caught:
        settings_of(GRPO, ALGORITHM, {"length_penalty": table}, "algo")
    assert str(caught.value) == f"algo (algorithm 'grpo').length_penalty{message}"


def test_max_rl_has_no_length_penalty():
    with pytest.raises(ConfigError) as caught:
        settings_of(MaxRL, ALGORITHM, {"length_penalty": {"type": "turns"}}, "algo")
    assert str(caught.value) == (
        "algo (algorithm 'max_rl').length_penalty: unknown key; known here: none"
    )


def test_the_best_answers_are_those_with_the_best_reward_up_to_rounding():
    """Costs 100 and 300, mean 200: the first, worth 0.9999999999999999, saves a half."""
    shaped = efficiency_shaped([0.7 + 0.2 + 0.1, 1.0, 0.5], [100, 300, 50])
    assert shaped == pytest.approx([1.5, 1.0, 0.5])
