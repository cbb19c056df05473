# mypy: allow-subclassing-any
"""``/metrics`` and ``/health`` over HTTP, in a separate thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Gauges: TypeAlias = Mapping[str, tuple[float, str]]
"""Value and help text by name."""

STALL_SECONDS = 30.0
"""For a client to send any part of its request, or to read any part of its answer."""


class Page(Collector):
    """The latest gauges of each source, and the server that serves them."""

    def __init__(self, host: str, port: int) -> None:
        """Listen. Raises ``OSError`` if the address is not available."""
        self._lock = threading.Lock()
        self._gauges: dict[str, Gauges] = {}
        self._last: tuple[int, float] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._server = ThreadingHTTPServer((host, port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def replace(self, source: str, step: int, gauges: Gauges) -> None:
        """Replace all gauges of ``source``."""
        with self._lock:
            self._gauges[source] = gauges
            self._last = step, time.time()

    def collect(self) -> Iterator[Metric]:
        """Every gauge once. If two sources have the same name, the later source wins."""
        with self._lock:
            gauges = {name: g for source in self._gauges.values() for name, g in source.items()}
        for name, (value, text) in sorted(gauges.items()):
            yield GaugeMetricFamily(name, text, value=value)

    def health(self) -> dict[str, object]:
        """The last step, and the seconds since its metrics."""
        last = self._last
        if last is None:
            return {"status": "ok", "step": None, "seconds_since": None}
        return {"status": "ok", "step": last[0], "seconds_since": round(time.time() - last[1], 3)}

    def close(self) -> None:
        """Stop listening and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(page: Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = STALL_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, kind, encode(page.registry))
            elif path == "/health":
                self._answer(200, "application/json", json.dumps(page.health()).encode())
            else:
                self._answer(404, "text/plain", b"not found; available: /metrics, /health\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a line per scrape would flood the log."""

    return Handler
