"""From scored groups to a batch: first in, first out, without what is stale or filtered."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from prime_rl.errors import PluginError, RunError
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.plugins.algorithm import Filter
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch, Group, Rollout

STALE = "stale"
FAILED = "failed"
REJECTED = "sampler"
LEFT_OUT = "left out by its algorithm"
PRE = "pre_batch_filters"
POST = "post_batch_filters"
"""How a rollout ends that does not train (``Batch.dropped``)."""

MOST_REASON = 300
"""Characters of a rollout's reason that an error quotes."""
WHY_FAILED = "Each failure and its reason is a warning in logs/latest/orchestrator.log."
WHY_DROPPED = (
    "A filter that drops every rollout often means that the rewards in each group are equal: the "
    "task is too easy or too hard for the policy."
)


class NothingToTrain(RunError):
    """Several batches in a row had no rollout to train on."""


class Buffer:
    """Holds scored rollouts until a batch is full."""

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        max_off_policy_steps: int,
        pre: FilterSlot,
        post: FilterSlot,
        max_empty_batches: int,
        first_step: int = 1,
        whole_groups: bool = False,
        size: BatchSize | None = None,
    ) -> None:
        """The batch has ``batch_size`` rollouts, or what ``size`` says."""
        self._size = size or BatchSize(batch_size)
        self._whole_groups = whole_groups
        self._max_off_policy = max_off_policy_steps
        self._pre = pre
        self._post = post
        # Patience counts places, because the rollouts of a token batch differ in length.
        self._patience = max_empty_batches * self._size.places

        self._pending: deque[tuple[Rollout, Group]] = deque()
        """Each with its group."""
        self._pending_places = 0
        self._kept_places = 0

        self._fruitless = 0
        self._fruitless_places = 0.0
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        """Number of failed rollouts by reason, with the reason's numbers left out."""
        self._examples: dict[str, str] = {}
        """The newest reason of each sort."""

        self.batch = Batch(first_step)
        self._full = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def num_buffered(self) -> int:
        """Places of the rollouts in the batch, and of those that wait: with ``batch_size`` their
        number, with ``token_batch_size`` their tokens."""
        return self._pending_places + self._kept_places

    @property
    def group_filters(self) -> list[str]:
        """The filters that read the siblings of a rollout."""
        return [*self._pre.group_filters, *self._post.group_filters]

    @property
    def is_full(self) -> bool:
        """Whether the batch has all its rollouts, or no room for the whole of the next group. A
        batch of tokens takes a whole group beyond its size."""
        room = self._size.places - self._kept_places
        if not (self._whole_groups and self._pending and self.batch.kept):
            return room <= 0

        group_id = self._pending[0][0].group_id
        if self.batch.kept[-1].group_id == group_id:  # a group may be larger than a batch
            return False
        if self._size.by_tokens:
            return room <= 0

        # `add` takes in whole groups, so all of the group's rollouts are pending here.
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
                self._drop(rollout, REJECTED, {REJECTED: rejected})
                continue

            objections = self._pre.objectors(rollout, rollouts)
            if objections:
                self._drop(rollout, PRE, objections)
            else:
                self._wait(rollout, rollouts)

        self.fill()

    def note_failure(self, reason: str) -> None:
        """Why a rollout has failed. Reasons that differ in numbers only count as one."""
        line = " ".join(reason.split())[:MOST_REASON]
        # A port or a line number must not make every failure a sort of its own.
        sort = re.sub(r"\d+", "0", line)
        self._failures[sort] += 1
        self._examples[sort] = line

    def note_failed(self, count: int, env: str) -> None:
        """Failed rollouts also count as fruitless."""
        places = count * self._size.expected(env)
        self._count_fruitless(count, places, f"{FAILED}, env {env!r}")

    def fill(self) -> None:
        """Move pending rollouts into the batch until it is full; drop what is stale or filtered."""
        while self._pending and not self.is_full:
            rollout, group = self._pending.popleft()
            self._pending_places -= self._size.of(rollout)

            # Age first: a filter's rates count what could have trained.
            if self.staleness(rollout) > self._max_off_policy:
                self._drop(rollout, STALE)
                continue

            objections = self._post.objectors(rollout, group)
            if objections:
                self._drop(rollout, POST, objections)
            elif not rollout.has_members:
                self._drop(rollout, LEFT_OUT)
            else:
                self.batch.kept.append(rollout)
                self.batch.seen.append(rollout)
                self._kept_places += self._size.of(rollout)
                # One that trains shows that the run makes progress: the patience begins anew.
                self._fruitless = 0
                self._fruitless_places = 0.0
                self._reasons.clear()
                self._failures.clear()
                self._examples.clear()

        # One of both is set at any time. The loop waits for the first, sampling for the second.
        if self.is_full:
            self._full.set()
            self._room.clear()
        else:
            self._full.clear()
            self._room.set()

    def staleness(self, rollout: Rollout) -> int:
        """Versions between the weights this batch trains and those the rollout started under, queue
        time included. Tokens that no live policy sampled do not age."""
        return (self.batch.step - 1) - rollout.policy_version if rollout.is_live else 0

    @property
    def buffered(self) -> list[tuple[Rollout, str | None]]:
        """Every rollout that no batch has taken yet, in order. Beside it the reason, if it was
        dropped on the way."""
        decided = [(rollout, self.batch.dropped.get(id(rollout))) for rollout in self.batch.seen]
        return decided + [(rollout, None) for rollout, _ in self._pending]

    def restore(
        self,
        buffered: Sequence[tuple[Rollout, str | None]],
        objections: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        """Continue with what another buffer held; post-batch filters decide again.
        ``objections``: see ``Batch``."""
        # One list per group: each filter sees all siblings, also those that follow or were dropped.
        groups: dict[tuple[str, int], list[Rollout]] = {}
        for rollout, reason in buffered:
            group = groups.setdefault((rollout.env, rollout.group_id), [])
            group.append(rollout)
            if reason is None:
                self._wait(rollout, group)
            else:
                self._record(rollout, reason, objections.get(id(rollout), {}))

        self.fill()

    def take(self) -> Batch:
        """The full batch, in the order in which its groups were opened."""
        batch = self.batch
        self.batch = Batch(batch.step + 1)
        self._kept_places = 0

        # Groups arrive as they end: with this order a batch is the same in every run of a seed.
        batch.kept.sort(key=lambda rollout: rollout.group_id)
        self.fill()  # what waits may belong to the next batch
        return batch

    def take_metrics(self) -> dict[str, float]:
        return self._pre.take_metrics() | self._post.take_metrics()

    def _drop(
        self,
        rollout: Rollout,
        reason: str,
        objections: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._record(rollout, reason, objections)

        # A sampler's words are the same for its whole group; a filter's may have a number for each.
        details = objections.values() if reason == REJECTED else objections
        which = f": {', '.join(details)}" if details else ""

        places = self._size.of(rollout)
        self._count_fruitless(1, places, f"{reason}{which}, env {rollout.env!r}")

    def _record(self, rollout: Rollout, reason: str, objections: Mapping[str, str]) -> None:
        """How the rollout ended, and why."""
        self.batch.seen.append(rollout)
        self.batch.dropped[id(rollout)] = reason  # stable, for `seen` keeps the rollout alive
        if objections:
            self.batch.objections[id(rollout)] = dict(objections)

    def _wait(self, rollout: Rollout, group: Group) -> None:
        self._pending.append((rollout, group))
        self._pending_places += self._size.of(rollout)

    def _count_fruitless(self, count: int, places: float, reason: str) -> None:
        self._fruitless += count
        self._fruitless_places += places
        self._reasons[reason] += count

        if self._fruitless_places >= self._patience:
            reasons = "; ".join(f"{n} x {name}" for name, n in self._reasons.most_common())
            failing = self._reasons.most_common(1)[0][0].startswith(FAILED)
            why = WHY_FAILED if failing else WHY_DROPPED

            if self._failures:
                sort, num_failed = self._failures.most_common(1)[0]
                example = self._examples[sort].rstrip(".")
                if "context length" in example:
                    why = f"Raise seq_len, or leave out examples with long prompts. {why}"
                why = f"{num_failed} failed with: {example}. {why}"

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
        self.group_filters = [
            getattr(impl.plugin, "name", impl.plugin_name)
            for impl in hooks.hook.filter_rollout.get_hookimpls()
            if "group" in impl.argnames
        ]
        """Filters that read the siblings of a rollout."""

        # Each filter is called alone, inside every wrapper: so each has a rate of its own.
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

    def objectors(self, rollout: Rollout, group: Group = ()) -> dict[str, str]:
        """Call every filter; ``group``: the rollout's group, empty for it alone. Returns the
        enforcing ones that object, each with its reason: none if the rollout may train."""
        self.seen += 1
        enforcing = {}

        for name, is_enforcing, call in self._calls:
            # A rollout without its group is judged as a group of one.
            reasons = call(rollout=rollout, group=group or [rollout])
            wrong = [reason for reason in reasons if not isinstance(reason, str)]
            if wrong:
                raise PluginError(
                    f"filter {name!r}: filter_rollout gave {wrong[0]!r}, expected the reason to "
                    "drop the rollout, or None to keep it"
                )

            self.objections[name] += bool(reasons)
            if reasons and is_enforcing:
                enforcing[name] = "; ".join(reasons)

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
