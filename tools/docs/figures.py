"""Figures of ``docs/benchmarks.json`` in the README, ``docs/benchmarks.md`` and
``docs/recipes.md``.

A page has marked places, ``<!-- figures: NAME -->`` to ``<!-- /figures -->``. Their text is the
section ``NAME`` of ``tools/docs/figures.md``, in which braces hold figures:

    {step.even.full.wall:.2f}                         one, formatted as by Python
    {step.even.trl1.wall / step.even.full.wall:.2f}   a ratio
    {conditions step.even}                            what those under a name were measured with
    {table gpu or nothing measured yet}               all under a name, or a text if there is none
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bench.records import RECORDS, Figure, read

ROOT = Path(__file__).parents[2]
TEMPLATES = Path(__file__).with_name("figures.md")
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "recipes.md")

PLACE = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- /figures -->", re.DOTALL)
NAME = r"[a-z_][\w.-]*"
FIGURE = re.compile(rf"\{{({NAME})(?: / ({NAME}))?(?::([^}}]+))?\}}")
CONDITIONS = re.compile(rf"\{{conditions ((?:{NAME} ?)+)\}}")
TABLE = re.compile(rf"\{{table ({NAME}) or ([^}}]+)\}}")


def filled(page: str, figures: Mapping[str, Figure] | None = None) -> str:
    """A page with the figures in its marked places. Raises ``KeyError`` for a place or a figure
    that does not exist."""
    figures = read(RECORDS) if figures is None else figures
    templates = _templates()

    def place(match: re.Match[str]) -> str:
        text = _text(templates[match[1]], figures)
        return f"<!-- figures: {match[1]} -->\n{text}\n<!-- /figures -->"

    return PLACE.sub(place, page)


def _templates() -> dict[str, str]:
    sections = re.split(r"^## ([\w-]+)\n", TEMPLATES.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: text.strip("\n") for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


def _text(template: str, figures: Mapping[str, Figure]) -> str:
    def figure(match: re.Match[str]) -> str:
        value = figures[match[1]]["value"]
        if match[2]:
            value /= figures[match[2]]["value"]
        return format(value, match[3] or ",g")

    def conditions(match: re.Match[str]) -> str:
        return _conditions(match[1].split(), figures)

    def table(match: re.Match[str]) -> str:
        return _table(match[1], figures) or match[2]

    return FIGURE.sub(figure, CONDITIONS.sub(conditions, TABLE.sub(table, template)))


def _table(prefix: str, figures: Mapping[str, Figure]) -> str:
    """All figures under a name, a row for each table of them, and their conditions; empty if there
    are none."""
    rows: dict[str, dict[str, str]] = {}
    for name, figure in figures.items():
        if name.startswith(f"{prefix}."):
            path, _, last = name.removeprefix(f"{prefix}.").rpartition(".")
            value = (
                f"{figure['value']:,.4g}" if figure["value"] < 1e4 else f"{figure['value']:,.0f}"
            )
            rows.setdefault(_words(path), {})[last] = f"{value} {figure['unit']}".strip()

    if not rows:
        return ""
    columns = [*next(iter(rows.values()))]
    if len(rows) > 1 and all([*cells] == columns for cells in rows.values()):
        head = [f"| what | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        lines = [f"| {words} | {' | '.join(cells.values())} |" for words, cells in rows.items()]
    else:
        head = ["| what | measured |", "|---|---|"]
        lines = [
            f"| {words} | {'; '.join(f'{last} {value}' for last, value in cells.items())} |"
            for words, cells in rows.items()
        ]
    return "\n".join([*head, *lines, "", f"{_conditions([prefix], figures)}."])


def _words(path: str) -> str:
    """The parts of a name side by side. A dot between two digits is that of a number."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)", ", ", path)


def _conditions(prefixes: list[str], figures: Mapping[str, Figure]) -> str:
    """Date, command, commit, CPU and versions of the figures under some names: each set once."""
    found = dict[tuple[str, ...], None]()
    for prefix in prefixes:
        of_prefix = [each for name, each in figures.items() if f"{name}.".startswith(f"{prefix}.")]
        if not of_prefix:
            raise KeyError(f"no figure under {prefix}")
        for each in of_prefix:
            device = (
                f"GPU {each['gpu']}, CPU {each['cpu']}" if "gpu" in each else f"CPU {each['cpu']}"
            )
            key = (each["date"], each["command"], each["commit"], device, each["versions"])
            found[key] = None

    return "; ".join(
        f"{date}, `{command}`, commit {commit}, {device}, versions {versions}"
        for date, command, commit, device, versions in found
    ).replace(
        "commit not recorded, CPU not recorded, versions not recorded",
        "commit, CPU and versions not recorded",
    )
