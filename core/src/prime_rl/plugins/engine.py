"""Inference engines. Orchestrator side: entry-point group ``prime_rl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from prime_rl.errors import ConfigError
from prime_rl.plugins.base import Offer


@dataclass(frozen=True)
class EngineLaunch:
    """The server that an engine plugin has to start."""

    model_path: Path
    """A Hugging Face folder or id."""
    served_model_name: str
    host: str
    port: int
    max_model_len: int
    """Prompt and completion together, in tokens."""
    seed: int
    admin_key: str
    """Bearer key of the admin routes. Pass it by the environment: argument lists are public."""
    status_path: Path | None = None
    """Where the server reports its state (``prime_rl.rundir.status.Status``)."""
    policy_version: int = 0
    wait_for_model: bool = False
    """The folder is still being made: wait for the file ``.ready`` in it."""
    python: Path | None = None
    """Interpreter for the server, if ``Engine.check`` accepted one. None: ours."""
    can_sleep: bool = False
    """Engine and trainer share GPUs: ``/sleep`` has to free the memory."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start one server process."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Offer):
    """An inference server behind the HTTP contract of ``docs/engines.md``."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Optional parts of that contract it does not have, and why: ``{"sleep": "no GPU"}``. The suite
    ``prime_rl_devkit.engines`` skips their checks with that reason."""

    def check(self, python: Path | None) -> None:
        """Refuse what the server would fail on, before any process starts.

        ``python`` is ``inference.python``; this default refuses one. Raises ``ConfigError``.
        """
        if python is not None:
            raise ConfigError(
                f"inference.python: the engine {self.name!r} runs under the run's own interpreter; "
                "leave it out"
            )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The process that serves ``launch.model_path`` on ``launch.port``, in the foreground."""
        raise NotImplementedError

    @property
    def num_gpus(self) -> int:
        """GPUs of one server where there are any: the size of its tensor parallelism."""
        return 1

    @property
    def dtype(self) -> str | None:
        """Precision of its weights, as torch spells it (``bfloat16``); None: not set. Rounded
        weights (``trainer.publish_dtype``) are refused for another one."""
        return None
