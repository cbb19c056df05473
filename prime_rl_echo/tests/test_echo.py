"""The tokens that echo trains: hand-written cases, and random trees of messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Sample, StreamError
from prime_rl.env.episode import BranchTokens
from prime_rl.env.traces import build_samples
from prime_rl.rollout import ROLES
from prime_rl.testing import check_algorithm, make_group, make_rollout, score
from prime_rl_echo import Echo, EchoConfig
from prime_rl_echo.roles import RoleWeights

# One letter per token: s system, u user, a assistant, t tool; a capital is body, else template;
# + was sampled; . an earlier sample trains it.
LETTERS = {"s": 0, "u": 1, "a": 2, "t": 3, "?": -1}


def sample(text, attribution=True):
    """A sample of space-separated tokens, ids from their letter and place."""
    tokens = text.split()
    mask = np.array([t[1:] == "+" for t in tokens])
    repeat = np.array([t[1:] == "." for t in tokens])
    return Sample(
        token_ids=[ord(token[0]) * 100 + place for place, token in enumerate(tokens)],
        loss_mask=mask,
        inference_logprobs=np.where(mask, -1.0, 0.0),
        roles=[LETTERS[token[0].lower()] for token in tokens],
        is_content=[token[0].isupper() for token in tokens] if attribution else None,
        is_repeat=repeat if repeat.any() else None,
    )


def echo(filter=None, **alphas):
    table = {"roles": {role: {"alpha": alpha} for role, alpha in alphas.items()}} if alphas else {}
    return Echo(EchoConfig.model_validate(table | ({"filter": filter} if filter else {})))


def weights(algorithm, *samples):
    """The ce weights after scoring a rollout with these samples, and a failed sibling."""
    rollout = make_rollout(1.0)
    rollout.samples = list(samples)
    score(algorithm, [rollout, make_rollout(0.0)])
    columns = [s.ce_weights for s in rollout.samples]
    return [None if c is None else np.round(c.astype(float), 6).tolist() for c in columns]


TURNS = "s S u U a A+ A+ t T T t a A+ t T a A+"


def test_tool_bodies_after_the_first_turn_have_weight_a_tenth():
    expected = [[0, 0, 0, 0, 0, 0, 0, 0, 0.1, 0.1, 0, 0, 0, 0, 0.1, 0, 0]]
    assert weights(echo(), sample(TURNS)) == expected


def test_the_initial_prompt_is_never_trained():
    assert weights(echo(system=1, user=1, tool=1), sample("S U T a A+")) == [None]


def test_every_role_of_the_table_has_its_own_weight():
    text = sample("S U a A+ t T u U s S ? a A+")
    expected = [[0, 0, 0, 0, 0, 0.25, 0, 0.05, 0, 2.0, 0, 0, 0]]
    assert weights(echo(tool=0.25, user=0.05, system=2), text) == expected


def test_setting_a_role_replaces_the_table():
    assert weights(echo(user=0.5), sample("U A+ T U A+")) == [[0, 0, 0, 0.5, 0]]


def test_an_observation_after_the_last_turn_is_trained_too():
    assert weights(echo(), sample("U A+ T")) == [[0, 0, 0.1]]


def test_a_generation_prompt_is_not_content():
    expected = [[0, 0, 0, 0, 0, 0, 0.5, 0, 0]]
    assert weights(echo(assistant=0.5), sample("U a A+ T a a A a A+")) == expected


def test_without_attribution_the_whole_span_trains_except_the_generation_prompt():
    text = sample("U a A+ t T t a A+", attribution=False)
    expected = [[0, 0, 0, 0.1, 0.1, 0.1, 0, 0]]
    assert weights(echo(tool=0.1, assistant=0.5), text) == expected


USER, TOOL = "user", "tool"


def turns(*nodes):
    """One branch of ``(role, is_content or None)``: the last token of an action, role ``"action"``,
    was sampled; a message without attribution has 2 tokens."""
    rows = [
        (number, "assistant" if role == "action" else role, role == "action" and last, is_body)
        for number, (role, content) in enumerate(nodes)
        for is_body, last in zip(content or [None, None], [False, True], strict=True)
    ]
    ids, roles, mask, content = zip(*rows, strict=True)
    return BranchTokens(
        list(range(len(rows))), list(mask), [-1.0 * m for m in mask], list(roles), list(content),
        list(ids), None,
    )  # fmt: skip


def weights_of(algorithm, *branches):
    return weights(algorithm, *build_samples(branches, 1.0))


def test_a_generation_prompt_is_not_an_observation_with_mixed_attribution():
    """The renderer separates body and template only in the tool's message."""
    branch = turns((USER, None), ("action", None), (TOOL, [False, True]), ("action", None))
    assert weights_of(echo(tool=0.1, assistant=0.5), branch) == [[0, 0, 0, 0, 0, 0.1, 0, 0]]


def test_an_injected_message_right_before_an_action_is_an_observation():
    """Without attribution, and both have the role assistant: only their nodes differ."""
    branch = turns((USER, None), ("action", None), ("assistant", None), ("action", None))
    assert weights_of(echo(assistant=0.5), branch) == [[0, 0, 0, 0, 0.5, 0.5, 0, 0]]


def test_an_action_that_an_earlier_sample_trains_is_not_an_observation():
    shared = [(USER, None), ("action", None)]
    first = turns(*shared, (TOOL, None), ("action", None))
    second = turns(*shared, (USER, None), ("action", None))
    second.node_ids[4:] = [4, 4, 5, 5]
    second.token_ids[4:] = [9] * 4
    assert weights_of(echo(user=0.5, assistant=0.25), first, second) == [
        None,
        [0, 0, 0, 0, 0.5, 0.5, 0, 0],
    ]


