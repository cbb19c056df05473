"""``--minutes``: no test begins late, and each day other files come first."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
DAY = 86_400
FILES = ("a", "b", "c", "d", "e", "f", "g")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Files with a slow test, and between them files without one."""
    pytester.makeconftest(CONFTEST.read_text("utf-8"))
    pytester.makeini("[pytest]\nmarkers = slow\nasyncio_default_fixture_loop_scope = function\n")
    for name in FILES:
        slow = f"import pytest\n@pytest.mark.slow\ndef test_{name}(): pass\n"
        pytester.makepyfile(**{f"test_{name}": slow, f"test_{name}_fast": "def test_it(): pass"})
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # no nursery of processes
    return pytester


def first(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, day: int) -> str:
    monkeypatch.setenv("PRIME_RL_TESTS_BEGAN", str(10**6 * DAY + day * DAY))
    options = ("-q", "--collect-only", "-m", "slow", "--minutes", "5")
    lines = project.runpytest_inprocess(*options).outlines
    return next(line for line in lines if "::" in line).partition("::")[0]


def test_each_selected_file_is_first_on_some_day(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [first(project, monkeypatch, day) for day in range(len(FILES))]
    assert {*seen} == {f"test_{name}.py" for name in FILES}


@pytest.mark.parametrize(("began", "passed"), [(0, 0), (10**6 * DAY, 7)], ids=["late", "in time"])
def test_what_would_begin_late_is_skipped_and_counted(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, began: int, passed: int
) -> None:
    monkeypatch.setenv("PRIME_RL_TESTS_BEGAN", str(began))
    done = project.runpytest_inprocess("-m", "slow", "-rs", "--minutes", "5")
    done.assert_outcomes(passed=passed, skipped=7 - passed, deselected=7)
    assert ("not run: it would have begun more than 5 minutes" in done.stdout.str()) == (not passed)
