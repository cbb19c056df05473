"""From branches to samples: one sample per branch; a shared sampled token trains once."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, StreamError, Turn
from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl.env.traces import build_rollout, build_samples, rewards_by_node
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.streams import is_absent
from prime_rl.testing import make_rollout

# A node is (id, role, tokens): sampled by the policy if its role is "assistant".
Node = tuple[int, str, list[int]]


def branch(*nodes: Node, trainable: bool = True, **columns) -> BranchTokens:
    flat = [(node, role, token) for node, role, tokens in nodes for token in tokens]
    sampled = [role == "assistant" for _, role, _ in flat]
    given = {
        "token_ids": [token for _, _, token in flat],
        "sampled_mask": sampled,
        "logprobs": [-0.1 * token if s else 0.0 for s, (_, _, token) in zip(sampled, flat)],  # noqa: B905
        "roles": [role for _, role, _ in flat],
        "is_content": [True] * len(flat),
        "node_ids": [node for node, _, _ in flat],
        "policy_versions": [5 if s else -1 for s in sampled],
    }
    return BranchTokens(**(given | columns), trainable=trainable)


def user(node: int, *tokens: int) -> Node:
    return node, "user", list(tokens)


def says(node: int, *tokens: int) -> Node:
    return node, "assistant", list(tokens)


def trained(samples) -> list[list[int]]:
    return [sample.token_ids[sample.loss_mask].tolist() for sample in samples]


def test_five_steps_whose_third_breaks_the_prefix_give_two_samples():
    """Steps 1-3 extend one another, 4 starts a new prefix, 5 extends 4."""
    start = [user(0, 1), says(1, 2), user(2, 3), says(3, 4), user(4, 5), says(5, 6)]
    again = [user(6, 9, 9), says(7, 7), user(8, 3), says(9, 8)]
    samples = build_samples([branch(*start), branch(*again)], 1.0)
    assert [len(sample) for sample in samples] == [6, 5]
    assert trained(samples) == [[2, 4, 6], [7, 8]]


def test_two_interleaved_agents_give_two_samples():
    """[a1, a2, b1, a3, b2]: each agent's turns extend its own prefix."""
    a = branch(user(0, 1), says(1, 11), user(2, 2), says(3, 12), user(6, 3), says(7, 13))
    b = branch(user(4, 5), says(5, 21), user(8, 6), says(9, 22))
    assert trained(build_samples([a, b], 1.0)) == [[11, 12, 13], [21, 22]]


def test_a_shared_sampled_node_trains_in_the_first_branch_only():
    shared = [user(0, 1), says(1, 2, 3)]
    first, second = branch(*shared, user(2, 4), says(3, 5)), branch(*shared, user(4, 6), says(5, 7))
    samples = build_samples([first, second], 1.0)
    assert trained(samples) == [[2, 3, 5], [7]]
    assert samples[1].token_ids.tolist() == [1, 2, 3, 6, 7]  # still there as context
    assert samples[1].inference_logprobs.tolist() == pytest.approx([0, 0, 0, 0, -0.7])
    assert samples[1].policy_versions.tolist() == [-1, -1, -1, -1, 5]


def test_a_branch_with_nothing_left_to_train_gives_no_sample():
    shared = [user(0, 1), says(1, 2)]
    assert len(build_samples([branch(*shared), branch(*shared, user(2, 3))], 1.0)) == 1
    assert build_samples([branch(user(0, 1))], 1.0) == []
    assert build_samples([], 1.0) == []


def test_a_branch_that_must_not_train_does_not_take_a_node_from_one_that_may():
    shared = [user(0, 1), says(1, 2)]
    samples = build_samples([branch(*shared, trainable=False), branch(*shared)], 1.0)
    assert trained(samples) == [[2]]


def test_equal_tokens_of_different_nodes_are_different_sampling_events():
    samples = build_samples([branch(user(0, 1), says(1, 2)), branch(user(2, 1), says(3, 2))], 1.0)
    assert trained(samples) == [[2], [2]]


def test_columns_of_a_sample():
    (sample,) = build_samples(
        [branch((0, "system", [7]), user(1, 1), says(2, 2), (3, "odd", [4]))], 0.7
    )
    assert sample.temperature == 0.7
    assert sample.roles.tolist() == [0, 1, 2, -1]
    assert sample.is_content.tolist() == [True] * 4
    assert sample.loss_mask.tolist() == [False, False, True, False]
    assert sample.inference_logprobs.tolist() == pytest.approx([0, 0, -0.2, 0])


def test_a_message_without_attribution_counts_as_body():
    def content(flags):
        (sample,) = build_samples([branch(user(0, 1), says(1, 2), is_content=flags)], 1.0)
        return None if sample.is_content is None else sample.is_content.tolist()

    assert content(None) is None and content([None, None]) is None
    assert content([False, None]) == [False, True]


