"""docs/estimators.md: every installed algorithm has a card, and each card is what the lab finds."""

from pathlib import Path

import pytest
import torch
from tools.docs.estimators_page import card, offers

NAMES = sorted(offers())
PAGE = (Path(__file__).parents[1] / "docs/estimators.md").read_text()
QUICK = ("max_rl",)
"""The others are slow together."""


def cards():
    """The cards of the page by name."""
    parts = PAGE.split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part.strip()}" for part in parts}


def test_every_algorithm_has_a_card():
    assert [*cards()] == NAMES


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_card_is_what_the_lab_finds(name):
    torch.set_num_threads(1)
    assert cards()[name] == card(name).strip(), "run: python -m tools.docs --estimators"


def test_no_algorithm_that_claims_an_objective_is_refused():
    for name, found in cards().items():
        assert "fails on" not in found, name
        assert "points away" not in found, name
