"""A real browser for the tests of the page: Chromium, spoken to through two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from waiting import LIMIT

NAMES = ("chromium", "chromium-browser", "google-chrome")

KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowRight": 39, "ArrowUp": 38}


def browser_path() -> str | None:
    """An installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. What the page says on its console as an error is kept in ``errors``."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requested: list[str] = []
        """Every address the page asked for."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def attach(self) -> None:
        """Open a tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def size(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def prefers(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path) -> float:
        """Load a file and wait until it is ready; the seconds that took."""
        started = time.perf_counter()
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.documentElement?.dataset.ready === 'true'")
        return time.perf_counter() - started

    def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for a condition of the page."""
        deadline = time.monotonic() + LIMIT
        while not self.eval(condition):
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"never came true: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, as a person would press it."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        common = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self._settle()

    def click(self, selector: str) -> None:
        """The middle of an element, with the mouse."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self._settle()

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self._settle()

    def _middle(self, selector: str) -> tuple[float, float]:
        """Where the pointer meets an element: in view, at rest, and with nothing above it.

        A busy browser lays out a page of a new size some frames later. A click at the place
        before that would meet another element.
        """
        find = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'});"
            "const b = e.getClientRects()[0];"
            "const x = b.x + b.width / 2, y = b.y + b.height / 2;"
            "const met = document.elementFromPoint(x, y);"
            "return [x, y, e.contains(met)]; })()"
        )
        deadline = time.monotonic() + LIMIT
        before = None
        while True:
            place = self.eval(find)
            x, y, is_met = place
            if is_met and place == before:
                return x, y
            assert time.monotonic() < deadline, f"never at rest and uncovered: {selector}"
            before = place
            self._settle()

    def _settle(self) -> None:
        """Two frames: handlers have run, and what they asked of a microtask too."""
        self.eval("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))")

    def text(self, selector: str) -> str:
        """What a person reads there."""
        found: str = self.eval(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def screenshot(self, path: Path) -> None:
        """The window as a PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


def _as_3_and_4(requests: int, answers: int) -> None:
    """Where Chromium looks for its pipes. By way of high numbers: either may be 3 or 4 itself."""
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in (requests, answers)]
    for number, place in zip(moved, (3, 4), strict=True):
        os.dup2(number, place)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser of its own with an empty profile; ended afterwards."""
    requests_out, requests_in = os.pipe()
    answers_out, answers_in = os.pipe()
    command = [
        str(browser_path()), "--headless=new", "--no-sandbox", "--disable-gpu",
        "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(3, 4), preexec_fn=partial(_as_3_and_4, requests_out, answers_in),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(requests_out)
    os.close(answers_in)
    try:
        page = Page(requests_in, answers_out)
        page.attach()
        yield page
    finally:
        process.terminate()
        process.wait(timeout=LIMIT)
        os.close(requests_in)
        os.close(answers_out)
