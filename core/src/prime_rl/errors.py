"""The exceptions of the framework: each says when it is raised."""

import re


def printable(text: str) -> str:
    """A text that cannot rule a terminal: no controls (C0, C1), bidi overrides or surrogates."""
    bidi = r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    surrogates = r"\ud800-\udfff"
    return re.sub(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{bidi}{surrogates}]", "\ufffd", text)


def text_of(error: BaseException) -> str:
    """The text of an error of code that is not ours: making it may fail, and so hide the error."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def line_in(error: BaseException, package: str) -> str:
    """The last line of a package that an error came through: `` (line 12 of /x.py)``. Empty if it
    came through none."""
    place = ""
    frame = error.__traceback__
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == package:
            place = f" (line {frame.tb_lineno} of {frame.tb_frame.f_code.co_filename})"
        frame = frame.tb_next
    return place


class PrimeRLError(Exception):
    """Base class of every exception that the framework raises on purpose."""

    exit_code = 2  # of ``prime-rl``, if the exception ends it

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(PrimeRLError, ValueError):
    """A setting cannot work."""


class ConfigWarning(UserWarning):
    """A setting works, and is probably not what its author wants. Any check of a config may warn
    instead of raising: ``warnings.warn(text, ConfigWarning)``. ``prime-rl`` shows the text."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RunHeld(ConfigError):
    """Another supervisor runs this run."""

    exit_code = 3


class NoCheckpoint(ConfigError):
    """There is nothing to resume from."""

    exit_code = 4


class PluginError(PrimeRLError):
    """A plugin cannot be loaded, or would be ignored in part."""


class StreamError(PrimeRLError, ValueError):
    """A per-token stream has the wrong length or the wrong values."""


class WireError(PrimeRLError, ValueError):
    """A frame on the wire is truncated, foreign or of another version."""


class EngineError(PrimeRLError):
    """An inference engine refused a request or could not be reached."""


class OverlongError(EngineError):
    """A sequence is longer than the engine's limit."""


class BranchFailed(PrimeRLError):
    """The episode of a branch has failed: its environment raised, or went another way than in the
    rollout that it branches from."""


class VersionGone(PrimeRLError):
    """A version of the policy is asked for that the run does not keep."""


class EngineGone(EngineError):
    """The engine does not answer: dead, unreachable, or not started yet."""


class WeightsError(PrimeRLError):
    """Published weights are missing, corrupt or do not fit the model."""


class RunError(PrimeRLError):
    """The run as a whole cannot go on."""


class ProcessFailed(RunError):
    """A process that the run needs has died, hangs or is stopped."""

    def __init__(self, text: str, name: str, cause: str, reported: bool = False) -> None:
        """``cause``: one line. ``reported``: the process itself has said what was wrong."""
        super().__init__(text)
        self.name = name
        self.cause = cause
        self.reported = reported


class Terminated(SystemExit):
    """A signal ends this process, at whatever code runs now: none of it has failed."""
