"""The real loop, sampling, scoring, buffer, packer and watcher of an orchestrator, in this process;
a fake environment, wire and engines. In an event loop whose clock jumps, a run of minutes takes as
long as its computations."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rotating import RotatingSampler

from prime_rl import Algorithm, Filter, Observer, PluginConfig, Rollout, hookimpl
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.context import Engines, Outages, RunContext
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.policy import LivePolicy, WeightWatcher
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.plugins.sampler import SampledEnv
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.testing import make_rollout
from prime_rl.wire.micro_batch import decode_batch

STEPS = 3


class AboveMean(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "above_mean"

    @hookimpl
    def score_group(self, group: Any) -> None:
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)


class Rollouts:
    """An environment: rollouts of five tokens, with the member's number as reward."""

    is_live, whole_group, num_examples, is_ready = True, False, 10, True

    def __init__(self, produce: Callable[[RolloutRequest], Awaitable[None]] | None = None) -> None:
        self.asked: list[RolloutRequest] = []
        self.fates: list[tuple[float, str | None]] = []
        """The reward of each settled rollout, and why it does not train."""
        self._produce = produce

    async def produce(self, ask: RolloutRequest) -> Sequence[Any]:
        self.asked.append(ask)
        if self._produce is not None:
            await self._produce(ask)
        rollout = make_rollout(float(ask.member), env="e", group_id=ask.group_id)
        rollout.policy_version = ask.policy_version
        return [rollout]

    def observe(self, group: Any) -> None:
        pass

    def settled(self, rollouts: Sequence[Rollout], reason: str | None) -> None:
        self.fates += [(rollout.reward, reason) for rollout in rollouts]


class Trainer:
    """The wire and the trainer: publishes a version for each batch."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.frames = run_dir, []
        self.credit: list[set[float]] = []
        """The distinct advantages of each step's sampled tokens."""

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        number, rows = decode_batch(frames[0])
        assert number == step
        self.frames.append((step, sum(map(len, rows))))
        self.credit.append({float(a) for row in rows for a in row.advantages[row.loss_mask]})
        if rows:
            folder = self.run_dir / "broadcasts" / f"step_{step}"
            folder.mkdir(parents=True)
            with (self.run_dir / "trainer.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": 0.0, "metrics": {"loss": 0.5}}) + "\n")
            (folder / "STABLE").touch()

    async def drain(self) -> None:
        pass


class TimedTrainer(Trainer):
    """Takes ``seconds`` for each batch, one after the other."""

    def __init__(self, run_dir: Path, seconds: float) -> None:
        super().__init__(run_dir)
        self.seconds = seconds
        self.free = 0.0
        self.ends: list[float] = []
        """When each version was published."""

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        loop, send = asyncio.get_running_loop(), super().send
        self.free = max(self.free, loop.time()) + self.seconds
        self.ends.append(self.free)
        loop.call_at(self.free, lambda: loop.create_task(send(step, frames)))


class Fleet:
    """Engines that load whatever is published."""

    asleep = False

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.serving: list[Any] = []

    async def update_weights(self, folder: Path, version: int) -> float:
        self.loaded.append(version)
        return 0.0

    def take_paused(self) -> float:
        return 0.0


class Diary(Observer):
    """Records the calls of the loop, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.scored: list[tuple[int, int]] = []

    async def before_training(self) -> None:
        self.lines.append("before")

    async def after_training(self) -> None:
        self.lines.append("after")

    async def stopping(self, last: int) -> None:
        self.lines.append(f"stopping {last}")

    async def batch_taken(self, batch: Batch) -> None:
        assert all(rollout.frozen for rollout in batch.kept)
        self.lines.append(f"taken {batch.step}")

    async def batch_leaves(self, step: int) -> None:
        self.lines.append(f"leaves {step}")

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        self.lines.append(f"sent {batch.step}")

    def group_scored(self, group: Any, version: int) -> None:
        self.scored.append((group[0].group_id, version))

    def version_served(self, version: int) -> None:
        self.lines.append(f"version {version}")

    def step_trained(self, step: int, metrics: Any) -> None:
        self.lines.append(f"trained {step} {metrics['loss']}")


class World:
    """A run of three batches of four rollouts, two to a group."""

    def __init__(
        self,
        run_dir: Path,
        produce: Any = None,
        algorithm: type = AboveMean,
        filters: Sequence[Filter] = (),
        max_steps: int = STEPS,
        seq_len: int = 64,
        **settings: Any,
    ) -> None:
        settings = {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 0} | settings
        config = RunConfig.model_validate(
            {
                "model": {"name": "m"},
                "max_steps": max_steps,
                "seq_len": seq_len,
                "orchestrator": {**settings, "train": {"env": [{"id": "e"}]}},
            }
        )  # fmt: skip
        launch = Launch(
            model_path="m", served_model_name="m", engine_urls=[], transport_type="zmq",
            transport_host="", transport_ports=[],
        )  # fmt: skip
        hooks = Hooks()
        self.context = RunContext(config, launch, run_dir, hooks, Status(None))
        self.fleet, self.trainer, self.diary = Fleet(), Trainer(run_dir), Diary()
        self.engines = Engines(self.fleet, LivePolicy(0), Outages())  # type: ignore[arg-type]
        self.source, built = Rollouts(produce), algorithm(PluginConfig())
        env = SimpleNamespace(
            name="e", source=self.source, algorithm=built, hooks=scope("e", hooks, [built]),
            group_size=settings["group_size"], limits=None, host=SimpleNamespace(agents=("agent",)),
        )  # fmt: skip
        sampler = RotatingSampler(PluginConfig(), [SampledEnv("e", 10, None)], 0)
        slots = [
            FilterSlot("pre", hooks, []),
            FilterSlot("post", hooks, [(f, True) for f in filters]),
        ]
        size, lag = (settings[key] for key in ("batch_size", "max_off_policy_steps"))
        buffer = Buffer(
            batch_size=size, max_off_policy_steps=lag, pre=slots[0], post=slots[1],
            max_empty_batches=9,
        )  # fmt: skip
        reporter = Reporter(hooks, [])
        self.sampling = Sampling(
            self.context,
            self.engines,
            [env],
            sampler,
            buffer,
            [self.diary],  # type: ignore[list-item]
        )
        observers = [self.diary, reporter, self.sampling]
        weights = WeightWatcher(
            run_dir,
            self.engines.policy,
            self.fleet,
            observers,  # type: ignore[arg-type]
        )
        packer = Packer(config, 1, hooks, self.context.losses)
        self.loop = Orchestrator(
            self.context, self.sampling, buffer, packer, self.trainer, weights, observers
        )


class Simulated(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event: no test waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selector := selectors.DefaultSelector())
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
            return select(0)

        selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now
