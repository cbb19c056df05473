"""Errors of an environment's own code, as its author reads them: which function raised, and where.

The code of a taskset runs when a run starts: its module, its constructor, its ``load``. It may
raise anything, and ``sys.exit`` in it would end the run with exit code 0 and without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from prime_rl.env.episode import reason_of
from prime_rl.errors import ConfigError, PrimeRLError, Terminated

OF_LIBRARIES = frozenset({"prime_rl", "verifiers", "pydantic", "importlib", "contextlib"})
"""Packages whose frames lie between a call of ours and the env's own code."""
HIDDEN = "__tracebackhide__"


@contextmanager
def errors_of_env(where: str, expected: str = "") -> Iterator[None]:
    """What the code of an env raises inside becomes a ``ConfigError`` that begins with ``where``.

    ``expected``: what the code should have given, for an error that none of its lines has raised.
    """
    try:
        yield
    except (PrimeRLError, KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # SystemExit, and whatever else a library derives from it
        raise ConfigError(f"{where}: {blamed(error, expected)}") from error


def blamed(error: BaseException, expected: str = "") -> str:
    """``MyTaskset.load raised KeyError: 'answer' (line 12 of /env.py)``."""
    text = " ".join(f"{type(error).__name__}: {reason_of(error)}".split()).removesuffix(":")
    first = next(_own_frames(error), None)
    if first is None:
        return f"{expected} ({text})" if expected else text

    code = first.tb_frame.f_code
    name = code.co_qualname
    if code.co_name == "<module>":
        name = f"module {first.tb_frame.f_globals.get('__name__')}"
    return f"{name} raised {text}{line_of(error)}"


def line_of(error: BaseException) -> str:
    """The line that raised, or that called the library that did: `` (line 12 of /env.py)``. Empty:
    none of the env's lines did."""
    frames = [*_own_frames(error)]
    if not frames:
        return ""
    # Below the env's file there may be any depth of libraries, whose lines say nothing to its
    # author.
    file = frames[0].tb_frame.f_code.co_filename
    line = [each for each in frames if each.tb_frame.f_code.co_filename == file][-1].tb_lineno
    return f" (line {line} of {file})"


def _own_frames(error: BaseException) -> Iterator[TracebackType]:
    """From the first frame of the env's own code on, outermost first."""
    frame = error.__traceback__
    is_own = False
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__", ""))
        # The mark by which pytest too leaves out a frame: a plugin's wrapper may have it.
        is_between = module.partition(".")[0] in OF_LIBRARIES or HIDDEN in frame.tb_frame.f_locals
        is_own = is_own or not is_between
        if is_own:
            yield frame
        frame = frame.tb_next
