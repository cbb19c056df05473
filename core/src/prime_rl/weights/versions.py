"""Published versions on disk: markers, the newest version, and the request for files."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prime_rl.errors import EngineError
from prime_rl.plugins.weight_transports import Weights as Weights
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import names_in, names_seen

STABLE = "STABLE"
"""Marker file of a version that is announced: as files, or waiting in the trainer's memory."""
MEMORY = "MEMORY"
"""Marker file of a version that the trainer keeps in memory for a weight transport."""
MEETING = "meeting.json"
"""Beside it: what the two ends of the transport have agreed on for this version."""
FILES_WANTED = "FILES_WANTED"
"""Marker file in ``broadcasts``: asks the trainer to write the current version as files."""
AVERAGES = "averages"
"""Folder beside ``broadcasts``: the average of the weights at each version, for an engine."""
REFERENCES = "references"
"""Another one: the weights of each version that became the reference, for an engine."""

POLL_SECONDS = 0.02


def newest_version(broadcasts: Path) -> int | None:
    """The highest announced version; None if there is none. Other names are ignored."""
    names = names_seen(broadcasts)
    versions = [int(n[5:]) for n in names if n.startswith("step_") and n[5:].isdigit()]
    versions.sort(reverse=True)
    return next((v for v in versions if STABLE in names_seen(broadcasts / f"step_{v}")), None)


def has_files(directory: Path) -> bool:
    """Whether a version is there as files."""
    return any(directory.glob("*.safetensors"))


def only_in_memory(directory: Path) -> bool:
    """Whether a version waits in the trainer's memory, or may: the folder cannot be read now. Its
    files may be written later."""
    try:
        in_memory = MEMORY in names_in(directory) and not has_files(directory)
    except OSError as error:
        poll_failed(directory, error)
        return True  # otherwise engines would be asked to read files that are not there
    poll_succeeded(directory)
    return in_memory


def want_files(broadcasts: Path) -> None:
    """Ask the trainer to write the current version as files: it does so between steps."""
    with suppress(OSError):  # the caller polls and asks again
        (broadcasts / FILES_WANTED).touch()


async def wait_for_files(wanted: Callable[[], Weights], within: float = math.inf) -> None:
    """Until the version that ``wanted`` returns has files; asks the trainer to write them.

    Raises ``EngineError`` after ``within`` seconds, or when the next version is announced.
    """
    deadline = time.monotonic() + within
    while only_in_memory(wanted().directory):
        weights = wanted()
        following = weights.directory.with_name(f"step_{weights.version + 1}")
        if STABLE in names_seen(following):
            raise EngineError(f"version {weights.version} was never written: the next is there")

        # Once the next version has begun, the trainer would write that one instead.
        if following.name not in names_seen(following.parent):
            want_files(weights.directory.parent)

        if time.monotonic() > deadline:
            raise EngineError(
                f"the trainer has not written version {weights.version} within {within:g} s; it "
                "does so between steps"
            )

        await asyncio.sleep(POLL_SECONDS)
