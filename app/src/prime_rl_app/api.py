"""The Python API: ``prime_rl.train`` starts a run from a script or a notebook, ``prime_rl.Run``
reads one, whatever started it.

    run = prime_rl.train(model="smollm2-135m", prompts=rows, reward=exact, max_steps=20)
    run.generate("4+4?")
    run = prime_rl.train("grpo.toml", max_steps=20, trainer={"optim": {"lr": 1e-4}})
    run.metrics.column("train/agg/all/reward/mean").to_pylist()
    prime_rl.Run("latest").weights
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from prime_rl import ConfigError, Rollout, RunError
from prime_rl.rundir.rows import metrics_of, read_table
from prime_rl.rundir.status import read_rows
from prime_rl_app.run_states import LATEST, find_run, run_info
from prime_rl_app.saved_rollouts import read_rollouts, step_files

Config: TypeAlias = str | Path | Sequence[str | Path] | Mapping[str, Any]
"""The path of a TOML file; several, composed left to right; or the TOML's tables as a dict."""


QUICK: dict[str, Any] = {
    "seq_len": 512,
    "orchestrator": {
        "batch_size": 32,
        "train": {"sampling": {"max_completion_tokens": 64}},
    },
    "trainer": {"optim": {"lr": 1e-5}},
}
"""Defaults of ``train(prompts=..., reward=...)``, below the config and the overrides: a small model
shows within minutes whether it learns."""

OnStep: TypeAlias = Callable[["Run"], object]


