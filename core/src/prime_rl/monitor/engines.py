"""What the engines say of themselves: their Prometheus pages, looked at every few seconds.

    gauge      inference/<name>/{mean,max,sum}      over the engines, at the last look
    counter    inference/<name>:rate                per second over all engines, since the last step

Names are vLLM's, without their ``vllm:`` and ``_total``. Histograms and labels that split a metric
are left out: their parts are summed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prime_rl.monitor.metrics import Reduced

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0

Scrape = Callable[[], Awaitable[Sequence[str]]]
"""The pages of the engines that answered."""


@dataclass
class Page:
    """One engine's metrics at one look."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


class EngineWatch:
    """Polls until cancelled; a page that cannot be had, or read, is told once and passed over."""

    def __init__(self, scrape: Scrape, poll: float = POLL_SECONDS) -> None:
        self._scrape = scrape
        self._poll = poll
        self._pages: list[Page] = []
        self._before: tuple[float, Mapping[str, float]] | None = None
        self._now: tuple[float, Mapping[str, float]] | None = None
        self._told = False

    async def run(self) -> None:
        """Look, and look again."""
        while True:
            try:
                self.note(time.monotonic(), await self._scrape())
            except Exception as error:  # only a look: the run does not hang on it
                if not self._told:
                    log.warning(
                        "engine metrics cannot be read: %s: %s", type(error).__name__, error
                    )
                self._told = True
            await asyncio.sleep(self._poll)

    def note(self, seconds: float, texts: Sequence[str]) -> None:
        """One look at all engines, at a time of a monotonic clock."""
        self._pages = [parse(text) for text in texts]
        totals: dict[str, float] = {}
        for page in self._pages:
            for name, value in page.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        self._now = (seconds, totals)
        self._before = self._before or self._now

    def take(self) -> Reduced:
        """Gauges of the last look, and rates between the last look of the step before and it."""
        metrics: Reduced = {}
        for name in sorted({name for page in self._pages for name in page.gauges}):
            values = [page.gauges[name] for page in self._pages if name in page.gauges]
            metrics[f"inference/{name}/mean"] = sum(values) / len(values)
            metrics[f"inference/{name}/max"] = max(values)
            metrics[f"inference/{name}/sum"] = sum(values)
        if self._before and self._now and self._now[0] > self._before[0]:
            elapsed = self._now[0] - self._before[0]
            for name, value in self._now[1].items():
                # A counter that has fallen: an engine was started anew, or did not answer.
                grown = max(0.0, value - self._before[1].get(name, value))
                metrics[f"inference/{name}:rate"] = grown / elapsed
            self._before = self._now
        return metrics


def parse(text: str) -> Page:
    """The gauges and counters of a page in Prometheus' text format. Raises ``ValueError`` on a
    line that is none."""
    kinds: dict[str, str] = {}
    page = Page()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:4]
            kinds[name] = kind
        elif line and not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            full = head.partition("{")[0]
            kind = kinds.get(full, kinds.get(full.removesuffix("_total"), ""))
            table = {"gauge": page.gauges, "counter": page.counters}.get(kind)
            if table is not None and not full.endswith("_info"):
                name = full.rpartition(":")[2].removesuffix("_total")
                table[name] = table.get(name, 0.0) + float(value)
    return page
