"""Write the page: the template, and the data as compressed text that the page's script reads.

Tokens are in separate chunks, which are read when a rollout is shown.
"""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import msgspec

from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.errors import RunError
from prime_rl_app.saved_rollouts import StoredStep, read_step, step_files
from prime_rl_tools.replay.score import Replayed
from prime_rl_tools.report.data import differences
from prime_rl_tools.report.source import RunSource, eval_files

SCRIPTS = ("dom", "data", "curves", "tokens", "table", "detail", "tree", "heldout", "main")
"""The page's script, in order: one file per idea."""


@dataclass(frozen=True)
class ReportFacts:
    """The size of a page."""

    num_rollouts: int
    """The held-out ones too."""
    num_tokens: int
    num_bytes: int


def write_report(
    run_dir: Path,
    out: Path,
    *,
    steps: Iterable[StoredStep] | None = None,
    replayed: Replayed | None = None,
    algorithms: Mapping[str, AlgoConfig] | None = None,
    beside: Sequence[Path] = (),
) -> ReportFacts:
    """Write the page of a run to ``out``.

    ``steps``: only these. ``replayed``: their rollouts scored again by ``algorithms``, shown beside
    the run's own credit. ``beside``: other runs, to compare. Raises ``ConfigError`` if a folder is
    no run, ``RunError`` if ``out`` cannot be written.
    """
    sources = [RunSource(run_dir, replayed, algorithms), *map(RunSource, beside)]
    temporary = out.with_name(out.name + ".tmp")
    before, after = template(run_dir, "frozen").split("{{DATA}}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(before)
            for number, source in enumerate(sources):
                suffix = f"-{number}" if number else ""
                _write_chunks(source, None if number else steps, name=f"chunk{suffix}", file=file)
                compared = {"differs": differences([each.config for each in sources])}
                _write_block(file, f"facts{suffix}", source.since() | compared)
            file.write(after)
        temporary.replace(out)
    except OSError as error:
        raise RunError(f"{out}: the page cannot be written: {error}") from error

    columns = [source.table.columns for source in sources]
    return ReportFacts(
        sum(len(each["step"]) for each in columns),
        sum(sum(each["tokens"]) for each in columns),
        out.stat().st_size,
    )


def template(run_dir: Path, mode: str) -> str:
    """The page without its data: ``frozen`` has it as blocks, ``live`` asks the server for it."""
    folder = files("prime_rl_tools.report").joinpath("page")

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    script = "\n".join(text(f"{name}.js") for name in (*SCRIPTS[:-1], mode, SCRIPTS[-1]))
    values = {
        "TITLE": html.escape(run_dir.resolve().name),
        "CONNECT": "; connect-src 'self'" if mode == "live" else "",
        "page.css": text("page.css"),
        "page.js": script,
    }
    page = text("page.html")
    if mode == "live":
        values["DATA"] = ""
    for name, value in values.items():
        page = page.replace(f"{{{{{name}}}}}", value)
    return page


def _write_chunks(
    source: RunSource, steps: Iterable[StoredStep] | None, name: str, file: IO[str]
) -> None:
    number = 0
    held_out = [] if steps is not None else list(eval_files(source.run_dir))
    trained = map(read_step, step_files(source.run_dir).values()) if steps is None else steps
    for is_held_out, found in ((False, trained), (True, map(read_step, held_out))):
        for step in found:
            exports = source.exports(step.step)
            for part in source.add(step, is_held_out):
                rows = [source.shown(stored, exports) for stored in part]
                _write_block(file, f"{name}-{number}", rows)
                number += 1


def _write_block(file: IO[str], name: str, value: Any) -> None:
    """Write JSON as gzip and base64, so that no value can end the HTML block."""
    packed = gzip.compress(msgspec.json.encode(value), compresslevel=6, mtime=0)
    text = base64.b64encode(packed).decode()
    file.write(f'<script type="text/plain" id="{name}">{text}</script>\n')
