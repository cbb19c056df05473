"""The Python files of a package's wheel, without its binaries: a wheel of vLLM for CUDA has 330 MB,
of which 12 MB are Python.

pip says where the wheel is. A server that answers ranges (PyPI does) is asked for the directory at
the wheel's end and for the stretches of Python files; else pip downloads the wheel once. The files
stay in the user's cache.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
"""Bytes per request: neighbors of a file come with it."""
SECONDS = 600.0


class NoRegistry(Exception):
    """No registry answers, or it does not have the version."""


def cache_folder() -> Path:
    """The user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prime-rl" / "wheels"


def versions(package: str) -> list[str]:
    """What the registry has, newest first. Raises ``NoRegistry``."""
    prefix = "Available versions:"
    for line in _pip("index", "versions", package).splitlines():
        if line.startswith(prefix):
            return [each.strip() for each in line.removeprefix(prefix).split(",")]
    raise NoRegistry(f"pip names no versions of {package}")


def sources(package: str, version: str) -> Path:
    """The folder with the wheel's Python files and metadata. Raises ``NoRegistry``."""
    folder = cache_folder() / f"{package}-{version}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch) / "files"
        url = _url(package, version)
        try:
            _unpack(_opened(url), unpacked)
        except (OSError, NoRanges):
            options = ("--no-deps", "--only-binary=:all:", "--dest", scratch)
            _pip("download", *options, f"{package}=={version}")
            (wheel,) = Path(scratch).glob("*.whl")
            with wheel.open("rb") as file:
                _unpack(file, unpacked)
        with contextlib.suppress(OSError):  # another process has put it there
            unpacked.rename(folder)
    return folder


def _opened(url: str) -> Any:
    """The wheel at a URL of pip's, which may name a file of this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return urllib.request.url2pathname(parts.path)
    return Remote(url)


def _url(package: str, version: str) -> str:
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--report=-")
    report = json.loads(_pip("install", "--quiet", *options, f"{package}=={version}"))
    url: str = report["install"][0]["download_info"]["url"]
    return url


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoRegistry(f"pip {words[0]}: no answer in {SECONDS:g} s") from error
    if done.returncode:
        raise NoRegistry(f"pip {words[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout


class NoRanges(Exception):
    """The server answers whole files only."""


class Remote(io.RawIOBase):
    """A file of a server, read by ranges, one block in memory."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._place = 0
        self._start = 0
        self._block = b""
        self._size = self._ask(0, 1)[1]

    def _ask(self, first: int, last: int) -> tuple[bytes, int]:
        """Bytes ``first`` to before ``last``, and the size of the file."""
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last - 1}"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            if answer.status != 206:
                raise NoRanges
            return answer.read(), int(answer.headers["Content-Range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence, self._size)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """All of ``buffer``, from several blocks if need be: less means that the file ends."""
        done = 0
        while done < len(buffer) and self._place < self._size:
            if not self._start <= self._place < self._start + len(self._block):
                self._start = self._place
                self._block, _ = self._ask(self._place, min(self._place + BLOCK, self._size))
            begin = self._place - self._start
            part = self._block[begin : begin + len(buffer) - done]
            buffer[done : done + len(part)] = part
            self._place += len(part)
            done += len(part)
        return done


def _unpack(file: Any, folder: Path) -> None:
    with zipfile.ZipFile(file) as wheel:
        wanted = [
            entry
            for entry in wheel.infolist()
            if entry.filename.endswith((".py", ".dist-info/METADATA"))
        ]
        for entry in sorted(wanted, key=lambda entry: entry.header_offset):
            wheel.extract(entry, folder)
