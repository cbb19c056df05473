"""A request to a URL after each step, which never holds or ends a run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl_observers.heartbeat import Heartbeat, HeartbeatConfig

LIMIT = 20.0


class Service:
    """Counts the beats that it gets. It answers with ``code``, and not before ``open`` is set."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, Any]] = []
        self.code = 200
        self.open = threading.Event()
        self.open.set()
        self.arrived = threading.Semaphore(0)
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                service.got.append((self.command, self.path, body))
                service.arrived.release()
                service.open.wait(LIMIT)
                self.send_response(service.code)
                self.end_headers()

            do_GET = do_POST = answer

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/beat/s3cret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wait(self) -> None:
        assert self.arrived.acquire(timeout=LIMIT)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.open.set()
    made.server.shutdown()
    made.server.server_close()


def heart(**settings: Any) -> Heartbeat:
    host: Any = SimpleNamespace(
        shared=SimpleNamespace(run=SimpleNamespace(run_dir=Path("outputs/mine")))
    )
    return Heartbeat(HeartbeatConfig(**settings), host)


def settled(heartbeat: Heartbeat) -> None:
    """Until the thread has seen the answer."""
    assert heartbeat._busy.acquire(timeout=LIMIT)
    heartbeat._busy.release()
    for thread in threading.enumerate():
        if thread.name.endswith("(_send)"):
            thread.join(LIMIT)


def test_each_step_requests_the_url(service: Service) -> None:
    heartbeat = heart(url=service.url)
    for step in (1, 2):
        heartbeat.step_trained(step, {})
        service.wait()
        settled(heartbeat)
    assert service.got == [("GET", "/beat/s3cret", None)] * 2


def test_a_post_names_run_and_step_and_the_url_may_come_from_a_variable(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEAT_URL", service.url)
    heartbeat = heart(url_var="BEAT_URL", method="POST")
    heartbeat.step_trained(7, {})
    service.wait()
    settled(heartbeat)
    assert service.got == [("POST", "/beat/s3cret", {"run": "mine", "step": 7})]
    assert service.url not in heartbeat.config.model_dump_json()


def test_a_service_that_does_not_answer_holds_nothing_and_gets_one_request(
    service: Service,
) -> None:
    service.open.clear()
    heartbeat = heart(url=service.url, timeout=LIMIT)
    heartbeat.step_trained(1, {})
    service.wait()
    for step in range(2, 50):
        heartbeat.step_trained(step, {})  # returns although the first has no answer
    service.open.set()
    settled(heartbeat)
    assert len(service.got) == 1


def test_failures_are_logged_once_without_the_secret(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.code = 500
    heartbeat = heart(url=service.url)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            heartbeat.step_trained(step, {})
            service.wait()
            settled(heartbeat)
        service.server.shutdown()
        service.server.server_close()
        heartbeat.step_trained(4, {})
        settled(heartbeat)
    (line,) = caplog.messages
    assert line == "heartbeat of step 1 to 127.0.0.1 failed: HTTP 500"
    assert "s3cret" not in caplog.text


def test_without_a_url_nothing_is_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart().step_trained(1, {})
    assert not caplog.messages
    monkeypatch.delenv("NO_SUCH_URL", raising=False)
    heart(url_var="NO_SUCH_URL").step_trained(1, {})
    monkeypatch.setenv("BAD_URL", "s3cret.example/x")
    heart(url_var="BAD_URL").step_trained(1, {})
    assert "NO_SUCH_URL is not set" in caplog.text and "BAD_URL is no URL" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("url", ["", "example.com/beat", "ftp://example.com", "https://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url is no URL: expected http"):
        HeartbeatConfig(url=url)


def test_two_urls_are_refused() -> None:
    with pytest.raises(ValidationError, match="Leave one of them out"):
        HeartbeatConfig(url="https://example.com", url_var="BEAT_URL")
