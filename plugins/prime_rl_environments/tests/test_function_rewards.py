"""What reward functions are called with, and what they may return. No verifiers."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from function.rewards import (
    COMPLETION_IDS,
    GROUP,
    ONE,
    RewardFault,
    added,
    check_columns,
    check_weighted,
    check_weights,
    reward_functions,
    terms_of,
    terms_of_group,
)
from prime_rl import ConfigError

COLUMNS = ("answer", "level", "hint")
ROW: dict[str, Any] = {"prompt": "2+3?", "answer": "5", "level": 2, "hint": None}
AVAILABLE = ROW | {"reply": "it is 5", "messages": [{"role": "user"}], COMPLETION_IDS: [7, 8]}


def call(function: Any, **available: Any) -> Any:
    (made,) = reward_functions([function])
    return asyncio.run(made(**(available or AVAILABLE)))


def named(parameters: str) -> Any:
    """A function that returns what it was called with, by name."""
    names: dict[str, Any] = {}
    exec(f"def f({parameters}): return dict(locals())", names)
    return names["f"]


@given(st.sets(st.sampled_from([*ONE, *COLUMNS])), st.sets(st.sampled_from(["extra", "other"])))
def test_a_function_gets_what_its_parameters_name_and_defaults_stay(
    taken: set[str], defaulted: set[str]
) -> None:
    function = named(", ".join([*sorted(taken), *(f"{name}=9" for name in sorted(defaulted))]))
    made = reward_functions([function])
    check_columns(made, [ROW, ROW])
    expected = {name: AVAILABLE[name] for name in taken} | dict.fromkeys(defaulted, 9)
    assert call(function) == expected


@given(st.sets(st.sampled_from([*ONE, *COLUMNS]), min_size=1), st.sampled_from(["/", "*"]))
def test_parameters_by_position_only_and_by_name_only(taken: set[str], mark: str) -> None:
    names = ", ".join(sorted(taken))
    function = named(f"{names}, /" if mark == "/" else f"*, {names}")
    assert call(function) == {name: AVAILABLE[name] for name in taken}


def test_a_function_that_changes_what_it_got_changes_it_for_no_other_call() -> None:
    def empties(reply: str, *, tags: list[str], messages: list[dict[str, Any]], **rest: Any) -> int:
        messages[0]["content"] = "gone"
        tags.pop()
        return len(tags)

    (made,) = reward_functions([empties])
    available = AVAILABLE | {"tags": ["a", "b"], "messages": [{"role": "user", "content": "x"}]}
    before = json.dumps(available)
    assert [asyncio.run(made(**available)) for _ in range(3)] == [1, 1, 1]
    assert json.dumps(available) == before


def test_kwargs_get_everything() -> None:
    assert call(lambda **row: row) == AVAILABLE


class Judge:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, reply: str) -> float:
        return self.value

    async def later(self, reply: str) -> float:
        return self.value + 1


async def later(reply: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(answer in reply)


@pytest.mark.parametrize(
    ("function", "result", "name"),
    [
        (lambda reply, answer: float(answer in reply), 1.0, "reward"),
        (later, 1.0, "later"),
        (Judge(3.0), 3.0, "Judge"),
        (Judge(3.0).later, 4.0, "later"),
        (functools.partial(later, answer="6"), 0.0, "later"),
        (lambda reply: later(reply, "5"), 1.0, "reward"),
    ],
)
def test_lambdas_async_functions_objects_methods_and_partials(
    function: Any, result: float, name: str
) -> None:
    (made,) = reward_functions([function])
    assert made.name == name
    check_columns([made], [ROW])
    assert asyncio.run(made(**AVAILABLE)) == result


def test_functions_of_one_name_get_numbers() -> None:
    made = reward_functions([lambda reply: 0, lambda reply: 1, later])
    assert [each.name for each in made] == ["reward", "reward_2", "later"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "expected a function, found int 3"),
        (lambda *replies: 0, r"takes \*replies, and rewards are called by name"),
        (named("reply, replies"), "takes both 'reply' .* and 'replies'"),
        (named("reply=1, /"), "by position only, and has a default"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_functions([function])


@pytest.mark.parametrize(
    ("parameters", "row", "message"),
    [
        ("anser", ROW, "'anser' is no column of the data, whose columns are .* 'answer'"),
        ("completions", ROW, r"It is called 'reply' \(one text\) or 'replies' here"),
        ("response", ROW, "It is called 'reply' here"),
        ("reply", {"prompt": "a", "reply": "b"}, "the data has a column 'reply' too"),
        ("messages=1", {"prompt": "a", "messages": "b"}, "a column 'messages' too"),
        ("replies", {"prompt": "a", "replies": "b"}, "a column 'replies' too"),
        ("replies, answr", ROW, "nor one of replies, prompt, messages, completion_ids"),
    ],
)
def test_parameters_that_are_no_columns_are_refused(
    parameters: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_columns(reward_functions([named(parameters)]), [row])


def test_a_row_without_a_column_is_named_unless_there_is_a_default() -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c"}]
    with pytest.raises(ConfigError, match="row 2 has no column 'answer', which it takes"):
        check_columns(reward_functions([named("answer")]), rows)
    function = named("answer='?'")
    check_columns(reward_functions([function]), rows)
    assert call(function, prompt="c", reply="d") == {"answer": "?"}


@given(st.text(min_size=1).filter(lambda name: name not in (*ONE, *GROUP, *ROW)))
def test_any_other_name_is_refused_with_the_columns(name: str) -> None:
    if not name.isidentifier():
        return
    try:
        function = named(name)
    except SyntaxError:  # a keyword
        return
    with pytest.raises(ConfigError, match="is no column of the data"):
        check_columns(reward_functions([function]), [ROW])


# -- what a function may return ------------------------------------------------------------------


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(10**15), 10**15),
    st.floats(-1e15, 1e15),
    st.floats(-1e6, 1e6, width=32).map(np.float32),
    st.integers(-9, 9).map(np.int64),
    st.decimals(-99, 99).map(Decimal),
    st.floats(-9, 9).map(np.asarray),
)
WRONG = st.one_of(
    st.none(),
    st.text(),
    st.lists(NUMBERS),
    st.sampled_from([math.nan, math.inf, -math.inf, 1j, 10**400, 1e30, np.zeros(2), {}, b"1"]),
    st.dictionaries(st.integers(), NUMBERS, min_size=1),
    st.dictionaries(st.text(min_size=1), st.none(), min_size=1),
)
(SINGLE,) = reward_functions([named("reply")])
(SIBLINGS,) = reward_functions([named("replies")])


@given(NUMBERS)
def test_a_number_is_one_term(value: Any) -> None:
    assert terms_of(SINGLE, value) == {"f": float(value)}


@given(st.dictionaries(st.text(min_size=1), NUMBERS, min_size=1))
def test_a_dict_is_named_terms(value: dict[str, Any]) -> None:
    assert terms_of(SINGLE, value) == {name: float(each) for name, each in value.items()}


@given(WRONG)
def test_anything_else_is_refused_with_the_functions_name(value: Any) -> None:
    with pytest.raises(RewardFault, match="f"):
        terms_of(SINGLE, value)


@given(st.lists(st.one_of(NUMBERS, st.dictionaries(st.text(min_size=1), NUMBERS, min_size=1))))
def test_a_group_reward_gives_one_for_each_reply(values: list[Any]) -> None:
    terms = [terms_of(SIBLINGS, value) for value in values]
    assert terms_of_group(SIBLINGS, values, len(values)) == terms
    assert terms_of_group(SIBLINGS, tuple(values), len(values)) == terms
    for wrong in (len(values) + 1, len(values) - 1):
        with pytest.raises(
            RewardFault, match=f"returned {len(values)} rewards for {wrong} replies"
        ):
            terms_of_group(SIBLINGS, values, wrong)


@given(st.one_of(NUMBERS, st.none(), st.text(), st.binary()))
def test_a_group_reward_that_returns_no_list_is_refused(value: Any) -> None:
    with pytest.raises(RewardFault, match="expected a list with a reward for each of the 3"):
        terms_of_group(SIBLINGS, value, 3)


def test_an_array_is_a_list_of_rewards() -> None:
    assert terms_of_group(SIBLINGS, np.array([1.0, 0.5]), 2) == [{"f": 1.0}, {"f": 0.5}]


def test_what_a_list_and_none_are_told() -> None:
    with pytest.raises(RewardFault, match="names 'replies' among its parameters"):
        terms_of(SINGLE, [1.0, 0.0])
    with pytest.raises(RewardFault, match="end without a return"):
        terms_of(SINGLE, None)


def test_terms_add_up_once_each_and_every_weight_needs_a_term() -> None:
    assert added([{"a": 1.0}, {"b": 2.0}]) == {"a": 1.0, "b": 2.0}
    with pytest.raises(RewardFault, match="two rewards have a term 'a'"):
        added([{"a": 1.0}, {"a": 2.0}])
    check_weighted({"a": 1.0}, {"a": 3.0})
    with pytest.raises(RewardFault, match=r"weights names 'c', .* the terms are: a, b"):
        check_weighted({"a": 1.0, "b": 2.0}, {"c": 1.0})


@pytest.mark.parametrize("weight", [math.nan, math.inf, True, "1"])
def test_a_weight_is_a_finite_number(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights\.a: expected a"):
        check_weights({"a": weight})


async def _judged() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "label"),
    [
        (lambda reply: {"judge": _judged()}, r"reward\['judge'\]"),
        (lambda replies: [_judged() for _ in replies], "reward"),
    ],
)
def test_a_coroutine_that_nothing_awaited_is_named(function: Any, label: str) -> None:
    (made,) = reward_functions([function])
    said = rf"{label} returned the coroutine _judged\(\), which nothing awaited"
    with pytest.raises(RewardFault, match=said):
        if made.is_group:
            terms_of_group(made, function(["a"]), 1)
        else:
            terms_of(made, function("a"))