def test_actions_keep_the_credit_of_grpo():
    rollout, sibling = make_rollout(1.0, tool=2), make_rollout(0.0, tool=2)
    score(echo(), [rollout, sibling])
    assert rollout.samples[0].advantages.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0]
    assert sibling.samples[0].advantages.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0]
    assert sibling.samples[0].ce_weights.tolist() == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.1])


def test_length_penalties_are_inherited():
    algorithm = Echo(EchoConfig.model_validate({"length_penalty": {"type": "tokens"}}))
    group = [make_rollout(1.0, completion=1), make_rollout(1.0, completion=3)]
    score(algorithm, group)  # mean cost 2: the shorter gets 1.5, the longer 1
    assert [float(r.advantages[0]) for r in group] == [0.25, -0.25]


def test_a_shared_observation_is_trained_once():
    first, second = sample("U A+ T a A+"), sample("U. A. T. u U a A+")
    assert weights(echo(tool=0.1, user=0.2), first, second) == [
        [0, 0, 0.1, 0, 0],
        [0, 0, 0, 0, 0.2, 0, 0],
    ]


def test_a_message_after_a_repeated_turn_is_an_observation():
    """The earlier sample trains the branch's first sampled token, which still comes first here."""
    first, second = sample("U A+ t A+"), sample("U. A. T T A+")
    assert weights(echo(), first, second) == [None, [0, 0, 0.1, 0.1, 0]]


def test_a_repeated_prompt_with_assistant_messages_is_still_the_prompt():
    first, second = sample("U A U A+"), sample("U. A. T A+ T")
    assert weights(echo(), first, second) == [None, [0, 0, 0, 0, 0.1]]


def test_samples_without_roles_are_an_error():
    bare = sample("U A+ T")
    bare.roles = None
    with pytest.raises(StreamError) as caught:
        weights(echo(), bare)
    assert str(caught.value) == (
        "env 'test', group 0: algo 'echo' selects tokens by the role of their message, but a "
        "sample has no roles. Choose a renderer with attribution "
        "(orchestrator.renderer.name), or a source whose samples have roles."
    )


def test_the_table_has_the_roles_in_the_order_of_their_indices():
    assert tuple(RoleWeights.model_fields) == ROLES


def test_it_requires_siblings_and_attribution():
    assert Echo.group_relative and Echo.needs_attribution and Echo.action_loss == "rl"


@pytest.mark.parametrize("algorithm", [echo(), echo(user=1.0, assistant=0.5)])
def test_it_passes_the_conformance_checks(algorithm):
    check_algorithm(algorithm)


# -- against the tree ------------------------------------------------------------------------------

NODES = st.lists(
    st.tuples(
        st.integers(0, 100),  # parent
        st.sampled_from([*ROLES, "sampled", "sampled"]),
        st.integers(0, 2),  # scaffold
        st.integers(1, 3),  # body
    ),
    min_size=2,
    max_size=12,
)
ALPHAS = {"user": 0.5, "assistant": 0.25, "tool": 0.125}


def paths(nodes):
    """Node indices from root to leaf."""
    parents = [parent % index if index else None for index, (parent, *_) in enumerate(nodes)]
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path = [leaf]
        while (parent := parents[path[0]]) is not None:
            path.insert(0, parent)
        yield path


def branch(nodes, path):
    """The columns of one path. Ids encode the node and the place in it."""
    rows = []
    for index in path:
        _, kind, scaffold, body = nodes[index]
        sampled, role = kind == "sampled", "assistant" if kind == "sampled" else kind
        for place in range(scaffold + body):
            is_body = place >= scaffold
            rows.append((100 * index + place, sampled and is_body, role, is_body, index))
    ids, mask, roles, content, node_ids = map(list, zip(*rows, strict=True))
    return BranchTokens(ids, mask, [-1.0 * m for m in mask], roles, content, node_ids, None)


@given(NODES)
def test_each_observed_node_is_trained_exactly_once(nodes):
    branches = [branch(nodes, path) for path in paths(nodes)]
    rollout = make_rollout(1.0)
    rollout.samples = build_samples(branches, 1.0)
    if not rollout.samples:
        return
    score(echo(**ALPHAS), [rollout])

    wanted, shipped, trained = {}, set(), set()
    for path in paths(nodes):
        new = [i for i in path if nodes[i][1] == "sampled" and i not in trained]
        trained |= set(new)
        if not new:
            continue  # no new sampled tokens, so no sample
        shipped |= set(path)
        first = next(k for k, i in enumerate(path) if nodes[i][1] == "sampled")
        for index in path[first:]:
            _, kind, scaffold, body = nodes[index]
            for place in range(scaffold, scaffold + body):
                if kind in ALPHAS:
                    wanted[100 * index + place] = ALPHAS[kind]

    found = [
        (int(token), float(weight))
        for each in rollout.samples
        if each.ce_weights is not None
        for token, weight in zip(each.token_ids, each.ce_weights, strict=True)
        if weight
    ]
    assert len(found) == len(dict(found))
    assert dict(found) == wanted


def test_rollouts_of_the_test_kit_train_their_tool_messages():
    group = make_group([1.0, 0.0], tool=2)
    score(echo(), group)
    assert all(rollout.samples[0].ce_weights.sum() == pytest.approx(0.2) for rollout in group)
