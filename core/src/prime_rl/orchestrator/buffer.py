"""From scored groups to a batch: first in, first out, without what is stale or filtered."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Sequence

from prime_rl.errors import PluginError, RunError
from prime_rl.plugins.algorithm import Filter
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch, Group, Rollout

STALE = "stale"
FAILED = "failed"
REJECTED = "sampler"
LEFT_OUT = "left out by its algorithm"

MOST_REASON = 300
"""Characters of a rollout's reason that an error quotes."""
WHY_FAILED = "Each failure and its reason is a warning in logs/latest/orchestrator.log."
WHY_DROPPED = (
    "A filter that drops every rollout often means that the rewards in each group are equal: the "
    "task is too easy or too hard for the policy."
)


class NothingToTrain(RunError):
    """No rollout of several batches may train."""


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
        self._size = batch_size
        self._whole_groups = whole_groups
        self._max_off_policy = max_off_policy_steps
        self._pre = pre
        self._post = post
        self._patience = max_empty_batches * batch_size
        self._pending: deque[tuple[Rollout, Group]] = deque()
        """Each with its group."""
        self._fruitless = 0
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        """Of failed rollouts, by the reason without its numbers."""
        self._examples: dict[str, str] = {}
        """The newest reason of each sort."""
        self.batch = Batch(first_step)
        self._full = asyncio.Event()
        self._room = asyncio.Event()
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
        group_id = self._pending[0][0].group_id
        if self.batch.kept[-1].group_id == group_id:  # a group may be larger than a batch
            return False
        return sum(rollout.group_id == group_id for rollout, _ in self._pending) > room

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
            elif objectors := self._pre.objectors(rollout, rollouts):
                self._drop(rollout, "pre_batch_filters", *objectors)
            else:
                self._pending.append((rollout, rollouts))
        self.fill()

    def note_failure(self, reason: str) -> None:
        """Why a rollout has failed. Reasons that differ in numbers only count as one."""
        line = " ".join(reason.split())[:MOST_REASON]
        sort = re.sub(r"\d+", "0", line)
        self._failures[sort] += 1
        self._examples[sort] = line

    def note_failed(self, count: int, env: str) -> None:
        """Failed rollouts also count as fruitless."""
        self._count_fruitless(count, f"{FAILED}, env {env!r}")

    def fill(self) -> None:
        """Move pending rollouts into the batch until it is full; drop what is stale or filtered."""
        while self._pending and not self.is_full:
            rollout, group = self._pending.popleft()
            if self.staleness(rollout) > self._max_off_policy:
                self._drop(rollout, STALE)
            elif objectors := self._post.objectors(rollout, group):
                self._drop(rollout, "post_batch_filters", *objectors)
            elif not rollout.has_members:
                self._drop(rollout, LEFT_OUT)
            else:
                self.batch.kept.append(rollout)
                self.batch.seen.append(rollout)
                self._fruitless = 0
                self._reasons.clear()
                self._failures.clear()
                self._examples.clear()

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
        return decided + [(rollout, None) for rollout, _ in self._pending]

    def restore(self, buffered: Sequence[tuple[Rollout, str | None]]) -> None:
        """Continue with what another buffer held; post-batch filters decide again."""
        groups: dict[tuple[str, int], list[Rollout]] = {}
        for rollout, reason in buffered:
            group = groups.setdefault((rollout.env, rollout.group_id), [])
            group.append(rollout)
            if reason is None:
                self._pending.append((rollout, group))
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
            why = WHY_FAILED if failing else WHY_DROPPED
            for sort, count in self._failures.most_common(1):
                why = f"{count} failed with: {self._examples[sort]}. {why}"
            raise NothingToTrain(
                f"step {self.batch.step}: the last {self._fruitless} rollouts left nothing to "
                f"train ({reasons}). {why} "
                "orchestrator.max_empty_batches sets the patience."
            )


class FilterSlot:
    """The filters of one slot, each with every installed plugin's wrappers around it."""

    def __init__(self, label: str, shared: Hooks, filters: Sequence[tuple[Filter, bool]]) -> None:
        self.label = label
        self.seen = 0
        self.dropped = 0
        self.objections: Counter[str] = Counter()
        enforce = {id(filter): flag for filter, flag in filters}
        hooks = scope(label, shared, [filter for filter, _ in filters])
        impls = [i for i in hooks.hook.filter_rollout.get_hookimpls() if not i.wrapper]
        plugins = [impl.plugin for impl in impls]
        self._calls = [
            (
                getattr(impl.plugin, "name", impl.plugin_name),
                enforce.get(id(impl.plugin), True),
                hooks.subset_hook_caller(
                    "filter_rollout", [other for other in plugins if other is not impl.plugin]
                ),
            )
            for impl in impls
        ]

    def objectors(self, rollout: Rollout, group: Group = ()) -> list[str]:
        """Call every filter; ``group``: of the rollout, empty for it alone. Returns the enforcing
        ones that object: none if it may train."""
        self.seen += 1
        enforcing = []
        for name, is_enforcing, call in self._calls:
            reasons = call(rollout=rollout, group=group or [rollout])
            wrong = [reason for reason in reasons if not isinstance(reason, str)]
            if wrong:
                raise PluginError(
                    f"filter {name!r}: filter_rollout gave {wrong[0]!r}, expected the reason to "
                    "drop the rollout, or None to keep it"
                )

            self.objections[name] += bool(reasons)
            if reasons and is_enforcing:
                enforcing.append(name)

        self.dropped += bool(enforcing)
        return enforcing

    def take_metrics(self) -> dict[str, float]:
        """Shares since the last call: ``filters/<slot>/<name>`` and ``.../dropped``."""
        seen = max(self.seen, 1)
        metrics = {
            f"filters/{self.label}/{name}": self.objections[name] / seen
            for name, _, _ in self._calls
        }
        metrics[f"filters/{self.label}/dropped"] = self.dropped / seen
        self.seen = 0
        self.dropped = 0
        self.objections.clear()
        return metrics
