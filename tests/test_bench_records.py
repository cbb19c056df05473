"""Figures are written by the benches, and pages take them from the records."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench.__main__ import main as bench_main
from bench.records import WRITES, read, record
from tools.docs.figures import FIGURE, PAGES, TEMPLATES, filled

ROOT = Path(__file__).resolve().parents[1]


def test_the_pages_have_the_figures_of_the_records() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        assert "<!-- figures: " in text
        assert filled(text) == text, "run: make docs"


def test_every_record_is_shown_and_says_what_it_was_measured_with() -> None:
    figures = read()
    named = FIGURE.findall(TEMPLATES.read_text("utf-8"))
    shown = {name for first, second, _ in named for name in (first, second) if name}
    assert set(figures) >= shown
    for figure in figures.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", figure["date"]), figure
        assert figure["command"].startswith("python -m bench "), figure
        said = {key: value for key, value in figure.items() if key not in ("value", "unit")}
        assert all(said.values()), figure
        assert figure["unit"] or figure["name"].startswith("gpu."), figure  # rewards, cosines


def test_a_ratio_and_the_conditions_come_from_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = tmp_path / "benchmarks.json"
    monkeypatch.setenv(WRITES, "python -m bench step short")
    record("step.short.full.wall", 0.1234567, "s", data)
    record("step.short.trl1.wall", 0.25, "s", data)
    record("step.short.full.wall", 0.125, "s", data)  # replaces the first
    figures = read(data)
    assert figures["step.short.full.wall"]["value"] == 0.125
    template = "## one\n{step.short.trl1.wall / step.short.full.wall:.2f}x by {conditions step}\n"
    monkeypatch.setattr("tools.docs.figures.TEMPLATES", tmp_path / "figures.md")
    (tmp_path / "figures.md").write_text(template)
    page = filled("<!-- figures: one -->\nold\n<!-- /figures -->", figures)
    measured = figures["step.short.full.wall"]
    assert page.splitlines()[1].startswith(
        f"2.00x by {measured['date']}, `python -m bench step short`, commit {measured['commit']}, "
        f"CPU {measured['cpu']}, versions Python "
    )
    with pytest.raises(KeyError, match="no figure under step"):
        filled("<!-- figures: one -->\n<!-- /figures -->", {})


def test_nothing_is_recorded_without_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(WRITES, raising=False)
    record("wire.bytes", 12.0, "bytes per token", tmp_path / "benchmarks.json")
    assert not (tmp_path / "benchmarks.json").exists()


def test_two_records_of_one_figure_are_refused(tmp_path: Path) -> None:
    line = '{"name": "wire.bytes", "value": 1}'
    (tmp_path / "benchmarks.json").write_text(f"[{line}, {line}]")
    with pytest.raises(ValueError, match="two records"):
        read(tmp_path / "benchmarks.json")


@pytest.mark.slow
def test_a_bench_records_its_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bench.wire

    monkeypatch.setattr(bench.records, "RECORDS", tmp_path / "benchmarks.json")
    monkeypatch.setenv(WRITES, "python -m bench wire")
    results = bench.wire.run()
    figures = read(tmp_path / "benchmarks.json")
    assert set(figures) == {"wire.bytes", "wire.encode", "wire.decode"}
    assert figures["wire.bytes"]["value"] == pytest.approx(results["bytes_per_token"], rel=1e-5)
    assert set(figures) <= set(read(ROOT / "docs/benchmarks.json"))


@pytest.mark.slow
def test_options_after_a_name_reach_the_bench() -> None:
    command = [sys.executable, "-m", "bench", "--record", "publish", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "== publish" in done.stdout
    assert "--large" in done.stdout and "--folder" in done.stdout


def test_a_word_that_is_no_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["--record", "publishing"]) == 2
    assert "no bench 'publishing'" in capsys.readouterr().err


def test_every_section_with_figures_has_a_date() -> None:
    """Of the table itself, or of its section."""
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if re.search(r"^\|.*\d", section, re.MULTILINE):
            assert re.search(r"20\d\d-\d\d-\d\d", section), section.partition("\n")[0]
