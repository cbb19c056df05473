"""The hooks of an env ``function`` in its own scope. Imports no verifiers.

Core calls ``env_hooks(args)`` of a taskset's package that has a module of this name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from function.groups import score
from function.load import as_paths, load_functions
from prime_rl import Group, hookimpl


class GroupReward:
    """Adds the group rewards of an env, before its algorithm compares the siblings."""

    name = "environments"
    """The name in its metrics: ``plugin/environments/...``."""

    @hookimpl(tryfirst=True)
    async def score_group(self, group: Group) -> None:
        await score(group)


def env_hooks(args: Mapping[str, Any] | None) -> Iterable[object]:
    """A group reward, if one of the env's functions takes ``replies``. ``args``: None for saved
    rollouts, which have the terms. Raises ``ConfigError``."""
    if args is None:
        return [GroupReward()]
    functions = load_functions(as_paths(args.get("reward")), args.get("functions"))
    return [GroupReward()] if any(each.is_group for each in functions) else []
