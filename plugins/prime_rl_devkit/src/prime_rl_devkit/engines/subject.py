"""An engine under test: its address, its model, and requests to it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from prime_rl.proxies import is_loopback
from prime_rl_devkit.engines.reference import Reference
from prime_rl_devkit.engines.replies import Choice, Reply, read_reply
from prime_rl_devkit.verdicts import Broken, NotApplicable
from prime_rl_engine_kit.metrics import Page, parse

GENERATE = "/inference/v1/generate"

OPTIONAL: Mapping[str, str] = {
    "choices": "n above 1",
    "alternatives": "logprobs above 1: the most likely tokens beside the sampled one",
    "prompt_logprobs": "scoring a prompt",
    "chat": "/v1/chat/completions",
    "adapters": "a weight_dir that holds a LoRA adapter",
    "sleep": "/sleep and /wake_up",
}
"""Features that an engine may declare as missing. Their checks are skipped with the declared
reason."""

TOLERANCE = {"float32": 5e-4, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Largest gap between a log-probability of the engine and one of transformers in float32."""

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass
class EngineSubject:
    """The argument of every check. Not thread-safe, and not for use in an event loop."""

    url: str
    """Without ``/v1``."""
    model_folder: Path
    """The Hugging Face folder whose weights the engine serves, now and again after each check."""
    work_folder: Path
    """Where checkpoints are written; the engine must be able to read it."""
    admin_key: str = ""
    api_key: str = ""
    """Key of the sampling routes; empty: no key is needed."""
    dtype: Dtype = "float32"
    """The engine's precision."""
    tolerance: float | None = None
    """Largest gap in log-probabilities. None: by dtype (``TOLERANCE``)."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Capability (``OPTIONAL``) to reason."""
    timeout: float = 120.0
    """Seconds for one answer."""
    process: subprocess.Popen[bytes] | None = None
    """The server's process, if the kit started it."""
    argv: Sequence[str] = ()
    """Its command line."""

    version: int = 0
    model: str = ""
    max_model_len: int = 0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a required feature in ``lacks``."""
        unknown = sorted(set(self.lacks) - set(OPTIONAL))
        if unknown:
            raise ValueError(f"lacks: {unknown} are not optional; these are: {sorted(OPTIONAL)}")
        self.http = httpx.Client(
            base_url=self.url,
            timeout=self.timeout,
            verify=self._is_tls,
            trust_env=not is_loopback(self.url),
        )
        self.moved = False
        """The engine may be paused, asleep or serving other weights: ``restore`` has work."""
        self._references: dict[Path, Reference] = {}
        self._number = 0

    # -- facts ----------------------------------------------------------------------

    @property
    def bound(self) -> float:
        """Largest gap allowed in a log-probability."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance

    @property
    def exact(self) -> bool:
        """Other requests in the batch change no token, because rounding is far below any
        difference."""
        return self.dtype == "float32"

    def need(self, capability: str) -> None:
        """Skip the check if the engine lacks it."""
        if capability in self.lacks:
            raise NotApplicable(
                f"the engine declares to lack {capability}: {self.lacks[capability]}"
            )

    def need_admin(self) -> None:
        """Skip the check if the admin key is not known."""
        if not self.admin_key:
            raise NotApplicable("no admin_key was given to the kit, so no admin route is tried")

    def reference(self, folder: Path | None = None) -> Reference:
        """The reference model of a folder, by default of the served one."""
        folder = folder or self.model_folder
        if folder not in self._references:
            self._references[folder] = Reference(folder)
        return self._references[folder]

    def new_folder(self, name: str) -> Path:
        """A path for a checkpoint; the folder itself is not made."""
        self._number += 1
        return self.work_folder / f"{self._number:03}-{name}"

    # -- asking ---------------------------------------------------------------------

    def meet(self) -> None:
        """Read name, length and version from the engine. Raises ``Broken``."""
        card = self.ok(self.http.get("/v1/models", headers=self.headers()))
        try:
            first = card["data"][0]
            self.model = str(first["id"])
            self.max_model_len = int(first["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Broken(
                f"/v1/models answers {card}; expected "
                '{"data": [{"id": ..., "max_model_len": ...}]}'
            ) from error

        health = self.ok(self.http.get("/health"))
        if not isinstance(health, dict) or not isinstance(health.get("version"), int):
            raise Broken(f'/health answers {health}; expected {{"status": "ok", "version": 0}}')
        self.version = health["version"]

    def headers(self, admin: bool = False) -> dict[str, str]:
        """The header with the key of the sampling routes or the admin routes."""
        key = self.admin_key if admin else self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def ok(self, answer: httpx.Response) -> Any:
        """The JSON of a successful answer. Raises ``Broken`` for any other."""
        place = f"{answer.request.method} {answer.request.url.path}"
        if not answer.is_success:
            raise Broken(f"{place} answers {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError as error:
            raise Broken(f"{place} answers no JSON: {answer.text[:100]!r}") from error

    def body(
        self, prompt: Sequence[int], salt: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """The body of a generate request. By default with logprobs and without end-of-sequence."""
        params = {"logprobs": 1, "ignore_eos": True} | sampling
        body = {"model": self.model, "token_ids": list(prompt), "sampling_params": params}
        return body if salt is None else body | {"cache_salt": salt}

    def post(self, body: Any) -> httpx.Response:
        """Send one generate request; the answer may be an error."""
        return self.http.post(GENERATE, json=body, headers=self.headers())

    def reply(self, prompt: Sequence[int], salt: str | None = None, **sampling: Any) -> Reply:
        """The reply to one generate request. Raises ``Broken`` for an error."""
        body = self.body(prompt, salt, **sampling)
        return read_reply(self.ok(self.post(body)), body)

    def choice(self, prompt: Sequence[int], salt: str | None = None, **sampling: Any) -> Choice:
        """Its only choice."""
        return self.reply(prompt, salt, **sampling).choices[0]

    @property
    def _is_tls(self) -> bool:
        """Certificates are verified; plain HTTP needs no SSL context, which costs 70 ms."""
        return not self.url.lower().startswith("http://")

    def replies(self, bodies: Sequence[dict[str, Any]], at_once: int = 64) -> list[Reply]:
        """Replies to many requests in order, ``at_once`` of them at a time."""
        return asyncio.run(self._replies(bodies, at_once))

    async def _replies(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Reply]:
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(
            base_url=self.url,
            timeout=self.timeout,
            limits=limits,
            verify=self._is_tls,
            trust_env=not is_loopback(self.url),
        ) as http:
            gate = asyncio.Semaphore(at_once)

            async def ask(body: dict[str, Any]) -> Reply:
                async with gate:
                    answer = await http.post(GENERATE, json=body, headers=self.headers())
                return read_reply(self.ok(answer), body)

            return list(await asyncio.gather(*map(ask, bodies)))

    @contextmanager
    def held(self, body: dict[str, Any]) -> Iterator[Future[Reply]]:
        """A request in the background. If the check fails, the engine is resumed to end it."""
        with ThreadPoolExecutor(1) as pool:
            try:
                yield pool.submit(lambda: read_reply(self.ok(self.post(body)), body))
            except BaseException:
                self.release()
                raise

    @contextmanager
    def running(self, body: dict[str, Any]) -> Iterator[Future[Reply]]:
        """A request in the background that the engine is processing."""
        before = self.metric("num_requests_running")
        with self.held(body) as future:
            self.wait(
                lambda: self.metric("num_requests_running") > before or future.done(),
                "vllm:num_requests_running does not rise while a request runs",
            )
            yield future

    # -- steering -------------------------------------------------------------------

    def admin(self, route: str, body: Any = None, **params: str) -> httpx.Response:
        """Send one admin request; the answer may be an error."""
        self.moved = True
        return self.http.post(route, json=body, params=params, headers=self.headers(admin=True))

    def pause(self) -> None:
        """Raises ``Broken``."""
        self.ok(self.admin("/pause", mode="keep", clear_cache="false"))

    def resume(self) -> None:
        """Raises ``Broken``."""
        self.ok(self.admin("/resume"))

    def load(self, folder: Path) -> httpx.Response:
        """``/update_weights`` with the next version; the answer may be an error."""
        body = {"weight_dir": str(folder), "version": self.version + 1}
        answer = self.admin("/update_weights", body)
        self.version += answer.is_success
        return answer

    def update(self, folder: Path) -> None:
        """The three requests of an update. Raises ``Broken``."""
        self.pause()
        self.ok(self.load(folder))
        self.resume()

    def release(self) -> None:
        """Wake and resume the engine, if the admin key is known."""
        for route in ("/wake_up", "/resume"):
            with suppress(httpx.HTTPError):
                self.admin(route)

    def restore(self) -> None:
        """Wake, resume, and load ``model_folder`` again. Raises ``Broken``."""
        if not self.moved:
            return
        self.release()
        self.update(self.model_folder)
        self.moved = False

    # -- watching -------------------------------------------------------------------

    def page(self) -> Page:
        """``/metrics``, as the monitor reads it. Raises ``Broken``."""
        answer = self.http.get("/metrics")
        if not answer.is_success:
            raise Broken(f"GET /metrics answers {answer.status_code}: {answer.text[:200]}")
        try:
            return parse(answer.text)
        except ValueError as error:
            raise Broken(f"/metrics is not Prometheus' text format: {error}") from error

    def metric(self, name: str) -> float:
        """A gauge or counter, summed over its labels. Raises ``Broken`` if there is none."""
        page = self.page()
        table = page.gauges | page.counters
        if name not in table:
            raise Broken(f"/metrics has no vllm:{name}; it has {', '.join(sorted(table)[:40])}")
        return table[name]

    def wait(self, done: Callable[[], bool], otherwise: str, seconds: float = 20.0) -> None:
        """Poll until true. Raises ``Broken`` with ``otherwise`` after a time limit."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise Broken(f"{otherwise} (after {seconds:.0f} s)")
            time.sleep(0.005)
