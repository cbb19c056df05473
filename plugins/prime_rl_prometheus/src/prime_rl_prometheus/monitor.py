"""The monitor: the latest metrics of the run, served over HTTP.

The server listens from the start, so a port in use is an error before training begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from prime_rl import ConfigError, Monitor, PluginConfig
from prime_rl_prometheus.names import TRAINER, mangle

if TYPE_CHECKING:
    from prime_rl_prometheus.server import Page

log = logging.getLogger(__name__)


class PrometheusConfig(PluginConfig):
    """``[monitors.prometheus]``"""

    port: Annotated[int, Field(ge=0, le=65535)] = 9400
    """Port of the page. 0: a free port, which is logged."""
    host: str = "127.0.0.1"
    """Address to listen on. The page needs no key."""


class PrometheusMonitor(Monitor):
    """Serves the last value of every metric."""

    name = "prometheus"
    config_class = PrometheusConfig
    in_background = False  # ``log`` only stores numbers; the server has its own threads

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        """Listen. Raises ``ConfigError`` if the address is not available."""
        super().__init__(config, run_dir)
        assert isinstance(config, PrometheusConfig)
        from prime_rl_prometheus.server import Page

        try:
            self._page: Page = Page(config.host, config.port)
        except OSError as error:
            raise ConfigError(
                f"monitors.prometheus: cannot listen on {config.host}:{config.port}: {error}. "
                "Set another port, or port = 0 for a free one."
            ) from error

        log.info("prometheus: %s/metrics", self.url)

    @property
    def url(self) -> str:
        """The server's URL, without a path."""
        return self._page.url

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace all metrics of the same source. Metrics that it no longer has disappear."""
        source = source_of(metrics)
        gauges = {mangle(name): (value, name) for name, value in metrics.items()}
        if source == "trainer":
            now = {"trainer_step": float(step), "trainer_last_step_timestamp_seconds": time.time()}
            named = {page: metrics[ours] for page, ours in TRAINER.items() if ours in metrics}
            gauges |= {
                name: (value, TRAINER.get(name, "")) for name, value in (named | now).items()
            }
        elif source == "batch":
            gauges["prime_rl_step"] = (float(step), "Step of the last batch")

        self._page.replace(source, step, gauges)

    def close(self) -> None:
        self._page.close()


def source_of(metrics: Mapping[str, float]) -> str:
    """The source of the metrics: the trainer, a batch, or one evaluation (``eval/ENV``)."""
    if "loss/mean" in metrics:
        return "trainer"
    names = [name for name in metrics if name.startswith("eval/")]
    return "/".join(names[0].split("/")[:2]) if len(names) == len(metrics) and names else "batch"
