"""Observers work beside the loop, at its events; monitors receive metrics. Orchestrator side:
entry-point group ``prime_rl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from prime_rl.plugins.base import Offer, PluginConfig

if TYPE_CHECKING:
    from prime_rl.rollout import Batch, Group, Rollout


class RunFacts(Protocol):
    """One attempt at one run."""

    @property
    def config(self) -> Any:
        """The resolved config: ``docs/config.md`` lists its keys."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""

    @property
    def launch(self) -> Any:
        """Where its processes run, and its first step."""

    @property
    def hooks(self) -> Any:
        """The loaded plugins."""

    @property
    def status(self) -> Any:
        """What the orchestrator's process says of itself: ``status.report(state)``."""


class SharedParts(Protocol):
    """What every part of a run's orchestrator shares."""

    @property
    def run(self) -> RunFacts:
        """The run: its config, its folder, its status."""

    @property
    def engines(self) -> Any:
        """The policy's engines: ``engines.policy.version`` is the version that they serve."""

    @property
    def router(self) -> Any:
        """Samples from the policy's engines."""


@dataclass(frozen=True, eq=False)
class ObserverHost:
    """What core lends to an observer that a plugin brought."""

    shared: SharedParts
    """Config, engines and status of the run."""
    log: Callable[[int, Mapping[str, float]], None]
    """Passes metrics of a step to every monitor."""
    num_inflight: Callable[[], int]
    """Rollouts in flight for training."""
    environment: Callable[..., Any]
    """``environment(table, harness)``: the environment of a table ``[[orchestrator.eval.env]]``;
    the harness is for where the env and its taskset have none."""
    is_scoring: Callable[[], bool] = lambda: False
    """Whether an algorithm is scoring a group: it may wait for a teacher."""
    num_waiting: Callable[[], int] = lambda: 0
    """Rollouts that were requested and have no place in the buffer yet."""


class Observer(Offer):
    """Takes part in every run in which it is installed. It overrides the methods it needs.

    The loop calls its observers in order and waits for each of them: reports first, then installed
    observers by name, then checkpoints and sampling. An exception ends the run.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Keys of the TOML, dotted, that only it reads: set without it, they are an error."""

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config)
        self.host = host

    @staticmethod
    def check(config: Any) -> None:
        """Raise ``ConfigError`` if the run's resolved config does not fit, before anything
        starts."""

    async def setup(self) -> None:
        """Prepare, while the engines start."""

    async def close(self) -> None:
        """The run has ended, or ``setup`` has failed."""

    async def run(self) -> None:
        """Work beside the loop, until cancelled."""

    async def before_training(self) -> None:
        """The engines serve the first weights; no rollout has been requested."""

    async def after_training(self) -> None:
        """The engines serve the last weights."""

    async def stopping(self, last: int) -> None:
        """The user stops the run: step ``last``, now in training, is its last."""

    def group_scored(self, group: Group, version: int) -> None:
        """A group has its credit; ``version`` is the policy's now."""

    def rollouts_lost(self, env: str, outcome: str, number: int) -> None:
        """Rollouts that no batch gets. ``outcome``: ``error/<class>``, or ``cancelled`` for those
        that new weights made too old."""

    def rollout_failed(self, env: str, kind: str, tokens: int, turns: int) -> None:
        """An ``error/<kind>`` of ``rollouts_lost``, after so many sampled tokens and turns."""

    async def batch_taken(self, batch: Batch) -> None:
        """A batch is complete and not packed yet."""

    async def batch_leaves(self, step: int) -> None:
        """The batch of ``step`` is packed and about to be sent."""

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        """A batch is being sent: one frame per trainer rank. What is written here is on disk before
        the batch can become part of a checkpoint."""

    def batch_lost(self, batch: Batch) -> None:
        """The run ends because nothing was left to train: ``batch.dropped`` says why. Observers are
        called from last to first."""

    async def version_pending(self, version: int) -> None:
        """The engines are about to load ``version``: complete what needs the present one. Colocated
        engines sleep until then; installed observers are called before that too."""

    def version_served(self, version: int) -> None:
        """The engines sample from ``version``."""

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer's own metrics of a step."""

    def take_metrics(self) -> Mapping[str, float]:
        """What was measured since the last call; logged with the next batch."""
        return {}


class Monitor(Offer):
    """Receives metrics. A failing monitor is reported and does not stop the run."""

    in_background: ClassVar[bool] = True
    """Its methods run in a thread of its own, behind a bounded queue, so a slow monitor delays
    nothing. False: the loop calls it and waits."""

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        """Keep this quick: connect at the first ``log``."""
        super().__init__(config)
        self.run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, from one process, by ``group/name``. Steps may come out of order:
        batch n + 1 leaves before step n is trained."""
        raise NotImplementedError

    def wants_rollouts(self, step: int) -> bool:
        """Whether to call ``log_rollouts`` for batch ``step``. Called from the loop."""
        return False

    def log_rollouts(
        self, step: int, rollouts: Sequence[Rollout], dropped: Sequence[str | None]
    ) -> None:
        """Every rollout decided on for batch ``step``, with its credit; ``dropped`` says why each
        does not train (None: it trains). Read only."""

    def close(self) -> None:
        """Flush what is still held."""
