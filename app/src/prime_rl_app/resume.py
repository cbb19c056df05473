"""``prime-rl run CONFIG --resume [latest | auto | STEP | DIR]``: which checkpoint, in which run
directory.

``latest`` and ``STEP`` continue the run that ``run.name`` names; without a name, the newest run of
these environments and this model that has such a checkpoint. ``DIR`` is a checkpoint's folder: if
it belongs to the run that ``run.name`` names, that run continues; else a new run starts from a
copy.

A resumed run drops what followed the checkpoint: metrics, rollouts, broadcasts. Later checkpoints
are moved to ``checkpoints/abandoned_K``.
"""

from __future__ import annotations

import json
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from prime_rl.config.removed import without_removed
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, NoCheckpoint, RunError, RunHeld
from prime_rl.plugins.trainer import OptimizerMaker, Tuning
from prime_rl.registry.manager import installed_versions
from prime_rl.registry.offers import TUNING, settings_of
from prime_rl.rundir.attempts import kill_left
from prime_rl.rundir.checkpoints import (
    Checkpoint,
    checkpoints_dir,
    copy,
    finished,
    last_trained,
    whole_steps,
)
from prime_rl.rundir.control import RECORD, STOP, Supervisor
from prime_rl.rundir.directory import DRY, held, make_run_dir, new_attempt, runs_of, write_config
from prime_rl.rundir.rows import parse_row, read_table, whole_lines
from prime_rl.rundir.status import names_in, replace_text

LATEST = "latest"
AUTO = "auto"
RETRY_SECONDS = (1.0, 5.0, 25.0)
"""Pauses before a checkpoint is looked at again that a shared disk refuses to show."""
T = TypeVar("T")


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint to resume from, chosen before any file changes."""

    checkpoint: Checkpoint | None
    """None: the run starts from the beginning."""
    run_dir: Path | None
    """The run that continues; None: a new run, from a copy of the checkpoint if there is one."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user: the checkpoint, and the changes since."""
    is_over: bool = False
    """The run is done: there is nothing left to do."""
    seen: object = None
    """What the plan was made from: ``_seen`` of the run that continues."""


def _seen(run_dir: Path) -> object:
    """What changes while a process runs the run: its checkpoints, and the supervisor's record."""
    record = run_dir / RECORD
    return whole_steps(run_dir), record.read_bytes() if record.exists() else None


