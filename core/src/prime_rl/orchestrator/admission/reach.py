"""The limit of the lead: how many batches engines that are busy are asked for in advance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import fmean, pstdev

import msgspec

from prime_rl.orchestrator.admission.pace import Load

BLOCK = 8
"""Steps under one limit of the lead before it is judged."""

SETTLE = 3
"""Steps at the start of a run that are not judged: processes warm up."""

MORE = 2.0
MORE_QUEUED = 1.5
"""A trial has this many times the limit: the latter if groups queued in the last one, and it paid
all the same."""

LESS = 0.5
"""How much of a lead beyond 1 a lower limit leaves."""

PAYS = 0.05
"""Share of a step that a higher limit has to save where groups queue."""

COSTS = 0.03
"""Share of a step that a lower limit may cost."""

WORTH = 0.2
"""Share of the seconds for which the trainer has no batch that makes a lower limit worth a trial:
one that fails costs a few slow steps."""

LITTLE = 0.25
"""Versions of a lead beyond 1 that are not worth a trial, and the share of rollouts in flight."""

HOLD = 200
"""Steps after a clear result until there is another trial; twice as many each time."""

HOLD_UNCLEAR = 25
"""The same if steps varied so much that the trial may have failed by chance."""


class KnownLead(msgspec.Struct):
    """What a run has learned about the lead; part of ``progress.json``."""

    limit: float | None
    """None: it has none."""
    hold: int
    patience: int
    """State of ``Reach``: the steps until the next trial, and the steps after the next clear
    result."""
    leads: dict[str, float]
    """By env, without the limit."""
    margins: dict[str, float] = {}
    """The margins of ``Leads``, by env. Empty: an earlier version wrote the file without them."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A block of steps under one limit."""

    seconds: float
    """Mean of a step."""
    error: float
    """Standard error of that mean."""
    inflight: float
    """Mean number of rollouts in flight."""
    group_seconds: float | None
    """Seconds of a typical group. None: unknown."""

    def queues(self, before: Judged | None) -> bool:
        """Whether groups take longer because more of them are in flight; True if it is unknown.

        With N times as many rollouts in flight, durations are the same if nothing queues, and N
        times as long if everything does. The border is halfway, on a logarithmic scale.
        """
        if before is None or not before.inflight:
            return True
        if self.group_seconds is None or not before.group_seconds:
            return True

        longer = self.group_seconds / before.group_seconds
        return longer > sqrt(max(self.inflight / before.inflight, 1.0))

    def has_more_inflight(self, before: Judged | None) -> bool:
        """Whether it is worth a trial to have as few as before; True if that is unknown."""
        return before is None or self.inflight > (1.0 + LITTLE) * before.inflight

    def exceeds(self, before: Judged, ratio: float, errors: float = 0.0) -> bool:
        """Whether steps take more than ``ratio`` times as long, by so many standard errors."""
        error = sqrt(self.error**2 + before.error**2)
        return self.seconds - errors * error > ratio * before.seconds

    def differs(self, before: Judged) -> bool:
        """Whether chance and a trial leave the length of the steps unexplained."""
        longer = self.exceeds(before, 1.0 + PAYS, errors=2.0)
        return longer or before.exceeds(self, 1.0 + PAYS, errors=2.0)


