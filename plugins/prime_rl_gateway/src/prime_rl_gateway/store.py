"""Files of a gateway, in the env's folder of the run.

    sessions/ID.jsonl      one session: a line for each change, with what is new
    address.json           where the gateway listens, and the key if the run has made it
    secret                 signs the names of sessions

What a client has had an answer to is in its file. A process that is killed may leave half a line
behind: no client has the answer to it, and the next line takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prime_rl_gateway.book import Session, State

log = logging.getLogger(__name__)

BLOCK = 4096
"""Bytes of a file's end to read first. The last line of a closed session has less."""


class Place(msgspec.Struct):
    """A session's place in the book: in each line of its file, and the last one counts."""

    id: str
    number: int
    tenant: str
    group: str
    task: int | None
    idempotency_key: str | None
    opened_at: float
    touched_at: float
    state: State
    reward: float | None
    turn_rewards: dict[int, float]
    rewarded_at: float
    first_version: int | None
    num_replies: int

    @classmethod
    def of(cls, session: Session) -> Place:
        """The place of an open or rewarded session."""
        return cls(**{name: getattr(session, name) for name in cls.__struct_fields__})

    def session(self) -> Session:
        """The session. One that was given to a process that has ended is rewarded again."""
        return Session(**msgspec.structs.asdict(self))


class Reply(msgspec.Struct):
    """An answer of the model's routes, for a client that asks again."""

    route: str
    digest: str
    """Digest of the request's body, in hexadecimal."""
    content_type: str
    body: str


class Line(msgspec.Struct, omit_defaults=True):
    """One line of a session's file."""

    place: Place
    nodes: list[dict[str, Any]] = []
    """Those of the trace that no line before has."""
    versions: dict[str, list[tuple[int, int, int]]] = {}
    """Versions of these nodes."""
    tools: list[dict[str, Any]] | None = None
    """All of the trace. None: as before."""
    replies: dict[str, Reply] = {}
    """By the key that tells a request from others, those that no line before has."""


@dataclass
class Record:
    """The contents of a session's file."""

    place: Place
    size: int
    """Bytes of its whole lines."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    replies: dict[str, Reply] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """The next line."""
        self.place = line.place
        self.nodes += line.nodes
        self.versions |= line.versions
        self.replies |= line.replies
        if line.tools is not None:
            self.tools = line.tools


class Address(msgspec.Struct):
    """The contents of ``address.json``."""

    env: str
    url: str
    port: int
    keys: dict[str, str]
    """Keys that the run has made, by tenant."""
    key_vars: dict[str, str]
    """The environment variables that have the others."""


class Store:
    """Reads and writes the files. Blocking: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._sessions = folder / "sessions"
        self._sessions.mkdir(parents=True, exist_ok=True)
        self._address = folder / "address.json"
        self._secret = folder / "secret"

    def secret(self) -> bytes:
        """The same one in every process of the run."""
        if not self._secret.exists():
            replace(self._secret, secrets.token_hex(32).encode())
        return self._secret.read_bytes()

    def address(self) -> Address | None:
        """Where an earlier process has listened. None: there was none."""
        return read_address(self._address)

    def write_address(self, address: Address) -> None:
        replace(self._address, msgspec.json.format(msgspec.json.encode(address)))

    def append(self, line: Line, size: int) -> int:
        """Write a line at ``size``, the end of the whole lines: half a line behind it is
        overwritten. On disk when this returns the new end. Raises ``OSError``."""
        path = self._path(line.place.id)
        # Not msgspec's: this has numbers that are not finite, and halves of characters.
        content = json.dumps(msgspec.to_builtins(line)).encode() + b"\n"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(handle, "wb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            flush_folder(self._sessions)
        return size + len(content)

    def read(self, session_id: str) -> Record:
        """Raises ``OSError``; ``EOFError`` for a file without a whole line; ``ValueError`` for one
        that is damaged."""
        record: Record | None = None
        content = self._path(session_id).read_bytes()
        for text in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            line = msgspec.convert(json.loads(text), Line, str_keys=True)
            if record is None:
                record = Record(place=line.place, size=0)
            record.add(line)
            record.size += len(text)
        if record is None:
            raise EOFError("it has no whole line")
        return record

    def delete(self, session_ids: list[str]) -> None:
        """Their files are gone when this returns. Raises ``OSError``."""
        for session_id in session_ids:
            self._path(session_id).unlink(missing_ok=True)
        flush_folder(self._sessions)

    def places(self) -> list[Place]:
        """The place of every session, in the order in which they were opened. Reads the last line
        of each file: a session of many turns has megabytes. A file that cannot be read is left out
        with a warning, and one that was never complete is deleted."""
        places = []
        for path in sorted(self._sessions.glob("*.jsonl")):
            try:
                line = json.loads(last_line(path))
                places.append(msgspec.convert(line, Line, str_keys=True).place)
            except EOFError:
                path.unlink()
            except (OSError, ValueError) as error:
                log_lost(path.stem, error)
        return sorted(places, key=lambda place: place.number)

    def _path(self, session_id: str) -> Path:
        return self._sessions / f"{session_id}.jsonl"


def log_lost(session_id: str, error: Exception) -> None:
    """Say that a session's file cannot be read."""
    log.warning("the file of session %s cannot be read, its session is lost: %s", session_id, error)


def last_line(path: Path) -> bytes:
    """The last whole line of a file, without what stands behind it. Raises ``OSError``, and
    ``EOFError`` if there is none."""
    end = b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        while True:
            # A line has two ends: its own, and that of the line before it.
            whole = end[: end.rfind(b"\n") + 1]
            before = whole.rfind(b"\n", 0, -1)
            if before >= 0 or not start:
                break
            size = min(start, max(BLOCK, len(end)))
            start = file.seek(start - size)
            end = file.read(size) + end
    if not whole:
        raise EOFError("it has no whole line")
    return whole[before + 1 :]


def read_address(path: Path) -> Address | None:
    """The contents of an ``address.json``. None if there is none, or it is not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return None


def replace(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read (``mkstemp``), whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        flush_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """New names in the folder, and those that are gone, outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