def test_samples_come_in_the_order_of_their_first_turns():
    late, early = branch(user(2, 1), says(3, 2)), branch(user(0, 3), says(1, 4))
    first, second = build_samples([late, early], 1.0)
    assert first.token_ids.tolist() == early.token_ids
    assert second.token_ids.tolist() == late.token_ids


def test_versions_that_are_not_reported_have_no_column():
    (sample,) = build_samples([branch(user(0, 1), says(1, 2), policy_versions=None)], 1.0)
    assert sample.policy_versions is None


def test_a_logprob_that_is_not_finite_is_refused_on_sampled_tokens_only():
    with pytest.raises(StreamError, match="a sampled token has a logprob that is not finite"):
        build_samples([branch(user(0, 1), says(1, 2), logprobs=[0.0, float("nan")])], 1.0)
    (sample,) = build_samples([branch(user(0, 1), says(1, 2), logprobs=[float("nan"), -1.0])], 1.0)
    assert sample.inference_logprobs.tolist() == [0, -1]


def test_building_samples_leaves_the_branches_alone():
    shared = [user(0, 1), says(1, 2)]
    branches = [branch(*shared), branch(*shared, says(2, 3))]
    build_samples(branches, 1.0)
    assert [each.sampled_mask for each in branches] == [[False, True], [False, True, True]]


def test_a_rollout_has_the_results_of_its_episode():
    result = RolloutResult(
        ok=True, reward=0.5, rewards={"lcs": 0.5}, reward_weights={"lcs": 2.0},
        metrics={"len": 3.0}, info={"k": 1}, num_turns=2,
        is_truncated=True, stop_condition="max_turns", branches=[branch(user(0, 1), says(1, 2))],
    )  # fmt: skip
    rollout = build_rollout(
        result, env="e", example_id=3, group_id=4, policy_version=5, temperature=0.5
    )
    facts = (rollout.env, rollout.example_id, rollout.group_id, rollout.policy_version)
    assert facts == ("e", 3, 4, 5)
    assert (rollout.reward, rollout.rewards, rollout.metrics) == (0.5, {"lcs": 0.5}, {"len": 3.0})
    assert rollout.reward_weights == {"lcs": 2.0}
    assert (rollout.num_turns, rollout.is_truncated, rollout.stop_condition) == (
        2,
        True,
        "max_turns",
    )
    assert rollout.samples[0].temperature == 0.5 and not rollout.frozen
    rollout.metrics["mine"] = 1.0
    assert result.metrics == {"len": 3.0}


@st.composite
def trees(draw):
    """Random message trees; a branch is a path from the root to a leaf."""
    count = draw(st.integers(1, 10))
    parents = [None, *(draw(st.integers(0, index - 1)) for index in range(1, count))]
    roles = draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    nodes = [(i, roles[i], [100 * i + k for k in range(sizes[i])]) for i in range(count)]
    paths = []
    for leaf in (i for i in range(count) if i not in parents):
        path, at = [], leaf
        while at is not None:
            path.insert(0, nodes[at])
            at = parents[at]
        paths.append(path)
    return [branch(*path, trainable=draw(st.booleans())) for path in paths]


@given(trees())
def test_every_sampled_token_of_the_trainable_branches_trains_exactly_once(branches):
    samples = build_samples(branches, 1.0)
    expected = {
        token
        for each in branches
        if each.trainable
        for token, sampled in zip(each.token_ids, each.sampled_mask, strict=True)
        if sampled
    }
    found = [token for tokens in trained(samples) for token in tokens]
    assert sorted(found) == sorted(expected)  # tokens are unique to their node: none twice


@given(trees())
def test_columns_align_and_are_empty_off_the_mask(branches):
    whole = {tuple(each.token_ids) for each in branches if each.trainable}
    for sample in build_samples(branches, 1.0):
        assert tuple(sample.token_ids.tolist()) in whole
        assert sample.loss_mask.any()
        np.testing.assert_array_equal(
            sample.inference_logprobs != 0, sample.loss_mask & (sample.token_ids != 0)
        )
        np.testing.assert_array_equal(sample.policy_versions == 5, sample.loss_mask)
        assert not (sample.loss_mask & (sample.roles != 2)).any()


def test_tokens_of_an_earlier_sample_are_marked_as_repeated():
    shared = [user(0, 1, 2), says(1, 3)]
    samples = build_samples(
        [branch(*shared, user(2, 4), says(3, 5)), branch(*shared, user(4, 6), says(5, 7))], 1.0
    )
    assert samples[0].is_repeat is None
    assert samples[1].is_repeat.tolist() == [True, True, True, False, False]
    assert [sample.node_ids.tolist() for sample in samples] == [[0, 0, 1, 2, 3], [0, 0, 1, 4, 5]]


# -- turns ----------------------------------------------------------------------------------