@contextmanager
def _readable() -> Iterator[None]:
    """What cannot be read of a run is a ``ConfigError``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--resume: a run cannot be read: {error}. Run the command again when it can."
        ) from error


@_readable()
def plan(
    config: RunConfig, what: str, tuning: Tuning | None, optimizer: OptimizerMaker
) -> ResumePlan:
    """Find the checkpoint and compare it with the config, its tuning and its optimizer. ``auto`` is
    ``latest``, or the start of the run if there is no checkpoint. A finished run is completed:
    export, evaluation, summary. Raises ``NoCheckpoint``, or ``ConfigError`` if the config does not
    fit the checkpoint or the run is over."""
    seen: dict[Path, object] = {}
    try:
        checkpoint, run_dir, damaged = _find(config, LATEST if what == AUTO else what, seen=seen)
    except NoCheckpoint:
        begun = next((each for each in runs_of(config) if not (each / DRY).exists()), None)
        with held(begun) if begun else nullcontext():  # if it runs, that is the reason
            if what != AUTO:
                raise
        if begun is None or not Supervisor.has_done(begun):
            before = None if begun is None else seen.get(begun.resolve())
            return ResumePlan(None, begun, ["no checkpoint: from the start"], seen=before)
        if over := _why_over(begun, config):
            return ResumePlan(None, begun, [over], is_over=True)
        raise ConfigError(
            f"--resume: {begun} is done after step {last_trained(begun)}, max_steps is "
            f"{config.max_steps}, and it has no checkpoint to go on from. Choose another run.name, "
            "or remove the folder."
        ) from None

    if what == AUTO and run_dir is not None and (over := _why_over(run_dir, config)):
        return ResumePlan(checkpoint, run_dir, [over], is_over=True)

    is_over = run_dir is None or Supervisor.has_done(run_dir)
    if checkpoint.step > config.max_steps or (checkpoint.step == config.max_steps and is_over):
        over = (
            f"{checkpoint.directory} is of step {checkpoint.step}, max_steps is "
            f"{config.max_steps}: nothing is left to train. Raise max_steps."
        )
        if what == AUTO:
            return ResumePlan(checkpoint, run_dir, [over], is_over=True)
        raise ConfigError(f"--resume: {over}")

    try:
        progress: _Progress = read_table(checkpoint.progress, _Progress)
        earlier = without_removed(cast("dict[str, Any]", progress["config"]))
    except (OSError, RunError) as error:
        raise ConfigError(f"--resume: {error}") from error

    now = config.model_dump(mode="json")
    check_model(earlier.get("model", {}), now["model"], checkpoint.weights)
    check_tuning(earlier, tuning, checkpoint)
    check_optimizer(earlier, optimizer, checkpoint)
    where = "" if run_dir else f", in a new run (a copy of run {checkpoint.run_dir.name})"
    drift = config_drift(earlier, now) + version_drift(progress["plugins"], installed_versions())
    notes = [f"resuming from step {checkpoint.step} of {checkpoint.directory}{where}"]
    notes += [f"changed since: {line}" for line in drift]
    before = None if run_dir is None else seen.get(run_dir.resolve())
    return ResumePlan(checkpoint, run_dir, damaged + notes, seen=before)


def _why_over(run_dir: Path, config: RunConfig) -> str:
    """Why ``auto`` has nothing to do for a run that is done; empty if it has."""
    if not Supervisor.has_done(run_dir):
        return ""

    marker = run_dir / STOP
    if marker.exists() and (why := marker.read_text("utf-8")):
        return f"{run_dir} is done: {why}. --resume without auto goes on from a checkpoint."
    if (step := last_trained(run_dir)) >= config.max_steps:
        return (
            f"{run_dir} is done after step {step}, max_steps is {config.max_steps}: nothing is "
            "left to train. Raise max_steps."
        )
    return ""


class _Tables(TypedDict, total=False):
    model: dict[str, Any]
    trainer: dict[str, Any]


class _Progress(TypedDict):
    """What a resume reads of a checkpoint's ``progress.json``."""

    config: _Tables
    plugins: dict[str, str]


@contextmanager
def begin(config: RunConfig, chosen: ResumePlan) -> Iterator[tuple[Path, Checkpoint | None]]:
    """Lock the run directory and prepare it for the next attempt; processes that a dead supervisor
    has left are ended. Raises ``RunHeld``, or ``ConfigError`` if a file cannot be written."""
    if chosen.run_dir is None:
        run_dir = make_run_dir(config)
        with held(run_dir):
            yield run_dir, chosen.checkpoint and copy(chosen.checkpoint, run_dir)
        return

    with held(chosen.run_dir):
        with _readable():
            seen = None if chosen.seen is None else _seen(chosen.run_dir)
        if chosen.seen != seen:
            raise RunHeld(
                f"{chosen.run_dir}: another process ran this run until a moment ago, and has "
                "changed what a resume begins with. Run the command again."
            )
        try:
            new_attempt(chosen.run_dir)  # from here on older processes write nothing
            kill_left(chosen.run_dir)
            rewind(chosen.run_dir, chosen.checkpoint.step if chosen.checkpoint else 0)
            write_config(chosen.run_dir, config)
        except OSError as error:
            raise ConfigError(f"--resume: cannot make {chosen.run_dir} ready: {error}") from error
        yield chosen.run_dir, chosen.checkpoint


def _find(
    config: RunConfig, what: str, seen: dict[Path, object]
) -> tuple[Checkpoint, Path | None, list[str]]:
    """A checkpoint whose files are as they were written, its run, and what is wrong with newer ones
    of that run. ``seen`` gets ``_seen`` of each run that was looked at, from before the look."""
    runs = runs_of(config)
    if what != LATEST and not what.isdecimal():
        if config.run.name:
            seen.update((each.resolve(), _seen(each)) for each in runs)
        checkpoint, continues = _in_folder(config, Path(what))
        _look(checkpoint.verify)
        return checkpoint, continues, []

    for run_dir in runs:
        seen[run_dir.resolve()] = _look(partial(_seen, run_dir))
        found, damaged = newest(run_dir, None if what == LATEST else int(what))
        if found is not None:
            return found, run_dir, damaged
        if damaged:
            raise ConfigError("\n".join(damaged))

    wanted = "a whole checkpoint" if what == LATEST else f"a whole checkpoint of step {what}"
    listed = "; ".join(f"{run} has steps {whole_steps(run) or 'none'}" for run in runs)
    raise NoCheckpoint(
        f"--resume {what}: no run has {wanted}: {listed or f'no such run in {config.output_dir}'}. "
        "A run writes one where it ends or is stopped, and every [ckpt] interval steps or seconds, "
        "unless ckpt.enabled is false; run.name chooses the run. --resume auto starts it again."
    )