def train(
    config: Config | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    prompts: Any = None,
    reward: Any = None,
    weights: Mapping[str, float] | None = None,
    eval_prompts: Any = None,
    prompt_column: str = "prompt",
    system_prompt: str | None = None,
    in_process: bool = False,
    on_step: OnStep | Sequence[OnStep] = (),
    resume: str | int | None = None,
    **overrides: Any,
) -> Run:
    """Train as ``prime-rl run`` does: start the processes of a run, show them, wait for the end.

    With ``prompts`` and ``reward`` no config is needed. ``prompts``: a list of dicts or texts, a
    data set, a table or a frame; or the name of a file or of a data set of the hub. ``reward``: a
    function, an import path, or a list of them; each takes by name what it needs of ``reply``,
    ``prompt``, ``messages``, ``completion_ids`` and the columns of the row. ``weights``: one for
    each term. ``in_process``: the functions are quick, and run in the orchestrator.
    ``docs/python.md``.

    ``model``: ``model.name``, or the table. ``on_step``: called after each step with the run.
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
    from prime_rl_app.errors import explained
    from prime_rl_app.models import check_made
    from prime_rl_app.resolve import check
    from prime_rl_app.resume import begin

    if threading.current_thread() is not threading.main_thread():
        raise RunError("train: call it in the main thread, which alone sees an interrupt")
    callbacks = [on_step] if not isinstance(on_step, Sequence) else [*on_step]
    for each in callbacks:
        if not callable(each):
            raise ConfigError(f"on_step: expected a function that takes the run, got {each!r:.80}")

    if isinstance(model, str):
        overrides["model.name"] = model
    elif model is not None:
        overrides["model"] = model
    table = _table({} if config is None else config, overrides)
    brought = {"weights": weights, "eval_prompts": eval_prompts, "system_prompt": system_prompt}
    if prompts is None and reward is None:
        unread = [name for name, value in brought.items() if value is not None]
        if unread:
            raise ConfigError(f"{unread[0]}: goes with prompts and reward, and there are none")
        if config is None:
            raise ConfigError(
                "train: give a config (a TOML file or its tables), or model, prompts and reward"
            )
    else:
        table = _with_functions(
            table,
            prompts,
            reward,
            eval_prompts,
            weights=weights,
            prompt_column=prompt_column,
            system_prompt=system_prompt,
            in_process=in_process,
        )

    try:
        whole, notices = fitted(build_config(table))
    except ConfigError as error:  # with the key of ours for one of another framework
        raise ConfigError(explained(str(error), [])) from error
    notices += settle(os.environ)
    print(*notices, sep="\n", end="\n" * bool(notices))
    resolved = check(whole, None if resume is None else str(resume))
    check_made(whole, resolved.hooks)
    chosen = resolved.earlier_run
    if chosen is not None:
        print("\n".join(chosen.notes))
        if chosen.is_over:
            assert chosen.run_dir is not None
            return Run(chosen.run_dir)
        with begin(whole, chosen) as (run_dir, checkpoint):
            calls = _calls(callbacks, run_dir)
            train_in(resolved, run_dir, _again(run_dir), checkpoint, calls)
        return Run(run_dir)

    run_dir = make_run_dir(whole)
    with held(run_dir):
        calls = _calls(callbacks, run_dir)
        train_in(resolved, run_dir, _again(run_dir), None, calls)
    return Run(run_dir)


def _with_functions(
    table: dict[str, Any], prompts: Any, reward: Any, eval_prompts: Any, **settings: Any
) -> dict[str, Any]:
    """The config with an env of prompts and reward functions. Raises ``ConfigError``."""
    import prime_rl
    from prime_rl_app.config import merge

    for name, value in (("prompts", prompts), ("reward", reward)):
        if value is None:
            raise ConfigError(f"train: {name} is missing; prompts and reward belong together")
    function_env = getattr(prime_rl, "function_env", None)
    if function_env is None:
        raise ConfigError(
            "train: prompts and reward need the package prime-rl-environments: "
            "pip install prime-rl-environments"
        )
    quick = copy.deepcopy(QUICK)
    if table.get("orchestrator", {}).get("token_batch_size") is not None:
        del quick["orchestrator"]["batch_size"]
    table = copy.deepcopy(merge(quick, table))
    if not isinstance(table.get("model"), Mapping) or not table["model"].get("name"):
        raise ConfigError(
            "train: model is missing: a folder, a hub id (owner/name), or a model that is made "
            "here, such as model='smollm2-135m'"
        )
    output_dir = Path(table.get("output_dir", "outputs"))
    orchestrator = table["orchestrator"]
    train_table = orchestrator["train"]
    if train_table.get("env"):
        raise ConfigError(
            "train: the config has training envs (orchestrator.train.env), and prompts are one "
            "more: which is meant is not clear. Leave one of them out."
        )
    settings["output_dir"] = output_dir
    train_table["env"] = [function_env(prompts, reward, **settings)]
    if eval_prompts is not None:
        try:
            env = function_env(eval_prompts, reward, **settings)
        except ConfigError as error:
            raise ConfigError(f"eval_prompts: {error}") from error
        orchestrator.setdefault("eval", {}).setdefault("env", []).append(env)
    workers = orchestrator.setdefault("workers", {})
    # The key of the functions' seal, which the environments' processes need.
    passed = [*workers.get("pass_env", ()), FUNCTIONS_KEY]
    workers["pass_env"] = list(dict.fromkeys(passed))
    return table


FUNCTIONS_KEY = "PRIME_RL_FUNCTIONS_KEY"
"""Environment variable with the key that seals the functions of a script."""


def _calls(
    callbacks: Sequence[Callable[[Run], object]], run_dir: Path
) -> list[Callable[[int], object]]:
    """Each function with the run as it was after the step."""

    def call(function: Callable[[Run], object], step: int) -> object:
        return function(Run(run_dir, up_to=step))

    return [partial(call, each) for each in callbacks]


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

    def __init__(
        self,
        run: str | Path = LATEST,
        output_dir: str | Path = "outputs",
        *,
        up_to: int | None = None,
    ) -> None:
        """``run``: its path; its name in ``output_dir``; or ``"latest"``, the newest there.
        ``up_to``: a step; later steps are left out of ``step``, ``metrics``, ``evals`` and
        ``rollouts``. Raises ``ConfigError`` if there is none."""
        self.path = find_run(str(run), Path(output_dir))
        """The run directory."""
        self._up_to = math.inf if up_to is None else up_to

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
        return int(min(run_info(self.path).step, self._up_to))

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config. Raises ``RunError`` if its file is missing or damaged."""
        path = self.path / "configs" / "run.json"
        try:
            table: dict[str, Any] = read_table(path)
        except FileNotFoundError as error:
            raise RunError(f"{self.path} is no run directory: {path} does not exist") from error
        return table

    @property
    def metrics(self) -> Any:
        """A ``pyarrow.Table``: one row per step, in order, and one column per metric; null where a
        step lacks it. ``.to_pandas()`` makes a DataFrame. ``docs/run-directory.md`` lists the
        metrics."""
        rows: dict[int, dict[str, Any]] = {}
        for line in read_rows(self.path / "metrics.jsonl"):
            if line["step"] > self._up_to:
                continue
            rows.setdefault(line["step"], {}).update(metrics_of(line))
        names = dict.fromkeys(["step", *(name for row in rows.values() for name in row)])
        ordered = [rows[step] for step in sorted(rows)]
        return importlib.import_module("pyarrow").table(
            {name: [row.get(name) for row in ordered] for name in names}
        )

    @property
    def evals(self) -> list[dict[str, Any]]:
        """The held-out evaluations, one per env and version, in order."""
        lines = _lines(self.path / "evals.jsonl")
        return [line for line in lines if line["policy_version"] <= self._up_to]

    def rollouts(self, step: int | None = None, *, dropped: bool = False) -> Iterator[Rollout]:
        """The rollouts that trained, of one step or of all, in order; ``dropped``: those that a
        filter dropped too. Raises ``RunError`` if nothing is saved for the step."""
        every = step_files(self.path)
        files = {number: path for number, path in every.items() if number <= self._up_to}
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

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The trained model's reply to a text or to messages, with the run's system prompt.

        ``max_tokens``: None for what the run sampled with. ``temperature``: 0 is greedy. The model
        is loaded at the first call and kept. ``prime-rl serve`` and ``chat`` are faster for many
        prompts. Raises ``RunError`` before the end of the run.
        """
        from prime_rl_app.generate import reply

        return reply(
            self.weights,
            self._messages(prompt),
            max_tokens=max_tokens or self._longest_reply(),
            temperature=temperature,
            seed=seed,
        )

    def _messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not isinstance(prompt, str):
            return [dict(message) for message in prompt]
        envs = self.config["orchestrator"]["train"]["env"]
        systems = {(env.get("args") or {}).get("system") for env in envs}
        system = systems.pop() if len(systems) == 1 else None
        opening = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": prompt}]

    def _longest_reply(self) -> int:
        sampling = self.config["orchestrator"]["train"].get("sampling") or {}
        return int(sampling.get("max_completion_tokens") or 256)

    def push(self, to: str | Path, *, private: bool = True) -> str:
        """Copy the trained model to a folder, or upload it to the hub. Returns the folder or the
        address.

        ``to``: a folder, or a hub id (``owner/name``) that is no path. ``private``: whether a
        new repository is private. A folder that holds something else is refused. Raises
        ``ConfigError``, and ``RunError`` before the end of the run."""
        from prime_rl_app.push import push

        return push(self.weights, to, private)

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

        from prime_rl_app.output import as_reward

        info = run_info(self.path)
        picture = self.path / "learning_curve.png"
        reward = "" if info.reward is None else f", reward {as_reward(info.reward)}"
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
