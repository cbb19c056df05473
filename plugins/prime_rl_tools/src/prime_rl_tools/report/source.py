"""A run as the page reads it: a table that grows by whole steps, and the tokens in chunks.

A page that knows the table up to some row asks ``since`` for the rest, so a frozen page and a live
one read the same values: the frozen one asks once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.errors import PrimeRLError
from prime_rl.rundir.rows import read_table
from prime_rl_app.run_states import run_info
from prime_rl_app.saved_rollouts import StoredRollout, StoredStep, numbered, read_step, step_files
from prime_rl_tools.doctor import EVERY, diagnose
from prime_rl_tools.replay.score import Replayed, algorithms_of, read_run_config
from prime_rl_tools.report import data
from prime_rl_tools.report.exports import StepExports
from prime_rl_tools.report.tokens import Pieces, prompt_ids, reply_ids

CHUNK_TOKENS = 20_000
"""Approximate tokens of one chunk, which is unpacked when a rollout is shown."""


class Have(NamedTuple):
    """What a page has of a run: ``epoch`` of the reading, and how much of it."""

    epoch: int = 0
    rows: int = 0
    pieces: int = 0
    metrics: int = 0
    """Bytes of ``metrics.jsonl``."""
    version: int = 0
    """Version of the data that the server has read."""


class _Chunk(NamedTuple):
    path: Path
    first: int
    last: int


class RunSource:
    """One run. ``replayed``: its rollouts scored again by ``algorithms``."""

    def __init__(
        self,
        run_dir: Path,
        replayed: Replayed | None = None,
        algorithms: Mapping[str, AlgoConfig] | None = None,
    ) -> None:
        """Raises ``ConfigError`` if the folder is no run."""
        self.run_dir = run_dir
        self.config = read_run_config(run_dir)
        self._replayed = replayed
        self._algorithms = algorithms
        self._reset()

    def _reset(self) -> None:
        self.epoch = time.time_ns() // 1000  # exact in JavaScript
        self.table = data.Table()
        self.problems: list[str] = []
        self._pieces: Pieces | None = None
        self._has_references = False
        self._num_chunks = 0
        self._chunks: dict[int, _Chunk] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        self._last: Any = None
        self._diagnosed: tuple[int, str] | None = None
        self._found: list[dict[str, Any]] = []

    # -- the table --------------------------------------------------------------------------------

    def add(self, step: StoredStep, held_out: bool = False) -> Iterator[list[StoredRollout]]:
        """Add the rows of a step; yields the rollouts of each of its chunks."""
        for part in _parts(step.rollouts):
            for stored in part:
                self._add_row(step.step, stored, held_out)
            self._num_chunks += 1
            yield part

    def _add_row(self, step: int, stored: StoredRollout, held_out: bool) -> None:
        if self._pieces is None:  # now the run has its model, and so a tokenizer
            self._pieces = Pieces(tokenizer_folders(self.run_dir))
        scored = self._replayed.of(stored) if self._replayed else None
        for sample in stored.rollout.samples:
            self._pieces.add(sample.token_ids)
            self._has_references |= sample.ref_logprobs is not None

        self.table.add(
            {
                **data.row(step, stored, scored),
                "set": "held out" if held_out else "train",
                "prompt": self._pieces.line(prompt_ids(stored.rollout)) if held_out else "",
                "reply": self._pieces.line(reply_ids(stored.rollout)),
                "chunk": self._num_chunks,
            }
        )

    def since(self, have: Have | None = None) -> dict[str, Any]:
        """Everything but the tokens that a page does not have yet. ``has``: what it has then."""
        known = Have(self.epoch) if have is None or have.epoch != self.epoch else have
        points, end = data.curves(self.run_dir / "metrics.jsonl", known.metrics)
        held_out = {env.label for env in self.config.orchestrator.eval.env}
        held_out -= {env.label for env in self._envs()}
        envs = [env for env in self.table.texts["env"] if env not in held_out]
        described = algorithms_of(self.config, envs or [each.label for each in self._envs()])
        again = {env: data.describe(each) for env, each in (self._algorithms or {}).items()}
        pieces = self._pieces
        info = run_info(self.run_dir)
        return data.facts(self.run_dir, self.config) | {
            "reset": have is not None and have.epoch not in (0, self.epoch),
            "has": Have(
                self.epoch,
                self.table.num_rows,
                pieces=0 if pieces is None else len(pieces),
                metrics=end,
            ),
            "state": info.state,
            "step": info.step,
            "problems": self.problems,
            "verdicts": self._verdicts(info.step, info.state),
            "curves": points,
            "algorithms": {env: data.describe(each) for env, each in described.items()},
            "algorithms_again": again if self._replayed else None,
            "table": self.table.since(known.rows),
            "scales": self._scales(),
            "pieces": {"ids": [], "texts": []} if pieces is None else pieces.table(known.pieces),
            "has_tokenizer": pieces is not None and pieces.is_known,
            "has_exports": any(self.run_dir.glob("token_exports/step_*/rank_*")),
            "has_references": self._has_references,
        }

    def _envs(self) -> Any:
        return self.config.orchestrator.train.env

    def _scales(self) -> list[float]:
        """The credit that is drawn in full color, by env."""
        columns = self.table.columns
        credits = defaultdict(list)
        for name in ("credit", "credit_again"):
            for env, value in zip(columns["env"], columns.get(name, ()), strict=False):
                credits[env].append(value)
        return [data.scale(credits[env]) for env in range(len(self.table.texts["env"]))]

    def _verdicts(self, step: int, state: str) -> list[dict[str, Any]]:
        """What ``prime-rl doctor`` says, read anew every ``EVERY`` steps and at the end."""
        when = (step // EVERY, state)
        if when != self._diagnosed:
            self._diagnosed = when
            self._found = [asdict(verdict) for verdict in diagnose(self.run_dir)]
        return self._found

    # -- tokens -----------------------------------------------------------------------------------

    def exports(self, step: int) -> StepExports:
        """The trainer's values of a step."""
        return StepExports(self.run_dir, step, self.config.seq_len)

    def shown(self, stored: StoredRollout, exports: StepExports) -> dict[str, Any]:
        """One rollout with its tokens."""
        scored = self._replayed.of(stored) if self._replayed else None
        return data.shown(stored, scored, exports)

    def chunk(self, number: int) -> list[dict[str, Any]]:
        """The rollouts of a chunk that ``refresh`` has found, with their tokens. Raises
        ``KeyError``."""
        path, first, last = self._chunks[number]
        step = _read_again(path, *self._seen[path])
        exports = self.exports(step.step)
        return [self.shown(stored, exports) for stored in step.rollouts[first:last]]

    # -- a run that goes on -----------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read what the run has written since the last call, which also begins anew if the run was
        resumed from an earlier step. False: nothing is new."""
        files = dict.fromkeys(step_files(self.run_dir).values(), False)
        files |= dict.fromkeys(eval_files(self.run_dir), True)
        stamps = {path: stamp for path in files if (stamp := _stamp(path))}
        if any(stamps.get(path) != stamp for path, stamp in self._seen.items()):
            self._reset()
        fresh = [path for path in stamps if path not in self._seen]
        for path in fresh:
            self._seen[path] = stamps[path]
            try:
                self._read(path, files[path])
            except PrimeRLError as error:
                self.problems.append(str(error))

        info = run_info(self.run_dir)
        now = (_stamp(self.run_dir / "metrics.jsonl"), info.state, info.step)
        before = self._last
        self._last = now
        return bool(fresh) or now != before

    def _read(self, path: Path, held_out: bool) -> None:
        step = _read_again(path, *self._seen[path])
        first = 0
        for part in self.add(step, held_out):
            self._chunks[self._num_chunks - 1] = _Chunk(path, first, first + len(part))
            first += len(part)


@lru_cache(maxsize=4)
def _read_again(path: Path, modified: int, size: int) -> StoredStep:
    return read_step(path)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def eval_files(run_dir: Path) -> Iterator[Path]:
    """The files of held-out rollouts, in the order of versions."""
    for folder in numbered(run_dir.glob("eval_rollouts/step_*")).values():
        yield from sorted(folder.glob("*.msgpack"))


def _parts(rollouts: list[StoredRollout]) -> Iterator[list[StoredRollout]]:
    """Chunks of about ``CHUNK_TOKENS`` tokens."""
    part: list[StoredRollout] = []
    size = 0
    for stored in rollouts:
        part.append(stored)
        size += stored.rollout.num_tokens
        if size >= CHUNK_TOKENS:
            yield part
            part = []
            size = 0

    if part:
        yield part


def tokenizer_folders(run_dir: Path) -> Iterator[Path]:
    """Folders that may have the run's tokenizer."""
    yield run_dir / "weights"
    launch = run_dir / "configs" / "launch.json"
    if launch.exists():
        model: _Model = read_table(launch, _Model)
        yield Path(model.model_path)


class _Model(msgspec.Struct):
    """The facts that are read of a launch."""

    model_path: str
