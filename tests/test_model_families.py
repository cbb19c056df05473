"""The table of families says what is so: docs/model-families.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from family_models import FAMILIES, Family
from family_page import PAGE, intro, is_as_good, measured_version, row
from transformers import AutoModelForCausalLM

from prime_rl.trainer.unread import unread_model

WRITE = "Run: make docs-families"


def test_the_page_has_a_row_for_each_family_and_no_defect() -> None:
    text = PAGE.read_text()
    assert text.startswith(intro()), WRITE
    rows = text.removeprefix(intro()).splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    assert names == [family.name for family in FAMILIES], WRITE
    assert "DEFECT" not in text


WRITTEN = "| A | `AForCausalLM` | works, prompts not shared | refused: a state | listed |"


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        ("works, prompts not shared", "refused: a state", True),
        ("works", "refused: another reason", True),
        ("works, prompts not shared", "works", True),
        ("works, documents apart", "works", False),
        ("refused: off by 1.0", "works", False),
        ("works", "DEFECT: KeyError: 'a'", False),
    ],
)
def test_with_another_transformers_a_family_may_do_better_and_not_worse(
    trainer: str, engine: str, expected: bool
) -> None:
    row = f"| A | `AForCausalLM` | {trainer} | {engine} | listed |"
    assert is_as_good(row, WRITTEN) == expected
    assert not is_as_good(row.replace("| A |", "| B |"), WRITTEN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of models that transformers is about to change
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_does_what_its_row_says(family: Family, tmp_path: Path) -> None:
    found = row(family, tmp_path)
    start = f"| {family.name} | "
    (written,) = (line for line in PAGE.read_text().splitlines() if line.startswith(start))
    if transformers.__version__ == measured_version():
        assert found == written, WRITE
    else:
        assert is_as_good(found, written), f"{found}\nexpected at least {written}"
    _check_reading_in_parts(tmp_path)


def _check_reading_in_parts(folder: Path) -> None:
    """The weights of a model whose ranks read their shards are those that transformers reads."""
    model, whole = unread_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model is not None
    assert model.config.to_dict() == whole.config.to_dict()
    assert all(each.equal(whole.get_buffer(name)) for name, each in model.named_buffers())
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == dict(whole.named_parameters(remove_duplicate=False)).keys()
    for name, each in found.items():
        expected, values = whole.get_parameter(name).flatten(), torch.empty(each.numel())
        middle = each.numel() // 3  # in two parts, as two ranks
        each.read_from_files(values[:middle], 0)
        each.read_from_files(values[middle:], middle)
        assert values.equal(expected), name
