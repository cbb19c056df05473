"""From scored groups to a batch: first in, first out, without what is stale or filtered."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_rl.errors import RunError
from prime_rl.orchestrator.filters import FilterSlot
from prime_rl.rollout import Rollout

STALE, FAILED, REJECTED, LEFT_OUT = "stale", "failed", "sampler", "left out by its algorithm"

WHY_FAILED = "Each failure and its reason is a warning in logs/latest/orchestrator.log."
WHY_DROPPED = (
    "A filter that drops every rollout often means that the rewards in each group are equal: the "
    "task is too easy or too hard for the policy."
)


@dataclass
class Batch:
    """The rollouts of one optimizer step, and those that were dropped on the way to it."""

    step: int
    kept: list[Rollout] = field(default_factory=list)
    """What trains."""
    seen: list[Rollout] = field(default_factory=list)
    """What trains and what was dropped, in the order of the decisions."""
    dropped: dict[int, str] = field(default_factory=dict)
    """The reason by ``id()`` of the rollout: the slot that objected, or one of the words above."""

    @property
    def num_stale(self) -> int:
        """Rollouts that became too old while they waited."""
        return sum(reason == STALE for reason in self.dropped.values())


class Buffer:
    """Holds scored rollouts until a batch is full."""

    def __init__(
        self,
        *,
        batch_size: int,
        max_off_policy_steps: int,
        pre: FilterSlot,
        post: FilterSlot,
        max_empty_batches: int,
        first_step: int = 1,
        whole_groups: bool = False,
    ) -> None:
        self._size, self._whole_groups = batch_size, whole_groups
        self._max_off_policy = max_off_policy_steps
        self._pre, self._post = pre, post
        self._patience = max_empty_batches * batch_size
        self._pending: deque[Rollout] = deque()
        self._fruitless = 0
        self._reasons: Counter[str] = Counter()
        self.batch = Batch(first_step)
        self._full, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    @property
    def num_buffered(self) -> int:
        """Rollouts that have a place in the batch or wait for one."""
        return len(self._pending) + len(self.batch.kept)

    @property
    def is_full(self) -> bool:
        """Whether the batch has all its rollouts, or no room for the whole of the next group."""
        room = self._size - len(self.batch.kept)
        if not (self._whole_groups and self._pending and self.batch.kept):
            return room <= 0
        group_id = self._pending[0].group_id
        if self.batch.kept[-1].group_id == group_id:  # a group may be larger than a batch
            return False
        return sum(rollout.group_id == group_id for rollout in self._pending) > room

    async def wait_until_full(self) -> None:
        """Until ``take`` has a batch to give."""
        await self._full.wait()

    async def wait_for_room(self) -> None:
        """Until the batch needs more rollouts."""
        await self._room.wait()

    def add(self, rollouts: Sequence[Rollout], rejected: str | None = None) -> None:
        """Take in a scored group, unless the sampler has ``rejected`` it (with this reason) or a
        pre-batch filter objects."""
        for rollout in rollouts:
            if rejected is not None:
                self._drop(rollout, REJECTED, rejected)
            elif objectors := self._pre.objectors(rollout):
                self._drop(rollout, "pre_batch_filters", *objectors)
            else:
                self._pending.append(rollout)
        self.fill()

    def note_failed(self, count: int, env: str) -> None:
        """Failed rollouts also count as fruitless."""
        self._count_fruitless(count, f"{FAILED}, env {env!r}")

    def fill(self) -> None:
        """Move pending rollouts into the batch until it is full; drop what is stale or filtered."""
        while self._pending and not self.is_full:
            rollout = self._pending.popleft()
            if self.staleness(rollout) > self._max_off_policy:
                self._drop(rollout, STALE)
            elif objectors := self._post.objectors(rollout):
                self._drop(rollout, "post_batch_filters", *objectors)
            elif not rollout.has_members:
                self._drop(rollout, LEFT_OUT)
            else:
                self.batch.kept.append(rollout)
                self.batch.seen.append(rollout)
                self._fruitless = 0
                self._reasons.clear()
        for event, holds in ((self._full, self.is_full), (self._room, not self.is_full)):
            event.set() if holds else event.clear()

    def staleness(self, rollout: Rollout) -> int:
        """Versions between the weights this batch trains and those the rollout started under, queue
        time included. What no live policy sampled does not age."""
        return (self.batch.step - 1) - rollout.policy_version if rollout.is_live else 0

    @property
    def buffered(self) -> list[tuple[Rollout, str | None]]:
        """Every rollout that no batch has taken yet, in order, and the reason if it was dropped on
        the way to the next one."""
        decided = [(rollout, self.batch.dropped.get(id(rollout))) for rollout in self.batch.seen]
        return decided + [(rollout, None) for rollout in self._pending]

    def restore(self, buffered: Sequence[tuple[Rollout, str | None]]) -> None:
        """Continue with what another buffer held; post-batch filters decide again."""
        for rollout, reason in buffered:
            if reason is None:
                self._pending.append(rollout)
            else:
                self.batch.dropped[id(rollout)] = reason
                self.batch.seen.append(rollout)
        self.fill()

    def take(self) -> Batch:
        """The full batch, in the order in which its groups were opened."""
        batch, self.batch = self.batch, Batch(self.batch.step + 1)
        batch.kept.sort(key=lambda rollout: rollout.group_id)
        self.fill()
        return batch

    def take_metrics(self) -> dict[str, float]:
        return self._pre.take_metrics() | self._post.take_metrics()

    def _drop(self, rollout: Rollout, reason: str, *details: str) -> None:
        self.batch.dropped[id(rollout)] = reason
        self.batch.seen.append(rollout)
        which = f": {', '.join(details)}" if details else ""
        self._count_fruitless(1, f"{reason}{which}, env {rollout.env!r}")

    def _count_fruitless(self, count: int, reason: str) -> None:
        self._fruitless += count
        self._reasons[reason] += count
        if self._fruitless >= self._patience:
            reasons = "; ".join(f"{n} x {name}" for name, n in self._reasons.most_common())
            failing = self._reasons.most_common(1)[0][0].startswith(FAILED)
            raise RunError(
                f"step {self.batch.step}: the last {self._fruitless} rollouts left nothing to "
                f"train ({reasons}). {WHY_FAILED if failing else WHY_DROPPED} "
                "orchestrator.max_empty_batches sets the patience."
            )
