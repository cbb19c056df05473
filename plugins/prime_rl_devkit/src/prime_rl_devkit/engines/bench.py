"""An engine that is started for its first check: for the command line and pytest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prime_rl.errors import PrimeRLError
from prime_rl.plugins.launchers import Engine
from prime_rl.registry.offers import ENGINE, construct, settings_of
from prime_rl.testing.conformance import Outcome, Report
from prime_rl_devkit.engines.starting import started
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.engines.suite import CHECKS, conformance

NOT_STARTED = "starts a server: ask for it by name, prime-rl plugins check"


class Bench:
    """Settings are the engine's own; ``python`` among them is ``inference.python``. Raises
    ``ConfigError`` if they do not fit."""

    def __init__(self, cls: type[Engine], settings: Mapping[str, Any], where: str) -> None:
        further = {key: value for key, value in settings.items() if key != "python"}
        self._python = Path(settings["python"]) if "python" in settings else None
        self.engine = construct(cls, settings_of(cls, ENGINE, settings=further, where=where))
        self._stack = ExitStack()
        self._subject: EngineSubject | None = None
        self._failure: Exception | None = None

    @property
    def subject(self) -> EngineSubject:
        """The running engine. If its start failed, raises that error each time."""
        if self._failure is not None:
            raise self._failure
        if self._subject is None:
            folder = self._stack.enter_context(TemporaryDirectory(prefix="prime-rl-engine-"))
            server = started(self.engine, Path(folder), python=self._python)
            try:
                self._subject = self._stack.enter_context(server)
            except Exception as error:  # also of the engine's own code
                self._failure = error
                raise

        return self._subject

    def close(self) -> None:
        """End the server and remove its folder."""
        self._stack.close()

    def report(self) -> Report:
        """Run every check, then end the server."""
        name = type(self.engine).name
        try:
            return conformance(self.subject, name)
        except Exception as error:
            named = isinstance(error, PrimeRLError)
            said = str(error) if named else f"{type(error).__name__}: {error}"
            first = next(iter(CHECKS))
            return Report(
                "engine", name, (Outcome(first, "It starts.", status="failed", message=said),)
            )
        finally:
            self.close()


def not_started(cls: type[Engine]) -> Report:
    """The report of an engine that was not named: its checks start a server."""
    outcome = Outcome("conformance", "", status="skipped", message=f"{NOT_STARTED} {cls.name}")
    return Report("engine", cls.name, (outcome,))
