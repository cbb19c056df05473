"""``plugins list`` remembers its rows while nothing that they depend on has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prime_rl_devkit import memory
from prime_rl_devkit.memory import remembered


def test_rows_are_found_again_when_a_variable_changes_that_was_read_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "_paths", lambda: set())  # other tests import meanwhile
    monkeypatch.delenv("PLUM_MODE", raising=False)
    monkeypatch.setenv("PLUM_TOKEN", "very-secret")
    monkeypatch.setenv("APPLE", "1")
    calls: list[str] = []

    def find() -> list[dict[str, Any]]:
        calls.append(os.environ.get("PLUM_MODE", "") + os.environ["PLUM_TOKEN"])
        return [{"name": os.environ.get("PLUM_MODE"), "error": None}]

    assert remembered(find) == remembered(find) == [{"name": None, "error": None}]
    assert len(calls) == 1
    monkeypatch.setenv("PLUM_MODE", "two")  # it was not set when it was read
    assert remembered(find) == remembered(find) == [{"name": "two", "error": None}]
    assert len(calls) == 2
    monkeypatch.setenv("APPLE", "2")
    monkeypatch.setenv("PWD", "/elsewhere")
    assert remembered(find) and len(calls) == 2
    monkeypatch.setenv("PLUM_TOKEN", "another")
    assert remembered(find) and len(calls) == 3
    (file,) = (tmp_path / "prime-rl" / "plugins").iterdir()
    assert "PLUM_TOKEN" in file.read_text() and "another" not in file.read_text()
