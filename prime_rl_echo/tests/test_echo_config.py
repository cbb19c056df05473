"""Valid and invalid tables of echo, and valid and invalid results of a filter."""

from textwrap import dedent

import numpy as np
import pytest

from prime_rl import ConfigError, Sample, StreamError
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import make_rollout, score
from prime_rl_echo import Echo


def settings(**table):
    return settings_of(Echo, ALGORITHM, table, "env 'shell': algo")


def refusal(**table):
    with pytest.raises(ConfigError) as caught:
        settings(**table)
    return str(caught.value).removeprefix("env 'shell': algo (algorithm 'echo').")


@pytest.fixture(autouse=True)
def keepers(tmp_path, monkeypatch):
    """A module of filters."""
    (tmp_path / "echo_test_keepers.py").write_text(
        dedent("""
        answers = []

        def answer(rollout):
            return answers.pop(0)

        def without(rollout, *, ids):
            return [[int(t) not in ids for t in s.token_ids] for s in rollout.samples]

        async def later(rollout): ...

        number = 3
        """)
    )
    (tmp_path / "echo_test_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the processes of a run find it too
    import echo_test_keepers

    return echo_test_keepers


def filtered(name, **kwargs):
    table = {"import_path": f"echo_test_keepers.{name}", "kwargs": kwargs}
    return Echo(settings(filter=table))


def weights(algorithm, tool=3):
    """The weights of the tool's tokens, from id 5."""
    rollout = make_rollout(1.0, tool=tool)
    score(algorithm, [rollout, make_rollout(0.0)])
    column = rollout.samples[0].ce_weights
    return None if column is None else np.round(column[5:].astype(float), 6).tolist()


# -- roles -----------------------------------------------------------------------------------------


def test_the_default_is_a_tenth_for_tools():
    assert settings().roles.column().tolist() == pytest.approx([0, 0, 0, 0.1, 0])


def test_setting_a_role_replaces_the_table():
    table = settings(roles={"user": {"alpha": 0.05}})
    assert table.roles.column().tolist() == pytest.approx([0, 0.05, 0, 0, 0])


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, "roles: there is no role to train. Set one, e.g. roles.tool.alpha = 0.1; remove the "
             'table for that default; or use type = "grpo" to train none'),
        ({"tol": {"alpha": 1}}, "roles.tol: unknown key; did you mean 'tool'?"),
        ({"tool": {"alpha": 0}}, "roles.tool.alpha: Input should be greater than 0 (got 0)"),
        ({"tool": {"alpha": float("inf")}},
         "roles.tool.alpha: Input should be a finite number (got inf)"),
        ({"tool": {}}, "roles.tool.alpha: required, and nothing was given"),
    ],
)  # fmt: skip
def test_an_invalid_role_is_refused(roles, message):
    assert refusal(roles=roles) == message


# -- filter: at config time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "filter.import_path: required, and nothing was given"),
        ({"import_path": "keep"},
         "filter: import_path: got 'keep', expected 'module.function', 'module:function' or "
         "'path/to/file.py:function'"),
        ({"import_path": "echo_test_broken.keep"},
         "filter: import_path 'echo_test_broken.keep': module 'echo_test_broken' is there, but "
         "importing it failed: ZeroDivisionError: division by zero (line 1 of "
         "FOLDER/echo_test_broken.py). Fix it."),
        ({"import_path": "echo_test_keepers.keep"},
         "filter: import_path 'echo_test_keepers.keep': module 'echo_test_keepers' has no 'keep', "
         "expected a function of that name. Functions there: answer, without, later."),
        ({"import_path": "echo_test_keepers.number"},
         "filter: import_path 'echo_test_keepers.number': found a int, expected a function. Name "
         "the function itself."),
        ({"import_path": "echo_test_keepers.without"},
         "filter: import_path 'echo_test_keepers.without': the function has the signature "
         "(rollout, *, ids), and the call fn(rollout, **kwargs) does not fit it: missing a "
         "required argument: 'ids'. Change kwargs, or the function."),
        ({"import_path": "echo_test_keepers.without", "kwargs": {"ids": [], "id": 1}},
         "filter: import_path 'echo_test_keepers.without': the function has the signature "
         "(rollout, *, ids), and the call fn(rollout, **kwargs) does not fit it: got an unexpected "
         "keyword argument 'id'. Change kwargs, or the function."),
    ],
)  # fmt: skip
def test_a_filter_that_cannot_be_called_is_refused(table, message, tmp_path):
    # Later versions of Python say "a required keyword-only argument".
    said = refusal(filter=table).replace("keyword-only argument:", "argument:")
    assert said == message.replace("FOLDER", str(tmp_path))


def test_an_async_filter_is_refused():
    assert "the function is async and would never be awaited" in refusal(
        filter={"import_path": "echo_test_keepers.later"}
    )