def rollout_of(*branches: BranchTokens, rewards: dict[str, float] | None = None) -> Rollout:
    result = RolloutResult(ok=True, branches=list(branches), info={"turn_rewards": rewards or {}})
    return build_rollout(
        result, env="e", example_id=0, group_id=0, policy_version=0, temperature=1.0
    )


def test_turns_are_spans_of_the_messages_with_their_own_rewards():
    path = branch(user(0, 1, 2), says(1, 3), (2, "tool", [4]), says(3, 5, 6))
    assert rollout_of(path, rewards={"1": 0.25, "3": -1.0}).turns == [
        Turn(0, 0, 2, "user", None),
        Turn(0, 2, 3, "assistant", 0.25),
        Turn(0, 3, 4, "tool", None),
        Turn(0, 4, 6, "assistant", -1.0),
    ]


def test_a_turn_that_two_samples_repeat_is_listed_once_and_all_are_in_order_of_time():
    """The second agent's turns 3 and 4 lie between the first one's 2 and 5."""
    shared = [user(0, 1), says(1, 2)]
    first = branch(*shared, user(2, 3), user(5, 4), says(6, 5))
    second = branch(*shared, user(3, 6), says(4, 7))
    turns = rollout_of(first, second, rewards={str(node): float(node) for node in range(7)}).turns
    assert [turn.reward for turn in turns] == [0, 1, 2, 3, 4, 5, 6]
    assert [turn.sample for turn in turns] == [0, 0, 0, 1, 1, 0, 0]


@given(trees())
def test_every_token_that_is_no_repeat_is_in_exactly_one_turn(branches):
    rollout = rollout_of(*branches)
    counts = [np.zeros(len(sample), int) for sample in rollout.samples]
    for turn in rollout.turns:
        counts[turn.sample][turn.start : turn.end] += 1
        nodes = rollout.samples[turn.sample].node_ids[turn.start : turn.end]
        assert len(set(nodes.tolist())) == 1
    for count, sample in zip(counts, rollout.samples, strict=True):
        repeats = np.zeros(len(sample), bool) if sample.is_repeat is None else sample.is_repeat
        np.testing.assert_array_equal(count, ~repeats)


def test_without_node_ids_a_turn_ends_where_the_role_changes_and_rewards_go_by_number():
    rollout = make_rollout(prompt=2, completion=3, tool=1)
    rollout.info["turn_rewards"] = {"1": 0.5}
    assert rollout.turns == [
        Turn(0, 0, 2, "user", None), Turn(0, 2, 5, "assistant", 0.5), Turn(0, 5, 6, "tool", None)
    ]  # fmt: skip
    rollout.samples[0].roles = None
    assert [(turn.start, turn.end, turn.role) for turn in rollout.turns] == [
        *((0, 2, None), (2, 5, None), (5, 6, None))
    ]


def test_saved_rollouts_keep_the_rewards_of_turns(tmp_path):
    rollout = rollout_of(branch(user(0, 1), says(1, 2)), rewards={"1": 1 / 3})
    (tmp_path / "f").write_bytes(encode_rollouts(1, [(rollout, None)]))
    (stored,) = decode_rollouts(tmp_path / "f")["rollouts"]
    again = stored.rollout
    assert again.turns == rollout.turns and again.turns[1].reward == 1 / 3


def trace_of(*sampled: bool) -> SimpleNamespace:
    return SimpleNamespace(nodes=[SimpleNamespace(sampled=each) for each in sampled])


def test_the_envs_rewards_go_to_the_nodes_of_the_replies():
    trace = trace_of(False, True, False, True, True)
    assert rewards_by_node(trace, [0.5, None, 2]) == {"1": 0.5, "4": 2.0}


@pytest.mark.parametrize("rewards", [[0.5], [0.5, 1.0, 2.0], [0.5, float("nan")]])
def test_rewards_of_turns_that_do_not_fit_are_refused(rewards):
    with pytest.raises(StreamError, match=r"expected a list .* each of the 2 replies in trace"):
        rewards_by_node(trace_of(True, False, True), rewards)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_sampler_has_not_computed_the_last_token_that_it_has_sampled(dtype):
    """verifiers has the routes of the token before in its place."""
    routes = np.array([[[3, 1]], [[0, 2]], [[2, 1]], [[2, 1]]], dtype)
    for nodes, absent in (
        ([user(0, 5, 6), says(1, 7, 8)], [False, False, False, True]),
        ([says(0, 5, 6), user(1, 7, 8)], [False] * 4),  # a prompt is computed whole
    ):
        (sample,) = build_samples([branch(*nodes, routed_experts=routes)], 1.0)
        assert is_absent(sample.routed_experts).tolist() == absent
        assert sample.routed_experts.dtype == dtype
        kept = ~np.array(absent)
        np.testing.assert_array_equal(sample.routed_experts[kept], routes[kept])
    assert routes[-1].tolist() == [[2, 1]]  # the trace keeps its own
