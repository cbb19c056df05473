"""``[trainer.token_export]``: every token as the loss saw it, for looking into a run.

    <run>/token_exports/step_3/rank_0.jsonl   one object per packed sequence that trains anything
    <run>/token_exports/step_3/STABLE         last of all: step 3 is complete

Null stands for a value that does not exist: a stream that was not assigned, a logprob of a token
that no component trains, a ratio where π is not compared with μ, a number that is not finite.
``is_masked``, ``is_masked_high`` and ``is_masked_low`` come from the losses, as a ``TokenMetric``
of that name (after ``ref_kl/`` and the like); they are null for a loss without one.

Shapes: T = tokens of a micro batch, as it was packed.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt, model_validator

from prime_rl import ConfigError, PluginConfig, TokenMetric, TrainerObserver
from prime_rl.streams import components, members
from prime_rl.weights.versions import STABLE
from prime_rl.wire.micro_batch import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl.registry.components import Components
    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.loss_metrics import RecordedCall
    from prime_rl.trainer.packed_row import PackedRow

logger = logging.getLogger("prime_rl.trainer.token_export")

SCHEMA_VERSION = 1

Column: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["int", "bool", "float", "str"]

FACTS: dict[str, Kind] = {
    **dict.fromkeys(("schema_version", "step", "rank", "micro_step", "micro_sequence_idx"), "int"),
    "export_sequence_idx": "int",
    "env_name": "str",
}
"""Columns of every sequence, before those of its tokens."""
MASKS = ("is_masked", "is_masked_high", "is_masked_low")
RATIOS = ("mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta")
STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")
COLUMNS: dict[str, Kind] = {
    "token_ids": "int",
    "position_ids": "int",
    "loss_mask": "bool",
    **dict.fromkeys(("advantages", "inference_logprobs", "trainer_logprobs", "entropy"), "float"),
    **dict.fromkeys(RATIOS, "float"),
    **dict.fromkeys(MASKS, "bool"),
    **dict.fromkeys(STREAMS, "float"),
}
"""Columns of every token, in order; a float that is not finite, as a bool too, is null."""


class TokenExportConfig(PluginConfig):
    """``[trainer.token_export]``: every trained token with its streams, logprobs and mask reasons,
    in ``<run>/token_exports``."""

    enabled: bool = False
    """Write them. Costs time and disk: some hundred bytes per token as JSON."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """``parquet`` needs pyarrow: ``pip install "prime-rl-observers[parquet]"``."""
    interval: PositiveInt = 1
    """Steps between exports."""

    @model_validator(mode="after")
    def _needs_pyarrow(self) -> TokenExportConfig:
        if self.enabled and self.format == "parquet" and find_spec("pyarrow") is None:
            raise ConfigError(
                'format is "parquet", but pyarrow is not installed. Install it '
                '(pip install "prime-rl-observers[parquet]") or set format = "jsonl".'
            )
        return self


class TokenExport(TrainerObserver):
    """Writes every trained token as the loss saw it to ``<run>/token_exports``."""

    name = "token_export"
    config_class = TokenExportConfig
    config: TokenExportConfig

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Where the steps go."""
        self._directory = run_dir / "token_exports"
        self._losses = trainer.losses
        self._export: StepExport | None = None

    def row_trained(
        self,
        step: int,
        *,
        micro_batch: MicroBatch,
        row: PackedRow,
        logprobs: Tensor,
        entropies: Tensor,
        calls: Sequence[RecordedCall],
    ) -> None:
        """Export the row in the first epoch; before a step's first, make its file anew."""
        if not self.config.enabled or step % self.config.interval:
            return
        if self._export is not None and self._export.has(micro_batch):
            return
        if self._export is None:
            self._export = self._begin(step)
        columns = token_columns(
            micro_batch,
            row,
            logprobs=logprobs,
            entropies=entropies,
            calls=calls,
            losses=self._losses,
        )
        self._export.add(micro_batch, columns)

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Complete the step's file."""
        if self._export is not None:
            self._export.finish()
            self._export = None
        return {}

    def _begin(self, step: int) -> StepExport:
        from prime_rl.trainer import parallel

        rank = parallel.rank()
        directory = self._directory / f"step_{step}"
        # An earlier attempt at the step may have left files, of this rank or another.
        parallel.on_main(partial(shutil.rmtree, directory, ignore_errors=True))
        return StepExport(step, rank, directory / f"rank_{rank}.{self.config.format}")


