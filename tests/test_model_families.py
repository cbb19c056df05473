"""The table of families says what is so: docs/model-families.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import FAMILIES, Family
from family_page import PAGE, intro, row

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
