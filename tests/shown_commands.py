"""The commands that documents, docstrings, comments and messages show, outside of tests.

A command is a line of a fenced or indented block, or stands in backticks, or follows words in a
comment or message: ``Run: prime-rl plugins list``.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]

START = r"(?:[\w.$({})-]*/)?(?:prime-rl|python3? -m|make|pip)(?= )"
PROMPT = r"^(?:\$ |[A-Z_]+=\S+ )*"
SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
FENCE = re.compile(r"^ *```(\w*).*?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
HASH = re.compile(r"(?:^|\s)#+ ?(.*)$")
PROSE_END = re.compile(r"[.,;:)\"'](?=\s|$)|[.,;:]?\)|\s[(—]|\\n|\n|`|$")
SHELL_END = {"|", "||", "&&", "&", ";", ">", "2>", "<"}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One command. ``form``: a ``line`` to copy; a ``span`` in backticks, which may omit arguments;
    ``prose``, where the words after a command may be those of a sentence."""

    where: str
    words: tuple[str, ...]
    form: Literal["line", "span", "prose"]

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def shown_commands() -> list[Shown]:
    """Every command of every tracked text outside of tests and of the changelog."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = list[Shown]()
    for name in sorted(set(listed.stdout.splitlines())):
        path = ROOT / name
        of_a_test = "tests" in path.relative_to(ROOT).parts
        if of_a_test or not path.is_file() or name == "CHANGELOG.md":
            continue
        if path.suffix == ".md":
            found += _of_markdown(name, path.read_text("utf-8"))
        elif path.suffix == ".py":
            found += _of_python(name, path.read_text("utf-8"))
        elif (
            path.suffix in (".toml", ".sh", ".yml", ".yaml", ".txt", "") and path.name != "LICENSE"
        ):
            found += _of_comments(name, path.read_text("utf-8"))

    return found


def _of_markdown(name: str, text: str) -> Iterator[Shown]:
    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    for block in FENCE.finditer(text):
        first = text.count("\n", 0, block.start(2)) + 1
        for shown in _of_lines(name, block[2], first):
            is_output = block[1] == "text"
            yield replace(shown, form="prose") if is_output else shown

    without_blocks = FENCE.sub(blank, text)
    for span in SPAN.finditer(without_blocks):
        where = f"{name}:{without_blocks.count(chr(10), 0, span.start()) + 1}"
        yield from _of_span(where, span[2])

    for number, line in enumerate(without_blocks.splitlines(), 1):
        if line.startswith("    "):
            yield from _of_lines(name, line, number)


def _of_python(name: str, text: str) -> Iterator[Shown]:
    tree = ast.parse(text)
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _of_prose(name, node.value, node.lineno)
        elif isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            ]
            yield from _of_prose(name, "".join(parts), node.lineno)

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _of_prose(name, token.string.lstrip("# "), token.start[0])


def _of_comments(name: str, text: str) -> Iterator[Shown]:
    for number, line in enumerate(text.splitlines(), 1):
        comment = HASH.search(line)
        if comment is not None and re.match(rf"  +{START}", comment[1]):
            yield from _of_lines(name, comment[1].rstrip("\\ "), number)
        elif comment is not None:
            yield from _of_prose(name, comment[1], number)
        elif line.lstrip().startswith(('"', "'")) or " = " in line:
            continue  # a value
        elif not name.startswith(("Makefile", ".ci")):
            yield from _of_lines(name, line, number)


def _of_prose(name: str, text: str, first: int) -> Iterator[Shown]:
    """Blocks, backticks, indented lines, and what follows words."""

    def blank(match: re.Match[str]) -> str:
        return "`" + "\n" * match[0].count("\n")

    for block in FENCE.finditer(text):
        yield from _of_lines(name, block[2], first + text.count("\n", 0, block.start(2)))

    without_blocks = FENCE.sub(blank, text)
    for span in SPAN.finditer(without_blocks):
        where = f"{name}:{first + without_blocks.count(chr(10), 0, span.start())}"
        yield from _of_span(where, span[2])

    for offset, line in enumerate(SPAN.sub(blank, without_blocks).split("\n")):
        where = f"{name}:{first + offset}"
        if re.match(rf"    +{START}", line):
            yield from _of_lines(name, line, first + offset)
            continue
        for start in re.finditer(rf"(?:(?<![\w./-])|(?<=Run: )|(?<=run: )){START}", line):
            end = PROSE_END.search(line, start.end())
            assert end is not None
            words = _words(line[start.start() : end.start()])
            follows = line[: start.start()].lower().endswith("run: ")
            if words[0] in ("prime-rl", "python", "python3") or follows:
                yield Shown(where=where, words=words, form="span" if follows else "prose")


def _of_span(where: str, text: str) -> Iterator[Shown]:
    text = re.sub(PROMPT, "", " ".join(text.split()))
    if re.match(START, text):
        yield Shown(where=where, words=_words(text), form="span")


def _of_lines(name: str, text: str, first: int) -> Iterator[Shown]:
    """Commands that fill a line, each continued after a backslash."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        where = f"{name}:{first + number}"
        line = re.sub(PROMPT, "", lines[number].strip())
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = f"{line[:-1]} {lines[number].strip()}"

        number += 1
        if re.match(START, line):
            line = re.split(r"\s{3,}(?=[a-z(\[])", line)[0]  # what the command does, in a column
            yield Shown(where=where, words=_words(line), form="line")


def _words(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an apostrophe
        words = text.split()

    end = next((index for index, word in enumerate(words) if word in SHELL_END), len(words))
    first = Path(words[0]).name
    return (first, *words[1:end])