class StepExport:
    """The export of one step. It is left out if the disk refuses, and the run goes on."""

    def __init__(self, step: int, rank: int, path: Path) -> None:
        self.step = step
        self.rank = rank
        self.path = path
        self._writer: JsonLines | Parquet
        self._error: str | None = None
        self._micro_step = 0
        self._num_sequences = 0
        self._rows: list[MicroBatch] = []
        self._try(self._open)

    def has(self, micro_batch: MicroBatch) -> bool:
        """Whether it was exported: an epoch after the first trains it again."""
        return any(row is micro_batch for row in self._rows)

    def add(self, micro_batch: MicroBatch, columns: Mapping[str, Column | None]) -> None:
        """Export the sequences of one micro batch that have a member of any component. Of several
        ranks that compute it, the first one does."""
        from prime_rl.trainer import context

        self._rows.append(micro_batch)
        lists = {
            name: None if column is None else _nullable(column, COLUMNS[name])
            for name, column in columns.items()
        }
        member = np.logical_or.reduce(
            [members(micro_batch, name) for name in components(micro_batch)]
        )
        bounds = np.cumsum([0, *micro_batch.sequence_lengths]).tolist()
        chosen = np.flatnonzero(np.logical_or.reduceat(member, bounds[:-1])).tolist()
        if not context.is_first():
            chosen = []
        rows = []
        for number, index in enumerate(chosen, self._num_sequences):
            facts = {
                "schema_version": SCHEMA_VERSION,
                "step": self.step,
                "rank": self.rank,
                "micro_step": self._micro_step,
                "micro_sequence_idx": index,
                "export_sequence_idx": number,
                "env_name": micro_batch.envs[micro_batch.env_ids[index]],
            }
            in_sequence = slice(bounds[index], bounds[index + 1])
            rows.append(facts | {name: v and v[in_sequence] for name, v in lists.items()})

        self._micro_step += 1
        self._num_sequences += len(rows)
        self._try(lambda: self._writer.write(rows))

    def finish(self) -> None:
        """Close the file, and mark the step as complete once every rank has."""
        from prime_rl.trainer import parallel

        self._try(lambda: self._writer.close())
        errors = [each for each in parallel.gather(self._error) if each is not None]
        if self.rank == 0 and not errors:
            self._try((self.path.parent / STABLE).touch)
            errors = [self._error] if self._error else []

        if self.rank == 0 and errors:
            logger.error("step %d: no token export, the run goes on: %s", self.step, errors[0])
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = (JsonLines if self.path.suffix == ".jsonl" else Parquet)(self.path)

    def _try(self, action: Callable[[], object]) -> None:
        """Nothing more once the disk has refused."""
        try:
            if self._error is None:
                action()
        except OSError as error:
            self._error = f"cannot write {self.path}: {error}"


def token_columns(
    micro_batch: MicroBatch,
    row: PackedRow,
    logprobs: Tensor,
    entropies: Tensor,
    calls: Sequence[RecordedCall],
    losses: Components,
) -> dict[str, Column | None]:
    """[T] of each of ``COLUMNS``, in the micro batch's own order."""
    from prime_rl.trainer.packed_row import ratio_tokens

    targets = row.targets.cpu().numpy()
    trainer = _only(logprobs, targets)
    columns = {"trainer_logprobs": trainer, "entropy": _only(entropies, targets)}
    compared = ratio_tokens(row, losses)
    if len(compared):
        inference = _only(row.inference_logprobs, compared)
        log_ratio = trainer - inference
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.exp(log_ratio)
            difference = np.exp(trainer) - np.exp(inference)
            mismatch_kl = np.expm1(log_ratio) - log_ratio
        columns |= zip(RATIOS, (mismatch_kl, log_ratio, ratio, difference), strict=True)

    columns |= _masks(calls, len(trainer))
    known: dict[str, Column | None] = {name: getattr(micro_batch, name, None) for name in COLUMNS}
    for name, column in columns.items():  # they are in the row's order
        known[name] = packed = np.empty_like(column)
        packed[row.origins] = column

    return known


def _only(column: Tensor, tokens: Column) -> Column:
    """NaN for all other tokens."""
    kept = np.full(len(column), np.nan)
    kept[tokens] = column.cpu().numpy()[tokens]
    return kept


def _masks(calls: Sequence[RecordedCall], num_tokens: int) -> dict[str, Column]:
    """1.0, 0.0, or NaN for tokens without a loss that reports one; 1.0 if any loss reports it."""
    masks: dict[str, Column] = {}
    for call in calls:
        for name, metric in call.outputs.metrics.items():
            field = name.rpartition("/")[2]
            if field in MASKS and isinstance(metric, TokenMetric):
                values = metric.values.detach().float().where(metric.mask, np.nan).cpu().numpy()
                column = masks.setdefault(field, np.full(num_tokens, np.nan))
                column[call.tokens] = np.fmax(column[call.tokens], values)

    return masks


def _nullable(column: Column, kind: Kind) -> list[Any]:
    """With None for numbers that are not finite, and bools from 0.0 and 1.0."""
    missing = ~np.isfinite(column)
    values = (column == 1 if kind == "bool" else column).astype(object)
    values[missing] = None
    plain: list[Any] = values.tolist()
    return plain


class JsonLines:
    """One object per sequence. Opened for each micro batch, so that no file stays open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the sequences."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(rows))

    def close(self) -> None:
        """No file is open."""


class Parquet:
    """One row per sequence and a list for each token column, written when the step is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow: Any = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
        types = {
            "int": self._arrow.int64(),
            "bool": self._arrow.bool_(),
            "float": self._arrow.float32(),
            "str": self._arrow.string(),
        }
        facts = [(name, types[kind]) for name, kind in FACTS.items()]
        lists = [(name, self._arrow.list_(types[kind])) for name, kind in COLUMNS.items()]
        self._schema = self._arrow.schema(facts + lists)
        self._batches: list[Any] = []

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the sequences until the step is done."""
        self._batches.append(self._arrow.RecordBatch.from_pylist(rows, self._schema))

    def close(self) -> None:
        """Write all sequences."""
        table = self._arrow.Table.from_batches(self._batches, self._schema)
        self._arrow.parquet.write_table(table, self.path)
