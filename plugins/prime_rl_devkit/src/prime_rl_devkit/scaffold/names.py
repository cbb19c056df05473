"""The names of a new package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import prime_rl
from prime_rl.errors import ConfigError
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.registry.checks import CONTRACT_VERSION
from prime_rl_devkit.facts import installed

KINDS: Mapping[str, str] = {
    "algorithm": PROJECT,
    "filter": PROJECT,
    "loss": TRAINER_GROUP,
    "head": TRAINER_GROUP,
    "engine": PROJECT,
    "sampler": PROJECT,
    "renderer": PROJECT,
    "source": PROJECT,
    "monitor": PROJECT,
    "launcher": PROJECT,
    "model": PROJECT,
    "wrapper": PROJECT,
    "observer": PROJECT,
    "command": PROJECT,
    "optimizer": TRAINER_GROUP,
    "kernel": TRAINER_GROUP,
    "transport": PROJECT,
}
"""Every kind of plugin with a template, and its entry-point group."""

BOTH_SIDES = frozenset({"transport"})
"""Kinds that the trainer loads too."""

OFFERED_AS = {"transport": "weight_transport"}
"""Kinds whose class has a longer name."""

ENVIRONMENT = "environment"
"""The kind that is no plugin: verifiers finds it, by the name of its module."""

PREFIX = "prime-rl-"


@dataclass(frozen=True)
class Names:
    """One name in every spelling."""

    name: str
    """In a TOML: ``my_algo``."""
    dashed: str
    env_name: str
    """In environment variables: ``MY_ALGO``."""
    distribution: str
    module: str
    class_name: str
    core_range: str
    """The versions of prime-rl-core like the installed one."""
    contract_range: str
    """The contracts that it works with: this one and the next, which runs it unchanged."""
    lowest_core: str
    """The lowest version of prime-rl that CI installs: ``==0.2.*``."""
    contract: str
    """Its number."""


def names_for(name: str, kind: str) -> Names:
    """Check ``name``. Raises ``ConfigError`` if it is invalid or taken."""
    kinds = kind.split("+")
    if kind != ENVIRONMENT and (set(kinds) - KINDS.keys() or len({*kinds}) < len(kinds)):
        expected = ", ".join((*KINDS, ENVIRONMENT))
        raise ConfigError(f"--kind: expected one of {expected}, got {kind!r}")
    plain = name.removeprefix(PREFIX)
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", plain):
        raise ConfigError(
            f"name: expected small letters and digits, in words joined by a dash, such as my-algo; "
            f"got {name!r}"
        )
    dashed = plain.replace("_", "-")
    spelt = plain.replace("-", "_")
    names = Names(
        name=spelt,
        dashed=dashed,
        env_name=spelt.upper(),
        distribution=f"{PREFIX}{dashed}",
        module=spelt if kind == ENVIRONMENT else f"prime_rl_{spelt}",
        class_name="".join(word.capitalize() for word in spelt.split("_")),
        core_range=core_range(version("prime-rl-core")),
        contract_range=f">={CONTRACT_VERSION},<{CONTRACT_VERSION + 2}",
        lowest_core=f"=={'.'.join(version('prime-rl-core').split('.')[:2])}.*",
        contract=str(CONTRACT_VERSION),
    )
    _check_free(names, kind)
    return names


def core_range(installed: str) -> str:
    """From the installed version to the next that may break: ``>=0.1,<0.2``, ``>=1.4,<2``."""
    major, minor = (int(part) for part in installed.split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def _check_free(names: Names, kind: str) -> None:
    for ours in (names.class_name, f"{names.class_name}Config"):
        if hasattr(prime_rl, ours):
            raise ConfigError(f"name: {ours!r} is a class of prime_rl itself; choose another name")
    for plugin in installed():
        if plugin.entry.name == names.name or plugin.source.distribution == names.distribution:
            raise ConfigError(_taken(names.name, f"the plugin {plugin.source}"))
        for each, offered in plugin.offers:
            kinds = [OFFERED_AS.get(part, part) for part in kind.split("+")]
            if each.name in kinds and offered.cls.name == names.name:
                raise ConfigError(
                    _taken(names.name, f"a {each.name} of the plugin {plugin.source}")
                )
    if find_spec(names.module) is not None:
        raise ConfigError(_taken(names.name, f"an installed module, {names.module}"))


def _taken(name: str, by: str) -> str:
    return f"name: {name!r} is taken by {by}. Choose another name, or uninstall that one."
