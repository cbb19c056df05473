"""What sees a run: ``RunObserver``, whose three subclasses say where they run.

``Observer`` works beside the loop, at its events. ``Monitor`` receives metrics, in a thread of its
own. Both are the orchestrator's. ``TrainerObserver`` (``trainer.py``) is called in the trainer. The
hook ``register_observers`` takes all of them.
"""

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
        """The resolved config, frozen: tables of the TOML are attributes, as in
        ``config.orchestrator.group_size``. ``docs/config.md`` lists its keys. Its class is core's
        (``config/run.py``), so the contract cannot name it."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""

    @property
    def launch(self) -> Any:
        """The fields of ``configs/launch.json``, as attributes: addresses of the processes, and
        ``first_step``, which is greater than 1 in a resumed run."""

    @property
    def hooks(self) -> Any:
        """The loaded plugins: an argument of functions of core that find offers by name."""

    @property
    def status(self) -> Any:
        """What the orchestrator's process says of itself: ``status.report(state, **details)`` shows
        the text ``state``, and details by name."""


class SharedParts(Protocol):
    """What every part of a run's orchestrator shares."""

    @property
    def run(self) -> RunFacts:
        """The run: its config, its folder, its status."""

    @property
    def engines(self) -> Any:
        """The policy's engines. ``engines.policy.version``: int, the version that they serve.
        ``engines.fleet.engines``: each of them, also those that do not serve now."""

    @property
    def router(self) -> Any:
        """Samples from the policy's engines: ``await router.run(key, episode)`` plays an episode at
        the engine that has played others of the same key."""


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
    """``environment(table, harness)``: the environment of a table ``[[orchestrator.eval.env]]``,
    whose ``run`` plays one example; the harness is for where the env and its taskset have none."""
    is_scoring: Callable[[], bool] = lambda: False
    """Whether an algorithm is scoring a group: it may wait for a teacher."""
    num_waiting: Callable[[], int] = lambda: 0
    """Rollouts that were requested and have no place in the buffer yet."""
    scored_alone: Callable[[str], bool] = lambda env: False
    """Whether each rollout of an env is a group of its own for ``group_scored``, since nothing
    compares siblings."""
    max_inflight: Callable[[], int] = lambda: 1
    """Rollouts for training that may be sampled at once now: the config's, or by default what the
    engines say that they can run."""
    evaluated: Callable[[int, Mapping[str, float]], None] = lambda version, metrics: None
    """``evaluated(version, metrics)``: what an evaluation found, now or in an earlier attempt at
    the run. Gates of training envs read it (``opens``)."""


class RunObserver(Offer):
    """Sees a run, and changes nothing that it trains. Derive from the subclass of the place where
    it is to run: ``Observer``, ``Monitor`` or ``TrainerObserver``.

    The places are processes and threads of their own, so an instance has the methods of one: what
    it keeps on ``self`` in the trainer, no method in the orchestrator could read. What needs two
    places is two classes of one plugin.
    """

    @staticmethod
    def check(config: Any) -> None:
        """Raise ``ConfigError`` if the run's resolved config (see ``RunFacts.config``) does not
        fit, before anything starts; or warn with ``ConfigWarning``. Called where the observer takes
        part."""


class Observer(RunObserver):
    """Takes part in every run in which it is installed. It overrides the methods it needs.

    The loop calls its observers in order and waits for each of them: reports first, then installed
    observers by name, then checkpoints and sampling. An exception ends the run.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Keys of the TOML, dotted, that only it reads: set without it, they are an error."""

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config)
        self.host = host

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
        """Rollouts that end without a score, so that no batch sees them. ``outcome``:
        ``error/<class>``; ``cancelled`` for those in flight that new weights made too old, or that
        ``partial_groups`` cut off; ``stopped`` for members beyond the number that
        ``wanted_members`` asked for. Scored rollouts that do not train are in ``Batch.dropped``."""

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
        """The engines sample from ``version``. They skip a version if a newer one is there, so this
        is not called for each."""

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer's own metrics of a step."""

    async def checkpoint_complete(self, step: int, folder: Path) -> None:
        """The checkpoint of ``step`` is complete, in ``folder``: its files never change.

        The run goes on meanwhile, so an upload may take its time; the next checkpoint is announced
        after it. ``ckpt.keep_last`` may delete the folder once newer ones are complete. At its end
        the run waits for the last checkpoint if any observer has this method. A resumed run begins
        with the call for the checkpoint it resumes: the attempt before may have missed it."""

    def take_metrics(self) -> Mapping[str, float]:
        """What was measured since the last call; logged with the next batch."""
        return {}


class Monitor(RunObserver):
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
