"""Markdown from docstrings and rows."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100

GENERATED = """\
<!-- Generated from {source} by `python -m tools.docs`.
     Edit the docstrings there, not this page. -->"""


def plain(docstring: str | None) -> str:
    """A docstring as Markdown, with rewrapped paragraphs and list items."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    return "\n\n".join(map(_paragraph, text.split("\n\n"))) if text else ""


def _paragraph(text: str) -> str:
    items = re.split(r"\n(?=\* )", text)
    return "\n".join(wrap(item, "  " if item.startswith("* ") else "") for item in items)


def wrap(text: str, indent: str = "") -> str:
    """Wrap one paragraph."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def one_line(docstring: str | None) -> str:
    """A docstring as one table cell."""
    return " ".join(plain(docstring).split()).replace("|", "\\|")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with one-line cells."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