# -- filter: at run time ---------------------------------------------------------------------------


def test_a_filter_restricts_the_selection():
    assert weights(filtered("without", ids=[6])) == [0.1, 0.0, 0.1]


def test_a_filter_cannot_extend_it(keepers):
    keepers.answers[:] = [[[True] * 8], [[True] * 5]]
    assert weights(filtered("answer")) == [0.1, 0.1, 0.1]
    keepers.answers[:] = [[np.zeros(8, bool)], [[True] * 5]]
    assert weights(filtered("answer")) is None


WHERE = "env 'test', group 0: algo 'echo': filter echo_test_keepers.answer"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, ": got None, expected one keep-mask for each of the rollout's 1 samples"),
        ([], ": got 0 of nothing, expected one keep-mask for each of the rollout's 1 samples"),
        ([[True], [True]],
         ": got 2 of list, expected one keep-mask for each of the rollout's 1 samples"),
        ([[True] * 7], ", sample 0: got 7 of bool, expected one boolean for each of its 8 tokens"),
        ([[0.5] * 8], ", sample 0: got 8 of float, expected one boolean for each of its 8 tokens"),
        ([None], ", sample 0: got None, expected one boolean for each of its 8 tokens"),
    ],
)  # fmt: skip
def test_a_result_of_the_wrong_shape_is_an_error(keepers, answer, message):
    keepers.answers[:] = [answer]
    with pytest.raises(StreamError) as caught:
        weights(filtered("answer"))
    assert str(caught.value) == WHERE + message


def fork(*parts):
    """A sample of ``(first id, tokens, role, is sampled, is repeated)``."""
    rows = [(start + place, *rest) for start, length, *rest in parts for place in range(length)]
    ids, roles, sampled, repeated = zip(*rows, strict=True)
    return Sample(
        token_ids=ids,
        loss_mask=sampled,
        inference_logprobs=np.zeros(len(ids)),
        roles=roles,
        is_content=[True] * len(ids),
        is_repeat=repeated if any(repeated) else None,
    )


USER, ASSISTANT, TOOL = 1, 2, 3


def test_a_weight_goes_to_the_kept_message_not_to_an_equal_one(keepers):
    """Two siblings have equal actions and observations. The third sample continues the second one,
    and the filter keeps that observation only in the third sample."""
    new, old = (True, False), (False, True)
    asked, heard = (0, 2, USER, False), (3, 2, TOOL, False)
    rollout = make_rollout(1.0)
    rollout.samples = [
        fork((*asked, False), (2, 1, ASSISTANT, *new), (*heard, False)),
        fork((*asked, True), (2, 1, ASSISTANT, *new), (*heard, False), (8, 1, ASSISTANT, *new)),
        fork((*asked, True), (2, 1, ASSISTANT, *old), (*heard, True), (9, 1, ASSISTANT, *new)),
    ]
    nodes = ([0, 0, 1, 2, 2], [0, 0, 3, 4, 4, 5], [0, 0, 3, 4, 4, 6])
    for sample, column in zip(rollout.samples, nodes, strict=True):
        sample.node_ids = np.array(column, np.int32)
    keepers.answers[:] = [[[False] * 5, [False] * 6, [True] * 6]]
    score(filtered("answer"), [rollout])
    first, second, third = (sample.ce_weights for sample in rollout.samples)
    assert first is None and third is None
    assert second.tolist() == pytest.approx([0, 0, 0, 0.1, 0.1, 0])


def test_a_shared_observation_keeps_the_largest_weight(keepers):
    """Only the last of three branches keeps it, but each part trains in its first sample."""
    new, old = (True, False), (False, True)
    rollout = make_rollout(1.0)
    rollout.samples = [
        fork((0, 2, USER, False, False), (2, 1, ASSISTANT, *new), (3, 2, TOOL, False, False)),
        fork((0, 2, USER, *old), (2, 1, ASSISTANT, *old), (3, 1, TOOL, *old),
             (9, 1, ASSISTANT, *new), (10, 1, TOOL, False, False)),
        fork((0, 2, USER, *old), (2, 1, ASSISTANT, *old), (3, 1, TOOL, *old),
             (9, 1, ASSISTANT, *old), (10, 1, TOOL, *old), (11, 1, ASSISTANT, *new)),
    ]  # fmt: skip
    keepers.answers[:] = [[[False] * 5, [False] * 6, [True] * 7]]
    score(filtered("answer"), [rollout])
    first, second, third = (sample.ce_weights for sample in rollout.samples)
    assert first.tolist() == pytest.approx([0, 0, 0, 0.1, 0])
    assert second.tolist() == pytest.approx([0, 0, 0, 0, 0, 0.1])
    assert third is None
