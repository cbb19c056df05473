"""A resolved config with parts of a test's own."""

from __future__ import annotations

from typing import Any

from prime_rl.config.run import RunConfig
from prime_rl_app.resolve import Resolved


def resolved_with(config: RunConfig, **parts: Any) -> Resolved:
    """``parts``: by name, in place of those that the installed plugins would make."""
    made: Resolved = type("ResolvedWith", (Resolved,), parts)(config)
    return made