def newest(run_dir: Path, only: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run whose files are as they were written, None if there is none,
    and what is wrong with newer ones. ``only``: the step that it must be of. Raises ``OSError`` if
    the disk does not show them."""
    damaged: list[str] = []
    steps = [step for step in _look(partial(whole_steps, run_dir)) if only in (None, step)]
    for step in reversed(steps):
        checkpoint = finished(run_dir, step)
        try:
            _look(checkpoint.verify)
        except ConfigError as error:
            damaged.append(str(error))
            continue
        return checkpoint, damaged

    return None, damaged


def _look(look: Callable[[], T]) -> T:
    """What ``look`` returns, which is called again after ``RETRY_SECONDS`` while a shared disk
    refuses: a run that took a refused checkpoint for damaged would go back too far, and abandon it.
    Raises its last error."""
    for pause in RETRY_SECONDS:
        try:
            return look()
        except (OSError, ConfigError) as error:
            if not _is_refused(error):
                raise
        time.sleep(pause)
    return look()


def _is_refused(error: BaseException | None) -> bool:
    """Whether the disk refused a read, for no reason that lies in the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    in_the_file = FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError
    return error is not None and not isinstance(error, in_the_file)


def _in_folder(config: RunConfig, directory: Path) -> tuple[Checkpoint, Path | None]:
    checkpoint = Checkpoint(directory.resolve())
    is_numbered = directory.name.removeprefix("step_").isdecimal()
    if not is_numbered or not checkpoint.is_whole:
        raise ConfigError(
            f"--resume {directory}: expected 'latest', a step, or the folder of a whole "
            "checkpoint: RUN/checkpoints/step_N"
        )
    named = config.run.name and (Path(config.output_dir) / config.run.name).resolve()
    if checkpoint.run_dir != named:  # a new run, from a copy
        return checkpoint, None
    return checkpoint, checkpoint.run_dir


def rewind(run_dir: Path, step: int, kept: Collection[str] = ()) -> None:
    """Remove what a run wrote after step ``step``. Later checkpoints go first: if the process dies
    in between, ``latest`` is already the right checkpoint. ``kept``: processes that go on. Raises
    ``OSError`` rather than leave what cannot be seen, as ``glob`` does in newer Pythons."""
    _abandon(run_dir, step)
    for name in ("metrics.jsonl", "trainer.jsonl", "expert_load.jsonl", "evals.jsonl"):
        _cut(run_dir / name, step)
    for folder in ("broadcasts", "rollouts", "eval_rollouts", "token_exports"):
        _remove_steps(run_dir / folder, after=step)
    # The trainer has its average and its reference in its checkpoint.
    for folder in ("rollouts_wire", "averages", "references"):
        _remove_steps(run_dir / folder, after=-1)
    status = run_dir / "status"
    for path in (status / name for name in names_in(status)):
        if path.suffix == ".json" and path.stem not in ("supervisor", *kept):
            path.unlink()


def _cut(path: Path, step: int) -> None:
    """Keep the complete lines up to a step."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return

    kept = []
    for line in whole_lines(data):
        with suppress(ValueError):
            if parse_row(line)["step"] <= step:
                kept.append(line + b"\n")
    replace_text(path, b"".join(kept).decode(errors="replace"))


def _remove_steps(folder: Path, after: int) -> None:
    """Delete each ``step_N`` with N greater than ``after``, and every unfinished ``.step_N``."""
    for name in names_in(folder):
        number = name.removeprefix("step_").split(".")[0]
        is_later = name.startswith("step_") and number.isdecimal() and int(number) > after
        if is_later or name.startswith(".step_"):
            _remove(folder / name)


def _remove(path: Path) -> None:
    """Delete a folder or a file."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _abandon(run_dir: Path, step: int) -> None:
    """Move later checkpoints away, and delete incomplete ones."""
    folder = checkpoints_dir(run_dir)
    names = names_in(folder)
    for name in names:
        if name.startswith((".step_", ".removed_")):
            shutil.rmtree(folder / name)
    later = [n for n in whole_steps(run_dir) if n > step]
    if later:
        numbers = (name.removeprefix("abandoned_") for name in names)
        number = 1 + max((int(each) for each in numbers if each.isdecimal()), default=0)
        aside = folder / f"abandoned_{number}"
        aside.mkdir()
        for each in later:
            path = finished(run_dir, each).directory
            path.rename(aside / path.name)


NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a model's ``config.json`` that do not affect its weights."""


def version_drift(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line per distribution whose version has changed."""
    return [f"plugin {line}" for line in _changes(before, now, absent="not installed", show=str)]


def config_drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per key whose value has changed."""
    flat = dict(_leaves(before)), dict(_leaves(now))
    return _changes(*flat, "absent", partial(json.dumps, default=str))


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Any], absent: str, show: Callable[[Any], str]
) -> list[str]:
    def shown(side: Mapping[str, Any], key: str) -> str:
        return show(side[key]) if key in side else absent

    return [
        f"{key}: {shown(before, key)} then, {shown(now, key)} now"
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or before[key] != now[key]
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, also of the tables in a list."""
    if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield path, list(value) if isinstance(value, tuple) else value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def check_model(before: Mapping[str, Any], now: Mapping[str, Any], weights: Path) -> None:
    """Refuse a model that differs from the checkpoint's ``weights``.

    ``before`` and ``now`` are the ``[model]`` tables. Raises ``ConfigError`` if the new model has
    another architecture, or cannot be compared because it is not a folder.
    """
    changed = config_drift(before, now)
    ours = _model_config(Path(str(now.get("name")))) if changed else {}
    if ours is None:
        raise ConfigError(
            f"--resume: [model] has changed ({'; '.join(changed)}) and the policy is the "
            "checkpoint's. Set it back, or start a new run."
        )

    different = config_drift(_model_config(weights) or {}, ours) if changed else []
    if different:
        raise ConfigError(
            f"--resume: the checkpoint's weights cannot be those of model {now.get('name')!r}: "
            f"{'; '.join(different[:5])}. Name the model that the checkpoint is of."
        )


def check_tuning(before: Mapping[str, Any], tuning: Tuning | None, checkpoint: Checkpoint) -> None:
    """Refuse an adapter that differs from the checkpoint's: its weights fit no other one.

    ``before`` is the checkpoint's whole config. Raises ``ConfigError`` if the table that selects
    the ``tuning`` has changed.
    """
    table = None if tuning is None else before.get("trainer", {}).get(tuning.name)
    changed: list[str] = []
    if tuning is None:
        changed = ["an adapter then, all weights now"] if checkpoint.is_adapter else []
    elif table is None:
        changed = [f"all weights then, an adapter now: [trainer.{tuning.name}]"]
    else:
        key = f"trainer.{tuning.name}"
        theirs = settings_of(type(tuning), TUNING, settings=table, where=f"--resume: {key} then")
        sides = ({key: each.model_dump(mode="json")} for each in (theirs, tuning.config))
        changed = config_drift(*sides)

    if changed:
        raise ConfigError(
            f"--resume: what trains has changed ({'; '.join(changed)}). Set it back, or start a "
            "new run from the model that this one exported."
        )


def check_optimizer(
    before: Mapping[str, Any], optimizer: OptimizerMaker, checkpoint: Checkpoint
) -> None:
    """Raises ``ConfigError`` if the ``optimizer`` needs a state that the checkpoint does not
    contain. ``before`` is the checkpoint's whole config."""
    table = before.get("trainer", {}).get("optim") or {"type": "adamw"}
    if optimizer.resumes(table):
        return
    settings = optimizer.config.model_dump(exclude_defaults=True).items()
    ours = optimizer.name + "".join(f", {key} = {value}" for key, value in settings)
    way = "" if checkpoint.is_adapter else f' from its weights: model.name = "{checkpoint.weights}"'
    raise ConfigError(
        f"--resume: the checkpoint has the state of {table['type']}, and [trainer.optim] says "
        f"{ours}. Set it back, or start a new run{way}."
    )


def _model_config(folder: Path) -> dict[str, Any] | None:
    try:
        config = read_table(folder / "config.json")
    except (OSError, RunError):
        return None
    return {name: value for name, value in config.items() if name not in NOT_THE_MODEL}
