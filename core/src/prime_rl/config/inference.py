"""``[inference]``: who samples."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from prime_rl.config.base import Settings


class InferenceConfig(Settings):
    """``[inference]``: the engine. A table of the engine's name holds the settings it brings
    along."""

    model_config = Settings.model_config | {"extra": "allow"}

    engine: str = "embedded"
    """Name of an installed engine."""
    host: str = "127.0.0.1"
    """Address the server binds. Nothing listens beyond loopback unless told."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """None: a free port is chosen."""
    max_model_len: PositiveInt | None = None
    """Prompt and completion together, in tokens. None: ``seq_len``."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds to wait for the server to become healthy."""

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's own table."""
        table = (self.model_extra or {}).get(self.engine, {})
        return dict(table) if isinstance(table, dict) else table

    @property
    def unread(self) -> list[str]:
        """Keys that belong neither to this table nor to the engine."""
        return [key for key in self.model_extra or {} if key != self.engine]
