"""A small HTTP server for the page, on loopback, behind a token in the URL.

/TOKEN/                 the page
/TOKEN/facts?have=...   what it does not have yet; waits until there is something new
/TOKEN/chunk-7          the tokens of some rollouts
/TOKEN/report.html      the page as one file
"""

from __future__ import annotations

import gzip
import hmac
import logging
import secrets
import tempfile
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from prime_rl.errors import ConfigError, PrimeRLError, RunError
from prime_rl_tools.report.data import differences
from prime_rl_tools.report.source import Have, RunSource
from prime_rl_tools.report.write import template, write_report

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_SECONDS = 0.5
"""How often the files of the runs are looked at."""
WAIT_SECONDS = 20.0
"""How long a request for news waits before it is answered with nothing."""


REQUEST_SECONDS = 30.0
"""How long a connection may be silent before its request is whole, or its answer is read."""
MOST_CONNECTIONS = 64
"""Each has a thread."""
POLICY = "; ".join(
    [
        "default-src 'none'",  # the page is one file: a value that became markup loads nothing
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)


class Watched:
    """Some runs, read by one thread, and pages that wait for what is new in them."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Raises ``ConfigError`` if a folder is no run."""
        self.run_dirs = run_dirs
        self._sources = [RunSource(each) for each in run_dirs]
        configs = [source.config for source in self._sources]
        self._compared = {"differs": differences(configs)}
        self._changed = threading.Condition()
        self._version = 0
        self._ended = threading.Event()

    def follow(self) -> None:
        """Look at the files until ``close``."""
        while not self._ended.is_set():
            with self._changed:
                try:
                    news = [source.refresh() for source in self._sources]
                except PrimeRLError as error:  # a file that is just being replaced, or is damaged
                    log.warning("%s", error)
                    news = []
                if any(news) or not self._version:
                    self._version += 1
                    self._changed.notify_all()

            self._ended.wait(POLL_SECONDS)

    def close(self) -> None:
        self._ended.set()
        with self._changed:
            self._changed.notify_all()

    def since(self, have: Sequence[Have], seconds: float = WAIT_SECONDS) -> list[dict[str, Any]]:
        """The data that a page with ``have`` lacks, by run; empty if nothing new comes in time. Its
        first request, which has nothing, waits for the first reading. Raises ``RunError`` once
        closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version or self._ended.is_set(), seconds)
            known = [each.version for each in have] or [0]
            self._changed.wait_for(
                lambda: self._version > min(known) or self._ended.is_set(), seconds
            )
            if self._ended.is_set():
                raise RunError("prime-rl watch has ended")
            if self._version <= min(known):
                return []
            padded = [*have, *[None] * (len(self._sources) - len(have))]
            return [
                {**(found := source.since(each)), **self._compared}
                | {"has": found["has"]._replace(version=self._version)}
                for source, each in zip(self._sources, padded, strict=True)
            ]

    def chunk(self, name: str) -> list[dict[str, Any]]:
        """``chunk-7`` of the first run, ``chunk-1-7`` of the second. Raises ``LookupError`` or
        ``ValueError``."""
        *run, number = (int(part) for part in name.split("-")[1:])
        with self._changed:
            return self._sources[run[0] if run else 0].chunk(number)

    def frozen(self) -> bytes:
        """The page as one file."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.html"
            write_report(self.run_dirs[0], out, beside=self.run_dirs[1:])
            return out.read_bytes()


class Server(ThreadingHTTPServer):
    """Serves the page of ``watched`` at ``url``."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        """``port``: 0 for a free one. Raises ``ConfigError`` if it is taken."""
        self.watched = watched
        self.token = secrets.token_urlsafe(16)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}. Choose another, or 0 for a free one."
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def start(self) -> None:
        """Serve in threads until ``close``."""
        for work in (self.watched.follow, self.serve_forever):
            threading.Thread(target=work, daemon=True, name=f"watch {work.__name__}").start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close the connection at once if there are too many."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def close(self) -> None:
        self.watched.close()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, token, *rest = (address.path + "//").split("/")[:3]
        # Another site's page that resolves its own name to this machine sends its own name as Host.
        if not hmac.compare_digest(token.encode(), self.server.token.encode()) or (
            self.headers["Host"]
            not in {f"{n}:{self.server.server_port}" for n in (HOST, "localhost")}
        ):
            return self._send(404, b"not found: the address that prime-rl watch prints has a token")

        try:
            self._answer(rest[0], parse_qs(address.query).get("have", ["[]"])[0])
        except (LookupError, ValueError, msgspec.MsgspecError) as error:
            self._send(404, f"not found: {error}".encode())
        except PrimeRLError as error:
            self.close_connection = True
            self._send(500, str(error).encode())
        except ConnectionError:
            pass  # the page was closed

    def _answer(self, name: str, have: str) -> None:
        watched = self.server.watched
        if name == "":
            self._send(200, template(watched.run_dirs[0], "live").encode(), "text/html")
        elif name == "facts":
            changes = watched.since(msgspec.json.decode(have, type=list[Have]))
            self._send(200, msgspec.json.encode(changes), "application/json")
        elif name == "report.html":
            self._send(200, watched.frozen(), "text/html", as_file=True)
        else:
            self._send(200, msgspec.json.encode(watched.chunk(name)), "application/json")

    def _send(
        self, status: int, body: bytes, kind: str = "text/plain", as_file: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        if as_file:
            name = self.server.watched.run_dirs[0].resolve().name
            self.send_header("Content-Disposition", f'attachment; filename="{name}.html"')

        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000:
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")

        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""
