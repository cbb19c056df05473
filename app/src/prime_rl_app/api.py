"""The Python API: ``prime_rl.train`` starts a run from a script or a notebook, ``prime_rl.Run``
reads one, whatever started it.

    run = prime_rl.train("grpo.toml", max_steps=20, trainer={"optim": {"lr": 1e-4}})
    run.metrics.column("train/agg/all/reward/mean").to_pylist()
    prime_rl.Run("latest").weights
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from prime_rl import Rollout, RunError
from prime_rl.rundir.status import read_rows
from prime_rl_app.rollouts import read_rollouts, step_files
from prime_rl_app.runs import LATEST, find_run, run_info

Config: TypeAlias = str | Path | Sequence[str | Path] | Mapping[str, Any]
"""The path of a TOML file; several, composed left to right; or the TOML's tables as a dict."""


def train(config: Config, *, resume: str | int | None = None, **overrides: Any) -> Run:
    """Train as ``prime-rl run`` does: start the processes of a run, show them, wait for the end.

    ``overrides`` lie over the config: ``max_steps=20``, ``trainer={"optim": {"lr": 1e-4}}`` or
    ``**{"trainer.optim.lr": 1e-4}``. ``resume``: ``"latest"``, a step or a checkpoint's folder.

    An interrupt (Ctrl-C, a notebook's stop button) saves the weights, ends the processes and
    raises ``KeyboardInterrupt``; ``Run("latest").resume()`` continues. A second one ends the run
    at once. Raises ``ConfigError`` before anything starts, ``RunError`` if a process dies or if
    this is not the main thread, which alone sees interrupts.
    """
    from prime_rl.proxies import settle
    from prime_rl.rundir.directory import held, make_run_dir
    from prime_rl_app.cli.run import train as train_in
    from prime_rl_app.config import build_config, fitted
    from prime_rl_app.resolve import check
    from prime_rl_app.resume import begin

    if threading.current_thread() is not threading.main_thread():
        raise RunError("train: call it in the main thread, which alone sees an interrupt")
    whole, notices = fitted(build_config(_table(config, overrides)))
    notices += settle(os.environ)
    print(*notices, sep="\n", end="\n" * bool(notices))
    resolved = check(whole, None if resume is None else str(resume))
    chosen = resolved.earlier_run
    if chosen is not None:
        print("\n".join(chosen.notes))
        if chosen.is_over:
            assert chosen.run_dir is not None
            return Run(chosen.run_dir)
        with begin(whole, chosen) as (run_dir, checkpoint):
            train_in(resolved, run_dir, _again(run_dir), checkpoint)
        return Run(run_dir)

    run_dir = make_run_dir(whole)
    with held(run_dir):
        train_in(resolved, run_dir, _again(run_dir), None)
    return Run(run_dir)


def _again(run_dir: Path) -> str:
    return shlex.join(["prime-rl", "run", str(run_dir / "configs" / "run.json")])


def _table(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config as one table, with the overrides laid over it."""
    from prime_rl_app.config import merge, read_toml, set_at

    if isinstance(config, Mapping):
        table: dict[str, Any] = copy.deepcopy(dict(config))
    else:
        table = {}
        for path in [config] if isinstance(config, str | Path) else config:
            table = merge(table, read_toml(Path(path)))

    for key, value in overrides.items():
        if isinstance(value, Mapping) and "." not in key:
            table = merge(table, {key: value})
        else:
            set_at(table, key.split("."), str(value) if isinstance(value, Path) else value)

    return table


class Run:
    """A run on disk, in progress or ended. Everything is read anew at each access."""

    def __init__(self, run: str | Path = LATEST, output_dir: str | Path = "outputs") -> None:
        """``run``: its path; its name in ``output_dir``; or ``"latest"``, the newest there. Raises
        ``ConfigError`` if there is none."""
        self.path = find_run(str(run), Path(output_dir))
        """The run directory."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def state(self) -> str:
        """``running``, ``done``, ``stopped``, ``failed``, ``died`` (without a word) or
        ``unknown``."""
        return run_info(self.path).state

    @property
    def step(self) -> int:
        """Batches so far."""
        return run_info(self.path).step

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        table: dict[str, Any] = json.loads((self.path / "configs" / "run.json").read_text())
        return table

    @property
    def metrics(self) -> Any:
        """A ``pyarrow.Table``: one row per step, in order, and one column per metric; null where a
        step lacks it. ``.to_pandas()`` makes a DataFrame. ``docs/run-directory.md`` lists the
        metrics."""
        rows: dict[int, dict[str, Any]] = {}
        for line in _lines(self.path / "metrics.jsonl"):
            rows.setdefault(line["step"], {}).update(line)
        names = dict.fromkeys(["step", *(name for row in rows.values() for name in row)])
        ordered = [rows[step] for step in sorted(rows)]
        return importlib.import_module("pyarrow").table(
            {name: [row.get(name) for row in ordered] for name in names}
        )

    @property
    def evals(self) -> list[dict[str, Any]]:
        """The held-out evaluations, one per env and version, in order."""
        return _lines(self.path / "evals.jsonl")

    def rollouts(self, step: int | None = None, *, dropped: bool = False) -> Iterator[Rollout]:
        """The rollouts that trained, of one step or of all, in order; ``dropped``: those that a
        filter dropped too. Raises ``RunError`` if nothing is saved for the step."""
        files = step_files(self.path)
        if step is not None and step not in files:
            saved = f"{min(files)} to {max(files)}" if files else "none"
            raise RunError(f"{self.path}: no rollouts of step {step} are saved (saved: {saved})")

        for path in files.values() if step is None else [files[step]]:
            _, rollouts, reasons = read_rollouts(path)
            for rollout, reason in zip(rollouts, reasons, strict=True):
                if dropped or reason is None:
                    yield rollout

    @property
    def weights(self) -> Path:
        """The trained model, a Hugging Face folder. Raises ``RunError`` before the end."""
        folder = self.path / "weights"
        if not (folder / "config.json").is_file():
            raise RunError(
                f"{self.path}: no weights yet (the run is {self.state}); they are exported when it "
                "ends or is stopped"
            )
        return folder

    def resume(self, **overrides: Any) -> Run:
        """Continue from the newest checkpoint with the run's own config. Raises as ``train``
        does."""
        place = {"run.name": self.name, "output_dir": self.path.parent}
        return train(self.config, resume=LATEST, **{**place, **overrides})

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """In a notebook: the state in one line, and the learning curve of a run that has ended."""
        from base64 import b64encode

        info = run_info(self.path)
        picture = self.path / "learning_curve.png"
        reward = "" if info.reward is None else f", reward {info.reward:.3f}"
        text = (
            f"<b>{escape(info.name)}</b>: {info.state}, step {info.step}/{info.max_steps}{reward}"
        )
        if not picture.is_file():
            return text
        data = b64encode(picture.read_bytes()).decode()
        return f'{text}<br><img width="640" src="data:image/png;base64,{data}">'


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still grow; none if it does not exist."""
    return read_rows(path)
