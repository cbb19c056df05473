"""Reading the files of a run, which may be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.errors import PrimeRLError, RunError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ``RunError``, one line that names the file, for whatever its content causes: code that
    reads a file written by us meets any error if another program or a disk has changed it."""
    try:
        yield
    except PrimeRLError as error:
        if str(path) in str(error):
            raise
        raise RunError(f"{path}: {error}") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
        *(AssertionError, RecursionError, MemoryError),
    ) as error:
        said = " ".join(str(error).split())[:300]
        # Our readers raise a plain ValueError, which says where, what was expected and found.
        is_told = type(error) is ValueError
        kind = "" if is_told else f"{type(error).__name__}: "
        raise RunError(f"{path} is damaged: {kind}{said}") from error
