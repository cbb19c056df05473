"""Lines of a process's log, as JSON."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.logs import JSON_LOGS, set_up_logging


def lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int | None = None
) -> list[str]:
    """What a process logs for a text of two lines, and for an error."""
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    set_up_logging("info", rank)
    root = logging.root
    root.debug("hidden")
    root.info("café %d%%\nsecond", 7)
    try:
        raise ValueError('a "quoted" reason')
    except ValueError:
        root.exception("it failed")
    return capsys.readouterr().err.splitlines()


def test_each_line_is_an_object_with_the_process_and_the_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(JSON_LOGS, "1")
    monkeypatch.setenv(PROCESS, "2:trainer.1:/runs/mine")
    first, second = map(json.loads, lines(monkeypatch, capsys, rank=3))
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {
        "level": "info",
        "process": "trainer.1",
        "rank": 3,
        "logger": "root",
        "message": "café 7%\nsecond",
    }
    assert second["level"] == "error" and second["message"] == "it failed"
    assert second["exception"].endswith('ValueError: a "quoted" reason')


def test_by_default_lines_are_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(JSON_LOGS, raising=False)
    assert lines(monkeypatch, capsys)[0].endswith("INFO root: café 7%")
