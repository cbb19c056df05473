"""``[trainer.token_export]``: what the loss saw of every token, for looking into a run.

    <run>/token_exports/step_3/rank_0.jsonl   one object a packed sequence that trains anything
    <run>/token_exports/step_3/STABLE         last of all: step 3 is whole

Null stands for what does not exist: a stream that nobody assigned, a logprob of a token that no
component trains, a ratio where π is not compared to μ, a number that is not finite. ``is_masked``
and its two kin come from the losses, which tell by a ``TokenMetric`` of that name (``ref_kl/`` and
the like before it aside); of a loss that does not tell they are null.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from prime_rl.config.trainer import TokenExportConfig
from prime_rl.rollout import COMPONENTS, members
from prime_rl.trainer import parallel
from prime_rl.trainer.loss_metrics import Call
from prime_rl.trainer.row import Row
from prime_rl.trainer.token_columns import Column, token_columns
from prime_rl.trainer.token_files import Exported, JsonLines, Parquet, Writer
from prime_rl.weights.versions import STABLE
from prime_rl.wire.micro_batch import MicroBatch

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1


def make_token_export(config: TokenExportConfig, run_dir: Path) -> TokenExport | None:
    """None: it is off."""
    return TokenExport(config, run_dir / "token_exports") if config.enabled else None


@dataclass(frozen=True)
class TokenExport:
    """The export of a run."""

    config: TokenExportConfig
    directory: Path

    def begin(self, step: int) -> StepExport | None:
        """A step's file, made anew; None: it is not this step's turn."""
        if step % self.config.interval:
            return None
        rank = parallel.rank()
        directory = self.directory / f"step_{step}"
        if rank == 0:  # what an earlier attempt may have left
            shutil.rmtree(directory, ignore_errors=True)
        parallel.barrier()
        return StepExport(step, rank, directory / f"rank_{rank}.{self.config.format}")


class StepExport:
    """The export of one step. If the disk refuses it is left out, and the run goes on."""

    def __init__(self, step: int, rank: int, path: Path) -> None:
        self.step, self.rank, self.path = step, rank, path
        self._writer: Writer
        self._refused: str | None = None
        self._micro_step = 0
        self._num_sequences = 0
        self._try(self._open)

    def add(
        self,
        micro_batch: MicroBatch,
        row: Row,
        logprobs: Tensor,
        entropies: Tensor,
        calls: Sequence[Call],
    ) -> None:
        """One micro batch."""
        columns = token_columns(micro_batch, row, logprobs, entropies, calls)
        exported = self._select(micro_batch, columns)
        self._micro_step += 1
        self._num_sequences += len(exported.facts)
        self._try(lambda: self._writer.write(exported))

    def finish(self) -> None:
        """Close the file, and mark the step as whole once every rank has."""
        self._try(lambda: self._writer.close())
        refused = [each for each in parallel.gather(self._refused) if each is not None]
        if self.rank == 0 and not refused:
            self._try(lambda: (self.path.parent / STABLE).touch())
            refused = [each for each in (self._refused,) if each is not None]
        if self.rank == 0 and refused:
            logger.error("step %d: no token export, the run goes on: %s", self.step, refused[0])
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = (JsonLines if self.path.suffix == ".jsonl" else Parquet)(self.path)

    def _try(self, action: Callable[[], object]) -> None:
        """Nothing more once the disk has refused."""
        try:
            if self._refused is None:
                action()
        except OSError as error:
            self._refused = f"cannot write {self.path}: {error}"

    def _select(self, micro_batch: MicroBatch, columns: Mapping[str, Column | None]) -> Exported:
        """The sequences with a member of any component."""
        lengths = micro_batch.sequence_lengths.astype(np.int64)
        member = np.logical_or.reduce([members(micro_batch, name) for name in COMPONENTS])
        chosen = np.logical_or.reduceat(member, np.cumsum(lengths) - lengths)
        tokens = np.repeat(chosen, lengths)
        facts = [
            {
                "schema_version": SCHEMA_VERSION,
                "step": self.step,
                "rank": self.rank,
                "micro_step": self._micro_step,
                "micro_sequence_idx": index,
                "export_sequence_idx": self._num_sequences + number,
                "env_name": micro_batch.envs[micro_batch.env_ids[index]],
            }
            for number, index in enumerate(np.flatnonzero(chosen).tolist())
        ]
        return Exported(
            facts,
            {name: None if c is None else c[tokens] for name, c in columns.items()},
            [0, *np.cumsum(lengths[chosen]).tolist()],
        )
