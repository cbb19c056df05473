"""A request to a URL after each step, for a service that alerts when none comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from threading import Lock, Thread
from typing import Literal
from urllib.parse import urlsplit

from pydantic import PositiveFloat, model_validator

from prime_rl import Observer, ObserverHost, PluginConfig

log = logging.getLogger(__name__)


class HeartbeatConfig(PluginConfig):
    """``[observers.heartbeat]``. Without ``url`` and ``url_var`` nothing is sent."""

    url: str | None = None
    """Requested after each step: http:// or https://."""
    url_var: str | None = None
    """Environment variable with the URL, for one that holds a secret: what stands in the config is
    written to the run directory."""
    method: Literal["GET", "POST"] = "GET"
    """``POST`` has a JSON body: ``{"run": NAME, "step": N}``."""
    timeout: PositiveFloat = 5.0
    """Seconds for the answer. While one is awaited, further steps send nothing."""

    @model_validator(mode="after")
    def _is_one_url(self) -> HeartbeatConfig:
        if self.url is not None and self.url_var is not None:
            raise ValueError("url and url_var are two places for one URL. Leave one of them out.")
        if self.url is not None:
            check_url(self.url, "url")
        return self


def check_url(url: str, where: str) -> None:
    """Raises ``ValueError`` for what is no URL. The message has no part of it: it may be secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{where} is no URL: expected http:// or https:// and a host")


class Heartbeat(Observer):
    """Requests a URL after each step, in a thread. A failure is logged, once until one succeeds,
    and changes nothing else."""

    name = "heartbeat"
    config_class = HeartbeatConfig
    config: HeartbeatConfig

    def __init__(self, config: HeartbeatConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._url = config.url
        self._busy = Lock()
        self._fails = False
        if config.url_var is not None:
            self._url = os.environ.get(config.url_var)
            if not self._url:
                log.warning("observers.heartbeat: %s is not set: no heartbeat", config.url_var)
            else:
                try:
                    check_url(self._url, f"observers.heartbeat: {config.url_var}")
                except ValueError as error:
                    log.warning("%s: no heartbeat", error)
                    self._url = None

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one, unless the last one has no answer yet."""
        if self._url and self._busy.acquire(blocking=False):
            Thread(target=self._send, args=(self._url, step), daemon=True).start()

    def _send(self, url: str, step: int) -> None:
        import httpx

        body = None
        if self.config.method == "POST":
            body = {"run": self.host.shared.run.run_dir.name, "step": step}
        try:
            answer = httpx.request(self.config.method, url, json=body, timeout=self.config.timeout)
            problem = "" if answer.is_success else f"HTTP {answer.status_code}"
        except Exception as error:
            problem = type(error).__name__  # its text may have the URL
        finally:
            self._busy.release()

        if problem and not self._fails:
            where = urlsplit(url).hostname
            log.warning("heartbeat of step %d to %s failed: %s", step, where, problem)
        self._fails = bool(problem)
