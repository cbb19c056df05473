"""``prime-rl plugins check``: check installed plugins, or a package folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from prime_rl.entries import DISABLE, group_meant
from prime_rl.errors import ConfigError
from prime_rl.plugins.hookspecs import PROJECT
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import GROUPS, Origin
from prime_rl.registry.offers import (
    ALGORITHM,
    ENGINE,
    Kind,
    Offered,
    settings_of,
    unreached_observers,
)
from prime_rl.testing.conformance import CheckStatus, Outcome, Report, conformance
from prime_rl_devkit.facts import Plugin, described, installed, load
from prime_rl_devkit.hooks import check_hooks
from prime_rl_devkit.kinds import BY_KIND, CONNECTS, builds, check_offer
from prime_rl_devkit.limits import SECONDS, time_limit
from prime_rl_devkit.verdicts import Broken, run

HEAVY = ("torch", "transformers", "verifiers", "renderers")


def check(target: str | None, settings: Mapping[str, Any], limit: float = SECONDS) -> list[Report]:
    """Reports of one plugin, one class it offers, a package folder, or everything installed. Code
    of a plugin that takes longer than ``limit`` seconds is ended, and fails its check.

    Raises ``ConfigError`` for an unknown target or invalid settings.
    """
    if target is not None and _is_path(target):
        checking = Checking(settings, limit, connects=True)
        with _in_folder(Path(target), limit) as plugins, _losses_that_load(limit):
            return _reports(plugins, None, checking)

    checking = Checking(settings, limit, connects=target is not None, starts=target is not None)
    if target is not None:
        described(target)  # raises for an unknown one, with the nearest names
    with _losses_that_load(limit) as plugins:
        return _reports(plugins, target, checking)


def _reports(plugins: Sequence[Plugin], target: str | None, given: Checking) -> list[Report]:
    """The reports of everything that ``target`` names; None: of all plugins."""
    settings = given.settings
    chosen = [(plugin, _chosen(plugin, target)) for plugin in plugins]
    _check_keys(settings, [offered for _, offers in chosen for _, offered in offers])
    return [
        report
        for plugin, offers in chosen
        for report in _check_plugin(
            plugin, offers, beside=plugins, whole=_is_whole(target, plugin.source), given=given
        )
    ]


@dataclass(frozen=True)
class Checking:
    """The arguments of every check."""

    settings: Mapping[str, Any]
    limit: float
    connects: bool
    """The user named what to check: it may use the network."""
    starts: bool = False
    """The same for an installed engine, whose server needs torch and a minute."""


def _chosen(plugin: Plugin, target: str | None) -> list[tuple[Kind[Any], Offered[Any]]]:
    """The classes of a plugin that ``target`` names."""
    whole = _is_whole(target, plugin.source)
    return [each for each in plugin.offers if whole or each[1].cls.name == target]


def _is_whole(target: str | None, source: Origin) -> bool:
    """Whether ``target`` means everything that a plugin offers."""
    package = source.distribution.replace("-", "_")
    return target in (None, source.plugin, source.distribution, package)


def _check_keys(settings: Mapping[str, Any], offers: Sequence[Offered[Any]]) -> None:
    """Each class gets the settings that it defines. A setting that no class defines is refused."""
    if any(each.cls.config_class.model_config.get("extra") == "allow" for each in offers):
        return
    known = sorted({key for offered in offers for key in offered.cls.config_class.model_fields})
    for key in settings:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            here = f"known here: {', '.join(known) or 'none'}"
            said = f"did you mean {close[0]!r}?" if close else here
            raise ConfigError(f"--set: {key}: unknown key; {said}")


def _is_path(target: str) -> bool:
    return os.sep in target or target == "." or (Path(target) / "pyproject.toml").exists()


@contextmanager
def _in_folder(folder: Path, limit: float) -> Iterator[list[Plugin]]:
    """The plugins of a package folder, which need not be installed. While the block runs, its entry
    points are found like installed ones: its algorithm may name its own loss."""
    name, version, groups = read_project(folder)
    source = folder / "src" if (folder / "src").is_dir() else folder
    sys.path.insert(0, str(source.resolve()))
    with TemporaryDirectory() as site:
        info = Path(site, f"{name.replace('-', '_')}-{version or '0'}.dist-info")
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or '0'}\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        lines = [
            line
            for group, entries in groups.items()
            for line in (
                f"[{group}]",
                *(f"{plugin} = {value}" for plugin, value in entries.items()),
            )
        ]
        (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
        sys.path.insert(0, site)
        try:
            yield [
                load(EntryPoint(plugin, value, group), Origin(plugin, name, version), limit)
                for group, entries in groups.items()
                for plugin, value in entries.items()
            ]
        finally:
            sys.path.remove(site)


@contextmanager
def _losses_that_load(limit: float) -> Iterator[list[Plugin]]:
    """Every installed plugin. While the block runs, broken ones are disabled: the algorithms of
    others are checked with the losses that load."""
    plugins = [*installed(limit)]
    named = Counter((plugin.entry.group, plugin.entry.name) for plugin in plugins)
    broken = {
        p.entry.name if named[p.entry.group, p.entry.name] == 1 else p.source.distribution
        for p in plugins
        if p.error is not None and p.entry.group in GROUPS  # of a misspelt one nothing is loaded
    }
    before = os.environ.get(DISABLE, "")
    os.environ[DISABLE] = ",".join(filter(None, (before, *sorted(broken))))
    installed_losses.cache_clear()
    try:
        yield plugins
    finally:
        os.environ[DISABLE] = before
        installed_losses.cache_clear()


def read_project(folder: Path) -> tuple[str, str, dict[str, dict[str, str]]]:
    """Name, version and entry points of prime-rl of a package folder. Raises ``ConfigError``."""
    path = folder / "pyproject.toml"
    if not path.exists():
        raise ConfigError(f"{folder}: expected a package folder with a pyproject.toml, found none")
    try:
        project = tomllib.loads(path.read_text("utf-8")).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error

    points = project.get("entry-points", {})
    for group in points:
        meant = group_meant(group)
        if meant is not None:
            raise ConfigError(
                f"{path}: nothing reads the group of entry points {group!r}; did you mean "
                f"{meant!r}?"
            )
    groups = {group: points[group] for group in GROUPS if points.get(group)}
    if not groups:
        raise ConfigError(
            f"{path}: no entry points under {' or '.join(map(repr, GROUPS))}, so no "
            "plugin would be loaded. Add [project.entry-points.prime_rl] with a line: my_plugin = "
            '"my_module"'
        )

    return str(project.get("name", folder.name)), str(project.get("version", "")), groups


def _check_plugin(
    plugin: Plugin,
    offers: Sequence[tuple[Kind[Any], Offered[Any]]],
    beside: Sequence[Plugin],
    whole: bool,
    given: Checking,
) -> Iterator[Report]:
    """The reports of one plugin: the package, its own hooks, and the classes it offers. ``beside``:
    the plugins of both entry-point groups."""
    name = plugin.entry.name
    if whole and plugin.error is not None:
        yield Report("plugin", name, (run(loads, plugin),))
        return

    if whole:
        value = plugin.entry.value
        outcomes = (
            run(loads, plugin),
            run(light_import, value),
            run(documented, offers),
            run(observers_run, plugin, beside),
        )
        yield Report("plugin", name, outcomes)
        if plugin.entry.group == PROJECT:  # the trainer calls no hook but register_...
            with time_limit(given.limit):
                hooks = check_hooks(name, plugin.hooks.get_plugin(name))
            yield from [] if hooks is None else [hooks]

    for kind, offered in offers:
        if kind is ENGINE:
            yield _engine(offered.cls, given.settings, by_name=given.starts)
        elif not whole or kind is ALGORITHM or kind.name in BY_KIND or given.connects:
            with time_limit(given.limit):
                report = _offer(kind, offered, given)
            yield report


def loads(plugin: Plugin) -> None:
    """It imports, keeps the contract, and has names of its own."""
    if plugin.error is not None:
        raise Broken(plugin.error)


def observers_run(plugin: Plugin, beside: Sequence[Plugin]) -> None:
    """Each of its observers is offered to the process in which it runs."""
    managers = [each.hooks for each in beside if each.error is None]
    for problem in unreached_observers(*managers):
        if problem.startswith(f"plugin {plugin.source}:"):
            raise Broken(problem)


IMPORT_SECONDS = 5.0
"""How long the import of a plugin may take, beyond that of prime_rl."""


def light_import(value: str) -> None:
    """Importing it is quick and imports nothing heavy: every check of a config imports it."""
    code = (
        "import importlib, json, sys, prime_rl, prime_rl.registry.offers\n"
        "from prime_rl_devkit.limits import OwnTime\n"
        "clock = OwnTime()\n"
        f"importlib.import_module({value.partition(':')[0]!r})\n"
        "seconds = clock.seconds()\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "print('\\n' + json.dumps([seconds, heavy]))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    seconds, heavy = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else (0, [])
    if done.returncode:
        said = f"importing {value} in a process of its own failed: {done.stderr.strip()[-500:]}"
    elif heavy:
        said = (
            f"importing {value} imports {', '.join(heavy)}. Import it inside the function that "
            "needs it."
        )
    elif seconds > IMPORT_SECONDS:
        said = (
            f"importing {value} takes {seconds:.1f} s, expected at most {IMPORT_SECONDS:g} s. Do "
            "the work in the function that needs it."
        )
    else:
        return

    raise Broken(said)


def documented(offers: Sequence[tuple[Kind[Any], Offered[Any]]]) -> None:
    """Every class and every setting has a docstring."""
    missing = []
    for _, offered in offers:
        cls = offered.cls
        if not vars(cls).get("__doc__"):
            missing.append(f"class {cls.__qualname__}")
        for key, field in cls.config_class.model_fields.items():
            if not field.description:
                missing.append(f"{cls.config_class.__qualname__}.{key}")

    if missing:
        raise Broken(f"no docstring: {', '.join(dict.fromkeys(missing))}. Put a string below it.")


def _offer(kind: Kind[Any], offered: Offered[Any], given: Checking) -> Report:
    cls = offered.cls
    known = {k: v for k, v in given.settings.items() if k in cls.config_class.model_fields}
    try:
        config = settings_of(cls, kind, settings=known, where="--set")
    except ConfigError as error:
        if known:
            raise
        if not _only_missing(error):
            said = f"its defaults are invalid: {error}"
            return _one(kind.name, cls.name, check="builds", status="failed", message=said)
        said = f"its defaults are not enough: {error} Give settings with --set KEY=VALUE."
        return _one(kind.name, cls.name, check="conformance", status="skipped", message=said)

    if kind.name in CONNECTS and not given.connects:
        said = f"it may use the network: prime-rl plugins check {cls.name} runs its checks"
        return _one(kind.name, cls.name, check="conformance", status="skipped", message=said)

    built = run(builds, kind.name, cls, config)
    if built.status != "passed":
        return Report(kind.name, cls.name, (built,))
    if kind is not ALGORITHM:
        return check_offer(kind.name, cls, config)
    try:
        return conformance(cls(config))
    except ConfigError as error:
        said = (
            f"it refuses the kit's rollouts: {error} Call prime_rl.testing.check_algorithm with a "
            "make_group of your own in your tests."
        )
        return _one(kind.name, cls.name, check="conformance", status="skipped", message=said)


def _only_missing(error: ConfigError) -> bool:
    """Whether the only fault is that required settings are missing: no default is invalid."""
    cause = error.__cause__
    errors = cause.errors() if isinstance(cause, ValidationError) else []
    return all(each["type"] == "missing" or not each["loc"] for each in errors)


def _engine(cls: type[Any], settings: Mapping[str, Any], by_name: bool) -> Report:
    from prime_rl_devkit.engines.bench import Bench, not_started

    return Bench(cls, settings, "--set").report() if by_name else not_started(cls)


def _one(kind: str, name: str, check: str, status: CheckStatus, message: str) -> Report:
    return Report(kind, name, (Outcome(check, "", status=status, message=message),))
