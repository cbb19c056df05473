"""The logs of a run stay small: of one that is too long, the beginning and the end are kept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, current_thread

LOOK_SECONDS = 0.25
MIB = 1 << 20


class LogLimit:
    """Cuts the logs of all attempts at a run in a thread of its own. The processes write to their
    file by descriptor, at its end (``O_APPEND``): what they write during a cut may be lost."""

    def __init__(self, run_dir: Path, max_mib: float) -> None:
        self._folder = run_dir / "logs"
        self._max_mib = max_mib
        self._cuts: dict[Path, tuple[int, int]] = {}
        """For each log that was cut: bytes before the note, and bytes left out so far."""
        self._ended = Event()
        self._thread = Thread(target=self._run, name="log limit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Cut what is too long now."""
        paths = list[Path]()
        with suppress(OSError):  # a shared disk refuses now and then: the next look sees them
            paths = [*self._folder.glob("attempt_*/*.log")]
        for path in paths:
            with suppress(OSError):  # a full disk, or a log that was deleted
                if path.stat().st_size > self._max_mib * MIB:
                    self._cut(path)

    def _cut(self, path: Path) -> None:
        """Keep a quarter of the limit at each end, in whole lines where it has any."""
        part = max(1, int(self._max_mib * MIB) // 4)
        start, before = self._cuts.get(path, (0, 0))
        with path.open("r+b") as file:
            if not start:
                head = file.read(part)
                start = head.rfind(b"\n") + 1 or part
            size = file.seek(-part, os.SEEK_END) + part
            tail = file.read(part)
            tail = tail[tail.find(b"\n") + 1 :]
            file.truncate(start)

        left = before + size - start - len(tail)
        self._cuts[path] = (start, left)
        said = f"{left / MIB:.1f} MiB are left out here: a log has {self._max_mib:g} MiB at most"
        with path.open("ab") as file:
            file.write(f"[prime-rl] {said} (log.max_mib)\n".encode() + tail)

    def close(self) -> None:
        """Look once more, and end."""
        self._ended.set()
        # The garbage collector calls this in any thread, also in our own.
        if self._thread is not current_thread():
            self._thread.join()
        self.look()
