"""The options of ``prime-rl serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from prime_rl.config.base import Settings
from prime_rl.config.run import ModelSource


class EngineTable(Settings):
    """``--inference.KEY``: how the engine starts. A table of the engine's name holds its own
    settings."""

    model_config = Settings.model_config | {"extra": "allow"}

    python: str | None = None
    """Interpreter the engine runs under. None: this one."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds to wait until the engine serves."""


class ServeSettings(ModelSource):
    """One model and one engine."""

    engine: str = ""
    """Name of an installed engine. Left out: the default engine of a run."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Left out: 8000, or a free port if 8000 is taken."""
    served_model_name: str | None = None
    """The model's name for clients. Left out: the run's name, or MODEL."""
    max_model_len: PositiveInt | None = None
    """Prompt and completion, in tokens. Left out: the model's own limit."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds model making, and requests that bring no seed."""
    api_key_var: str | None = None
    """Environment variable with the key that clients must send."""
    show_admin_key: bool = False
    """Print the key of the admin routes."""
    inference: EngineTable = EngineTable()

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        folder = Path(self.model.name).absolute()
        is_run = folder.name == "weights" and (folder.parent / "configs" / "run.json").is_file()
        short = folder.parent.name if is_run else self.model.name.rstrip("/")
        return self.served_model_name or short

    @property
    def engine_settings(self) -> Any:
        """The keys the engine validates."""
        return (self.inference.model_extra or {}).get(self.engine, {})

    @property
    def interpreter(self) -> Path | None:
        """``inference.python`` as an absolute path. Links stay: they select a virtual
        environment."""
        python = self.inference.python
        return None if python is None else Path(python).expanduser().absolute()
