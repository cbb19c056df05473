"""A program's reward is read from text; the shipped agent."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl_environments.tasks import LOOKUP_SCHEMA, book_entry
from program.reward import terms_of

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(10**6), 10**6)
    | st.integers(10**400, 10**401)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(value=JSON)
def test_a_text_gives_finite_terms_or_says_what_was_found(value: Any) -> None:
    try:
        terms = terms_of(json.dumps(value))
    except ValueError as error:
        assert "expected a number" in str(error)
    else:
        assert terms
        assert all(math.isfinite(term) for term in terms.values())


@pytest.mark.parametrize("text", ["1" * 400, "-" + "9" * 400, "9" * 5000, "[" * 10**5, "1e999"])
def test_a_number_that_no_float_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        terms_of(text)


def test_the_shipped_agent_has_the_tool_of_its_taskset() -> None:
    agent = runpy.run_path(str(Path(__file__).parents[3] / "configs/agents/word_lookup.py"))
    assert agent["TOOL"] == LOOKUP_SCHEMA["function"]
    for key in ("abc", "", "ü"):
        assert agent["book_entry"](key) == book_entry(key)
