"""Observers of the loop: evaluation, checkpoints, reports.

An observer overrides the methods it needs. The loop calls its observers in order and waits for each
of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prime_rl.orchestrator.buffer import Batch
from prime_rl.plugins.manager import Hooks


class Observer:
    """Every method does nothing unless it is overridden."""

    async def run(self) -> None:
        """Work beside the loop, until cancelled."""

    async def before_training(self) -> None:
        """The engines serve the first weights; no rollout has been requested."""

    async def after_training(self) -> None:
        """The engines serve the last weights."""

    async def stopping(self, last: int) -> None:
        """The user stops the run: step ``last``, now in training, is its last."""

    async def batch_taken(self, batch: Batch) -> None:
        """A batch is complete and not packed yet."""

    async def batch_leaves(self, step: int) -> None:
        """The batch of ``step`` is packed and about to be sent."""

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        """A batch was sent: one frame per trainer rank."""

    async def version_pending(self, version: int) -> None:
        """New weights are published; the engines are about to load them."""

    def version_served(self, version: int) -> None:
        """The engines sample from ``version``."""

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer's own metrics of a step."""


class HookCalls(Observer):
    """Calls the hooks that observe a run."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def version_served(self, version: int) -> None:
        self._hooks.weights_published(version)

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        self._hooks.step_finished(step, metrics)
