"""Every exception the framework raises on purpose.

PrimeRLError
├── ConfigError     a setting cannot work; names the place and the key
├── PluginError     a plugin broke the contract; names the plugin and its distribution
├── StreamError     a per-token stream does not line up with its tokens
├── WireError       a frame is truncated, foreign or of another version
├── EngineError     an inference engine refused or could not be reached
├── WeightsError    published weights are missing, corrupt or do not fit the model
└── RunError        the run as a whole cannot go on (a child died, nothing trains)
"""


class PrimeRLError(Exception):
    """Base class, so that a caller can catch everything we raise on purpose."""


class ConfigError(PrimeRLError, ValueError):
    """A setting cannot work."""


class PluginError(PrimeRLError):
    """A plugin cannot be loaded, or would have been skipped in silence."""


class StreamError(PrimeRLError, ValueError):
    """A per-token stream has the wrong length or the wrong values."""


class WireError(PrimeRLError, ValueError):
    """A frame on the wire is truncated, foreign or of another version."""


class EngineError(PrimeRLError):
    """An inference engine refused a request or could not be reached."""


class OverlongError(EngineError):
    """A sequence is longer than an engine takes."""


class EngineGone(EngineError):
    """No answer came: the engine is dead, cut off, or not there yet."""


class WeightsError(PrimeRLError):
    """Published weights are missing, corrupt or do not fit the model."""


class RunError(PrimeRLError):
    """The run as a whole cannot go on."""
