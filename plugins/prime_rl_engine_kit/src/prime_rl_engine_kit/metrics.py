"""Metrics of the engines: what the run's pool counts, and what their Prometheus pages say, polled
every few seconds.

    inference/replicas_serving, inference/<number>/<name>   of the pool; counts: since the last step
    gauge      inference/<name>/{mean,median,min,max,sum}   over the engines, at the last poll
    counter    inference/<name>:rate     per second over all engines, since the last step
    histogram  inference/<name>:mean     of the observations on all engines since the last step

Names are vLLM's, without ``vllm:`` and ``_total``. Samples that differ only in labels are summed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from pydantic import PositiveFloat

from prime_rl import EngineError, Observer, ObserverHost, PluginConfig

log = logging.getLogger(__name__)

OVER_ENGINES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean, "median": median, "min": min, "max": max, "sum": sum,
}  # fmt: skip


@dataclass
class Page:
    """One engine's metrics at one poll."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, float] = field(default_factory=dict)
    """Sum and count of each, as ``NAME_sum`` and ``NAME_count``."""


PAGE_SECONDS = 2.0
"""For ``GET /metrics``. A page that comes later is worth nothing."""


class EngineMetricsConfig(PluginConfig):
    """``[observers.engine_metrics]``"""

    interval: PositiveFloat = 5.0
    """Seconds between two reads of the engines' ``/metrics``."""


class EngineMetrics(Observer):
    """Reports the metrics of the engines. The first page that cannot be fetched or parsed is
    logged."""

    name = "engine_metrics"
    config_class = EngineMetricsConfig
    config: EngineMetricsConfig

    def __init__(self, config: EngineMetricsConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._pages: list[Page] = []
        self._before: tuple[float, Mapping[str, float]] | None = None
        self._now: tuple[float, Mapping[str, float]] | None = None
        self._warned = False
        self._counted: dict[str, int] = {}
        """The counters at the last step."""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                self.note(time.monotonic(), await pages_of(self.host.shared.engines.fleet.engines))
            except Exception as error:  # metrics must not end the run
                if not self._warned:
                    log.warning(
                        "engine metrics cannot be read: %s: %s", type(error).__name__, error
                    )
                self._warned = True
            await asyncio.sleep(self.config.interval)

    def note(self, seconds: float, texts: Sequence[str]) -> None:
        """Record one poll of all engines. ``seconds``: on a monotonic clock."""
        self._pages = [parse(text) for text in texts]
        totals: dict[str, float] = {}
        for page in self._pages:
            for name, value in (*page.counters.items(), *page.histograms.items()):
                totals[name] = totals.get(name, 0.0) + value
        self._now = (seconds, totals)
        self._before = self._before or self._now

    def take_metrics(self) -> Mapping[str, float]:
        """Metrics of the pool, the gauges of the last poll, and rates since the last poll of the
        previous step."""
        return self.of_pool() | self.of_pages()

    def of_pool(self) -> dict[str, float]:
        """The state of each engine under its number, and its counts since the last call."""
        engines = self.host.shared.engines.fleet.engines
        metrics = {"inference/replicas_serving": float(sum(e.in_service for e in engines))}
        for engine in engines:
            away = 0.0 if engine.down_since is None else time.monotonic() - engine.down_since
            measured = {
                "running": engine.running,
                "serving": engine.in_service,
                "version": -1 if engine.version is None else engine.version,
                "down_seconds": engine.down + away,
            }
            for name, count in (("requests", engine.asked), ("retried", engine.retried)):
                key = f"{engine.number}/{name}"
                measured[name] = count - self._counted.get(key, 0)
                self._counted[key] = count

            for name, value in measured.items():
                metrics[f"inference/{engine.number}/{name}"] = float(value)

        return metrics

    def of_pages(self) -> dict[str, float]:
        """Gauges of the last poll, and rates since the last poll of the previous step."""
        metrics: dict[str, float] = {}
        for name in sorted({name for page in self._pages for name in page.gauges}):
            values = [page.gauges[name] for page in self._pages if name in page.gauges]
            metrics |= {f"inference/{name}/{key}": f(values) for key, f in OVER_ENGINES.items()}

        if self._before is None or self._now is None or self._now[0] <= self._before[0]:
            return metrics
        (since, before) = self._before
        (now, totals) = self._now
        # A sum falls if an engine restarted or did not answer.
        grown = {name: max(0.0, v - before.get(name, v)) for name, v in totals.items()}
        histograms = {name for page in self._pages for name in page.histograms}
        for name in sorted(grown.keys() - histograms):
            metrics[f"inference/{name}:rate"] = grown[name] / (now - since)
        for name in sorted(n.removesuffix("_sum") for n in histograms if n.endswith("_sum")):
            number = grown.get(f"{name}_count")
            if number:
                metrics[f"inference/{name}:mean"] = grown[f"{name}_sum"] / number

        self._before = self._now
        return metrics


async def pages_of(engines: Sequence[Any]) -> list[str]:
    """The Prometheus page of every engine that has started and answers at once."""

    async def fetch(engine: Any) -> str | None:
        with suppress(EngineError):
            return str((await engine.client.request("GET", "/metrics", PAGE_SECONDS)).text)
        return None

    up = [engine for engine in engines if engine.state.name != "STARTING"]
    pages = await asyncio.gather(*map(fetch, up))
    return [page for page in pages if page is not None]


def parse(text: str) -> Page:
    """Read a page in Prometheus' text format. Raises ``ValueError`` if it is malformed."""
    from prometheus_client.parser import text_string_to_metric_families

    page = Page()
    tables = {"gauge": page.gauges, "counter": page.counters, "histogram": page.histograms}
    for family in text_string_to_metric_families(text):
        table = tables.get(family.type)
        if table is None:
            continue
        for sample in family.samples:
            if not sample.name.endswith(("_info", "_created", "_bucket")):
                name = sample.name.rpartition(":")[2].removesuffix("_total")
                table[name] = table.get(name, 0.0) + sample.value

    return page
