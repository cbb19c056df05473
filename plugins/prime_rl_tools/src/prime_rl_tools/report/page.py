"""Write the page: the template, and the data as compressed text that the page's script reads.

Tokens are in separate chunks, which are read when a rollout is shown.
"""

from __future__ import annotations

import base64
import gzip
import html
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import msgspec

from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl_tools.files import reading
from prime_rl_tools.replay.score import Replayed, algorithms_of, read_run_config
from prime_rl_tools.report import data
from prime_rl_tools.report.exports import StepExports
from prime_rl_tools.report.tokens import Pieces
from prime_rl_tools.rollouts import StoredRollout, StoredStep, read_step, step_files

CHUNK_TOKENS = 20_000
"""Approximate tokens of one chunk, which is unpacked when a rollout is shown."""


@dataclass(frozen=True)
class ReportFacts:
    """The size of a page."""

    num_rollouts: int
    num_tokens: int
    num_bytes: int


def write_report(
    run_dir: Path,
    out: Path,
    *,
    steps: Iterable[StoredStep] | None = None,
    replayed: Replayed | None = None,
    algorithms: Mapping[str, AlgoConfig] | None = None,
) -> ReportFacts:
    """Write the page of a run to ``out``.

    ``steps``: only these. ``replayed``: their rollouts scored again by ``algorithms``, shown beside
    the run's own credit. Raises ``ConfigError`` if the folder is no run, ``RunError`` if ``out``
    cannot be written.
    """
    config = read_run_config(run_dir)
    if steps is None:
        steps = map(read_step, step_files(run_dir).values())
    builder = _Builder(run_dir, config, replayed)
    temporary = out.with_name(out.name + ".tmp")
    before, after = _template().split("{{DATA}}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(before.replace("{{TITLE}}", html.escape(run_dir.resolve().name)))
            builder.write_chunks(steps, file)
            _write_block(file, "facts", builder.facts(algorithms))
            file.write(after)
        temporary.replace(out)
    except OSError as error:
        raise RunError(f"{out}: the page cannot be written: {error}") from error
    table = builder.table.columns
    return ReportFacts(len(table["step"]), sum(table["tokens"]), out.stat().st_size)


def _template() -> str:
    folder = files("prime_rl_tools.report")
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"{{{{{name}}}}}", folder.joinpath(name).read_text(encoding="utf-8"))
    return page


def _write_block(file: IO[str], name: str, value: Any) -> None:
    """Write JSON as gzip and base64, so that no value can end the HTML block."""
    packed = gzip.compress(msgspec.json.encode(value), compresslevel=6, mtime=0)
    text = base64.b64encode(packed).decode()
    file.write(f'<script type="text/plain" id="{name}">{text}</script>\n')


class _Builder:
    """Writes the chunks and collects the values for the whole run."""

    def __init__(self, run_dir: Path, config: RunConfig, replayed: Replayed | None) -> None:
        self._run_dir, self._config, self._replayed = run_dir, config, replayed
        self._pieces = Pieces(_tokenizer_folders(run_dir))
        self._has_exports = False
        self._has_references = False
        self.table = data.Table()

    def write_chunks(self, steps: Iterable[StoredStep], file: IO[str]) -> None:
        """Write the rollouts of every step, and add their rows to the table."""
        number = 0
        for step in steps:
            exports = StepExports(self._run_dir, step.step, self._config.seq_len)
            self._has_exports |= bool(exports)
            for part in _parts(step.rollouts):
                rows = [self._row(step.step, stored, exports, number) for stored in part]
                _write_block(file, f"chunk-{number}", rows)
                number += 1

    def _row(
        self, step: int, stored: StoredRollout, exports: StepExports, chunk: int
    ) -> dict[str, Any]:
        scored = self._replayed.of(stored) if self._replayed else None
        self.table.add(step, stored, scored, chunk)
        for sample in stored.rollout.samples:
            self._pieces.add(sample.token_ids)
            self._has_references |= sample.ref_logprobs is not None
        return data.shown(stored, scored, exports)

    def facts(self, algorithms: Mapping[str, AlgoConfig] | None) -> dict[str, Any]:
        """All values except the tokens."""
        envs = self.table.texts["env"]
        described = algorithms_of(self._config, envs or [e.label for e in self._envs()])
        again = {env: data.describe(each) for env, each in (algorithms or {}).items()}
        return data.facts(self._run_dir, self._config) | {
            "algorithms": {env: data.describe(each) for env, each in described.items()},
            "algorithms_again": again if self._replayed else None,
            "table": self.table.as_dict(),
            "scales": self._scales(),
            "pieces": self._pieces.table(),
            "has_tokenizer": self._pieces.is_known,
            "has_exports": self._has_exports,
            "has_references": self._has_references,
        }

    def _envs(self) -> Iterable[Any]:
        return self._config.orchestrator.train.env

    def _scales(self) -> list[float]:
        """The credit with full color, by env."""
        columns = self.table.columns
        credits = defaultdict(list)
        for name in ("credit", "credit_again"):
            for env, value in zip(columns["env"], columns.get(name, ()), strict=False):
                credits[env].append(value)
        return [data.scale(credits[env]) for env in range(len(self.table.texts["env"]))]


def _parts(rollouts: list[StoredRollout]) -> Iterator[list[StoredRollout]]:
    """Chunks of about ``CHUNK_TOKENS`` tokens."""
    part: list[StoredRollout] = []
    size = 0
    for stored in rollouts:
        part.append(stored)
        size += stored.rollout.num_tokens
        if size >= CHUNK_TOKENS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _tokenizer_folders(run_dir: Path) -> Iterator[Path]:
    """Folders that may have the run's tokenizer."""
    yield run_dir / "weights"
    launch = run_dir / "configs" / "launch.json"
    if launch.exists():
        with reading(launch):
            yield Path(msgspec.json.decode(launch.read_bytes(), type=dict[str, Any])["model_path"])
