"""Conformance checks of sources, monitors, launchers, renderers and models."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from prime_rl import (
    Launcher,
    ModelMaker,
    Monitor,
    PluginConfig,
    RendererOffer,
    Rollout,
    Source,
    SourceRequest,
)
from prime_rl.errors import ConfigError, RunError
from prime_rl.plugins.launchers import ProcessCommand, Task
from prime_rl.registry.components import installed_losses
from prime_rl.registry.guards import is_number
from prime_rl.streams import OBSERVATION_WEIGHTS, WEIGHTS
from prime_rl.testing import FakeHost, conformance_group
from prime_rl.testing.scoring import TASK
from prime_rl_devkit.algorithms.subject import MIXED, different, streams
from prime_rl_devkit.verdicts import Broken, NotApplicable

Checks = tuple[Callable[[type[Any], PluginConfig], None], ...]


def source_gives_groups(cls: type[Source], config: PluginConfig) -> None:
    """It gives the group that is asked for, new and without credit, and feeds losses that exist."""
    for group, number in zip(asyncio.run(_groups(cls(config), (0, 1))), (0, 1), strict=True):
        for rollout in group:
            if not isinstance(rollout, Rollout) or rollout.group_id != number:
                raise Broken(f"asked for group {number}, it gave {rollout!r}")
            if rollout.frozen or rollout.advantages is not None:
                raise Broken("a rollout has credit. Give new rollouts: the algorithm scores them")
            if not rollout.num_trainable_tokens or not math.isfinite(rollout.reward):
                raise Broken(f"a rollout has no token to train, or the reward {rollout.reward}")

    for name, value in source_metrics(cls, config).items():
        if not is_number(value):
            raise Broken(f"metrics gave {name!r}: {value!r}, expected a number by its name")
    known = {*installed_losses().installed, "rl", OBSERVATION_WEIGHTS.removesuffix(WEIGHTS)}
    unknown = sorted(cls.feeds - known)
    if unknown:
        raise Broken(f"feeds names {unknown[0]!r}, which is no installed loss")


def source_metrics(cls: type[Source], config: PluginConfig) -> dict[str, Any]:
    """Those of a source that has given a group."""
    source = cls(config)
    asyncio.run(_groups(source, (0,)))
    return dict(source.metrics())


def source_resumes(cls: type[Source], config: PluginConfig) -> None:
    """It continues from what it saved."""
    if cls.save is Source.save:
        raise NotApplicable("saves nothing: a resumed run starts it anew")
    stopped = cls(config)
    resumed = cls(config)
    asyncio.run(_groups(stopped, (0, 1)))
    with TemporaryDirectory() as folder:
        stopped.save(Path(folder))
        expected = asyncio.run(_groups(stopped, (2, 3, 4), set_up=False))
        asyncio.run(_set_up(resumed))
        resumed.load(Path(folder))

    groups = asyncio.run(_groups(resumed, (2, 3, 4), set_up=False))
    if _tokens(groups) != _tokens(expected):
        raise Broken(
            f"after save and load it gives {_tokens(groups)[:1]}, expected {_tokens(expected)[:1]}"
        )


async def _set_up(source: Source) -> None:
    try:
        await source.setup(FakeHost(tasks=[dict(TASK)] * 8))
    except ConfigError as error:
        raise NotApplicable(f"it needs more than the kit has: {error}") from error


async def _groups(
    source: Source, numbers: Sequence[int], *, set_up: bool = True
) -> list[Sequence[Rollout]]:
    """The groups of these numbers; a source that waits for rollouts gets some first."""
    if set_up:
        await _set_up(source)
    if not source.is_ready:
        for number in range(8):
            group = conformance_group(MIXED)
            for rollout in group:
                rollout.group_id = number
                rollout.assign_advantages(rollout.reward - 0.5)
                rollout.freeze()
            source.observe(group)

    if not source.is_ready:
        raise NotApplicable("it is not ready after 8 groups of the kit: is_ready is False")
    examples = source.num_examples or 1
    return [
        await source.group(SourceRequest(group_id=n, example_id=n % examples, policy_version=0))
        for n in numbers
    ]


def _tokens(groups: Sequence[Sequence[Rollout]]) -> list[list[list[int]]]:
    return [[[*map(int, s.token_ids)] for r in group for s in r.samples] for group in groups]


def monitor_logs(cls: type[Monitor], config: PluginConfig) -> None:
    """It takes the metrics of steps in any order, and rollouts, and changes neither; then it
    closes."""
    group = conformance_group(MIXED)
    for rollout in group:
        rollout.assign_advantages(rollout.reward)
        rollout.freeze()

    before = streams(group)
    with TemporaryDirectory() as folder:
        monitor = cls(config, Path(folder))
        try:
            for step in (1, 0):
                monitor.log(step, MappingProxyType({"loss/mean": 0.5, "time/step": 1.0}))
            monitor.log(2, MappingProxyType({"train/mismatch_kl": math.nan}))
            wanted = monitor.wants_rollouts(0)
            if not isinstance(wanted, bool):
                raise Broken(f"wants_rollouts gave {wanted!r}, expected True or False")
            monitor.log_rollouts(0, group, [None, "too short", None])
        finally:
            monitor.close()

    difference = different(streams(group), before)
    if difference:
        raise Broken(f"log_rollouts changed the rollouts: {difference}. Work on a copy.")


def launcher_runs_a_process(cls: type[Launcher], config: PluginConfig) -> None:
    """It finds a place, starts a process there, keeps its output and exit code, and ends one that
    does not end by itself."""
    launcher = cls(config)
    quick = Task("quick", "trainer", num_ports=1)
    slow = Task("slow", "orchestrator")
    with TemporaryDirectory() as folder:
        try:
            places = launcher.place([quick, slow], Path(folder), lambda text: None)
            missing = {"quick", "slow"} - {*places}
            if missing:
                raise Broken(f"place gave none to {', '.join(sorted(missing))}")
            _runs(launcher, quick, slow=slow, folder=Path(folder))
        except (ConfigError, RunError) as error:
            raise NotApplicable(f"it needs what is not here: {error}") from error
        finally:
            launcher.close()


def _runs(launcher: Launcher, quick: Task, slow: Task, folder: Path) -> None:
    python = [sys.executable, "-c"]
    greets = [*python, "import os; print(os.environ['GREETING']); raise SystemExit(3)"]
    waits = [*python, "import time; time.sleep(3600)"]
    command = ProcessCommand(greets, folder / "quick.log", {"GREETING": "hello"})
    processes = [
        launcher.start(quick, command),
        launcher.start(slow, ProcessCommand(waits, folder / "slow.log")),
    ]
    try:
        while (code := processes[0].exit_code) is None:
            time.sleep(0.05)
        if code != 3:
            raise Broken(f"a process that ends with 3 has the exit code {code}")
        if "hello" not in processes[0].last_lines():
            raise Broken(f"its log has {processes[0].last_lines()}, expected what it printed")
        if processes[1].exit_code is not None:
            raise Broken(f"a process that runs has the exit code {processes[1].exit_code}")
    finally:
        launcher.end(processes)

    if processes[1].exit_code is None:
        raise Broken("a process runs after end()")


def renderer_refuses_in_words(cls: type[RendererOffer], config: PluginConfig) -> None:
    """``check`` takes a model or refuses it by a ``ConfigError``, without loading it. ``build``
    needs a tokenizer: the package's own tests check it."""
    if cls.build is RendererOffer.build:
        raise Broken("it has no build(model, fields): nothing could render")
    try:
        cls(config).check("no-such-model")
    except ConfigError:
        return


def model_is_reproducible(cls: type[ModelMaker], config: PluginConfig) -> None:
    """It writes a model folder, the same one for the same seed, and reports shares from 0 to 1."""
    if find_spec("torch") is None:
        raise NotApplicable("torch is not installed")
    shares: list[float] = []
    digests = []
    for _ in range(2):
        with TemporaryDirectory() as folder:
            cls(config).make(Path(folder), 0, lambda state, share: shares.append(share))
            digests.append({p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()})

    first, again = digests
    if "config.json" not in first or not any(name.endswith(".safetensors") for name in first):
        raise Broken(f"it wrote {sorted(first)}, expected config.json and safetensors")
    changed = [name for name in first if first[name] != again.get(name)]
    if changed:
        raise Broken(f"seed 0 gave another {changed[0]} the second time. Draw from the seed.")
    if not all(0 <= share <= 1 for share in shares):
        raise Broken(f"progress reported {shares}, expected shares from 0 to 1")


SOURCE: Checks = (source_gives_groups, source_resumes)
MONITOR: Checks = (monitor_logs,)
LAUNCHER: Checks = (launcher_runs_a_process,)
RENDERER: Checks = (renderer_refuses_in_words,)
MODEL: Checks = (model_is_reproducible,)
