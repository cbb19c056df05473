"""Follow a file that another process appends lines to."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Remembers its position in the file. An incomplete last line is left for the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[bytes]:
        """Complete, non-empty lines written since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for line in whole.splitlines() if line]