class Reach:
    """The limit of the lead: 1 until a trainer that is starved shows that more is of use.

    A run starts with a limit of 1, which is kept while the trainer always has a batch. If it is
    starved, there are three cases:

        room     few rollouts are in flight then, which are long: the lead has no limit any more
        limited  the limit of rollouts in flight is reached: no more than that can queue at the
                 engines, and a longer lead fills them while long groups end. No limit either.
        full     the engines are busy. A longer lead is of use only if groups wait for something
                 else than the engines, such as a slow environment, or if engines run empty between
                 the batches. A higher limit is tried for some steps. It is kept if steps become
                 shorter, or if groups do not take longer, and then the next one is tried.

    A lead beyond 1, under which groups queue and the trainer has no batch all the same, gets lower
    limits as long as these make no step longer. After a higher limit has failed, a lower one is
    tried: the last ones may have been kept by chance.
    """

    def __init__(self) -> None:
        self.limit = 1.0
        self._before: float | None = None
        """During a trial: the limit before it."""
        self._last: Judged | None = None
        """The last block; during a trial, the one before it."""
        self._short: Judged | None = None
        """The last block under a limit of 1."""
        self._result: Judged | None = None
        """What steps are like under this limit, as the last trial found that ended with it."""
        self._failed: Judged | None = None
        """Until the next block: that of a higher limit that failed."""
        self._seconds: list[float] = []
        """Seconds of the steps of this block."""
        self._more = MORE
        self._falls = False
        """The next trial is of a lower limit: the last one was kept, or a higher one was not."""
        self._skip = SETTLE
        self._hold = 0
        self._patience = HOLD
        self._patience_unclear = HOLD_UNCLEAR

    def known(self, leads: Mapping[str, float], margins: Mapping[str, float]) -> KnownLead:
        """What a resumed run goes on with. A trial begins again."""
        # A trial that is not over proves nothing, so the limit before it counts.
        limit = self.limit if self._before is None else self._before
        return KnownLead(
            limit=None if limit == inf else limit,
            hold=self._hold,
            patience=self._patience,
            leads=dict(leads),
            margins=dict(margins),
        )

    def resume(self, known: KnownLead) -> None:
        """Continue with the state that an earlier attempt has learned."""
        self.limit = inf if known.limit is None else known.limit
        self._hold = known.hold
        self._patience = known.patience

    def version_served(
        self, seconds: float, lead: float, load: Load, group_seconds: float | None = None
    ) -> bool:
        """``seconds``: the length of the step. ``lead``: what the durations ask for. ``load``:
        since the last judgment. ``group_seconds``: a typical group's; None: unknown. Returns
        whether ``load`` shall start again."""
        self._hold -= 1
        if self._skip > 0:
            self._skip -= 1
            return True

        self._seconds.append(seconds)

        # What was requested together comes back together: whole rounds are compared.
        per_round = ceil(min(lead, self.limit)) + 1
        if len(self._seconds) < ceil(BLOCK / per_round) * per_round:
            return False

        block = Judged(
            seconds=fmean(self._seconds),
            # Standard error of the mean.
            error=pstdev(self._seconds) / sqrt(len(self._seconds)),
            inflight=load.mean_inflight,
            group_seconds=group_seconds,
        )
        self._seconds.clear()

        if self.limit == 1.0:
            self._short = block

        if self._before is not None and not self._succeeded(block, load):
            self._set(self._before, lead)
            self._before = None
            return True

        # The run may have changed since the last trial, or in the middle of it.
        pays = self._failed is not None and block.exceeds(self._failed, 1.0 / (1.0 - PAYS))
        if pays or (self._result is not None and block.differs(self._result)):
            # The results of earlier trials no longer hold.
            self._result = None
            self._hold = 0

        self._failed = None
        self._before = None
        self._last = block
        self._choose(block, lead, load)
        return True

    def _succeeded(self, block: Judged, load: Load) -> bool:
        """Whether the limit of the trial that ends is kept."""
        assert self._before is not None and self._last is not None
        last = self._last
        if self.limit > self._before:
            # Where groups queue, what chance may explain is no reason to request more.
            pays = not block.exceeds(last, 1.0 - PAYS, errors=-1.0)
            queues = block.queues(last)
            if pays or not load.is_starved or not queues:
                self._more = MORE_QUEUED if queues else MORE
                return True

            self._hold_on(last, is_clear=block.exceeds(last, 1.0 - PAYS, errors=2.0))
            self._failed = block
            self._falls = self._before > 1.0
            return False

        has_failed = block.exceeds(last, 1.0 + COSTS)
        self._falls = not has_failed and self.limit > 1.0
        if has_failed:
            self._hold_on(last, is_clear=block.exceeds(last, 1.0 + COSTS, errors=2.0))
        elif self.limit == 1.0:
            self._hold_on(block, is_clear=True)  # what a longer lead brings is known

        return not has_failed

    def _choose(self, block: Judged, lead: float, load: Load) -> None:
        """The limit of the next block."""
        # Few rollouts are in flight, or their limit is reached: a longer lead cannot make a queue.
        if load.is_starved and (load.has_room or load.is_limited):
            self._hold = 0
            self._set(inf, lead)
            return
        if self._hold > 0:
            return

        reached = min(self.limit, lead)
        has_no_batch = load.starved + load.held > WORTH * load.seconds

        if load.is_starved and lead > self.limit and not self._falls:
            trial = self._more * self.limit
        # The trainer waits although groups queue, so a shorter lead may cost nothing.
        elif (
            has_no_batch
            and reached > 1.0 + LITTLE
            and block.has_more_inflight(self._short)
            and block.queues(self._short)
            and not load.is_limited
            and not load.has_room
        ):
            trial = 1.0 + LESS * (reached - 1.0)
            trial = trial if trial > 1.0 + LITTLE else 1.0
        else:
            self._falls = False
            return

        self._before = self.limit
        self._set(trial, lead)

    def _hold_on(self, usual: Judged, *, is_clear: bool) -> None:
        """No trial for some steps, unless steps are no longer like those of ``usual``."""
        self._result = usual
        if is_clear:
            self._hold = self._patience
            self._patience *= 2
        else:
            self._hold = self._patience_unclear
            self._patience_unclear *= 2

    def _set(self, limit: float, lead: float) -> None:
        """Groups that were requested under the other limit train first, and are not judged."""
        if limit != self.limit:
            self._skip = ceil(min(lead, max(limit, self.limit))) + 1
        self.limit = limit
