"""The table of families says what is so: docs/model-families.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, Family
from family_page import PAGE, intro, row
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of models that transformers is about to change
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_does_what_its_row_says(family: Family, tmp_path: Path) -> None:
    assert row(family, tmp_path) in PAGE.read_text().splitlines(), WRITE
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
