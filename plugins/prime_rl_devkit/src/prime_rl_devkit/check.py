"""``prime-rl plugins check``: check installed plugins, or a package folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError, PluginError
from prime_rl.plugins import manager
from prime_rl.plugins.manager import GROUPS, Hooks, Origin, add_entry, installed_entries
from prime_rl.plugins.offers import ALGORITHM, ENGINE, Kind, Offered, settings_of
from prime_rl.testing.conformance import conformance
from prime_rl.testing.report import Outcome, Report, Status
from prime_rl_devkit.facts import described, offers_by_plugin
from prime_rl_devkit.kinds import BY_KIND, check_offer

HEAVY = ("torch", "transformers", "verifiers", "renderers")


def check(target: str | None, settings: Mapping[str, Any]) -> list[Report]:
    """Reports of one plugin, one class it offers, a package folder, or everything installed.

    Raises ``ConfigError`` for an unknown target or invalid settings.
    """
    if target is not None and _is_path(target):
        return _check_folder(Path(target), settings)
    try:
        loaded = [manager.load_plugins(group) for group in GROUPS]
    except PluginError as error:
        return [_one("plugins", "installed", "loads", "failed", str(error))]
    if target is not None:
        described(target)  # raises for an unknown one, with the nearest names
    _check_keys(settings, [offer for hooks in loaded for offer in _chosen(hooks, target)])
    return [r for hooks in loaded for r in _check_hooks(hooks, target, settings, [])]


def _chosen(hooks: Hooks, target: str | None) -> list[Offered[Any]]:
    """The classes that ``target`` names."""
    offers = [(name, each) for name, own in offers_by_plugin(hooks).items() for _, each in own]
    return [
        offered
        for name, offered in offers
        if _is_whole(target, name, offered.source) or target == offered.cls.name
    ]


def _is_whole(target: str | None, plugin: str, source: Origin) -> bool:
    """Whether ``target`` means everything that a plugin offers."""
    package = source.distribution.replace("-", "_")
    return target in (None, plugin, source.distribution, package)


def _check_keys(settings: Mapping[str, Any], offers: Sequence[Offered[Any]]) -> None:
    """Each class gets the settings that it has; one that no class has is refused."""
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


def _check_folder(folder: Path, settings: Mapping[str, Any]) -> list[Report]:
    name, version, groups = read_project(folder)
    source = folder / "src" if (folder / "src").is_dir() else folder
    sys.path.insert(0, str(source.resolve()))
    reports: list[Report] = []
    loaded: list[Hooks] = []
    for group, entries in groups.items():
        hooks = Hooks(group)
        try:
            for plugin, value in entries.items():
                add_entry(hooks, EntryPoint(plugin, value, group), Origin(plugin, name, version))
            offers_by_plugin(hooks)
            loaded.append(hooks)
        except PluginError as error:
            reports.append(_one("plugin", name, "loads", "failed", str(error)))
    if not reports:
        _check_keys(settings, [offer for hooks in loaded for offer in _chosen(hooks, None)])
    for hooks in loaded:
        reports += _check_hooks(hooks, None, settings, [*groups[hooks.group].values()])
    return reports


def read_project(folder: Path) -> tuple[str, str, dict[str, dict[str, str]]]:
    """Name, version and entry points of prime-rl of a package folder. Raises ``ConfigError``."""
    path = folder / "pyproject.toml"
    if not path.exists():
        raise ConfigError(f"{folder}: expected a package folder with a pyproject.toml, found none")
    try:
        project = tomllib.loads(path.read_text()).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    points = project.get("entry-points", {})
    groups = {group: points[group] for group in GROUPS if points.get(group)}
    if not groups:
        raise ConfigError(
            f"{path}: no entry points under {' or '.join(map(repr, GROUPS))}, so no "
            "plugin would be loaded. Add [project.entry-points.prime_rl] with a line: my_plugin = "
            '"my_module"'
        )
    return str(project.get("name", folder.name)), str(project.get("version", "")), groups


def _check_hooks(
    hooks: Hooks, target: str | None, settings: Mapping[str, Any], values: list[str]
) -> Iterator[Report]:
    offers = offers_by_plugin(hooks)
    modules = {e.name: e.value for e in installed_entries(hooks.group)}
    for index, (name, source) in enumerate(hooks.sources.items()):
        whole = _is_whole(target, name, source)
        chosen = [(k, o) for k, o in offers.get(name, ()) if whole or o.cls.name == target]
        if whole:
            value = values[index] if values else modules.get(name, "")
            yield _package(name, value, chosen)
        for kind, offered in chosen:
            if kind is ENGINE:
                yield _engine(offered.cls, settings, by_name=target is not None)
            elif not whole or kind is ALGORITHM or kind.name in BY_KIND:
                yield _offer(kind, offered, settings)


def _package(name: str, value: str, offers: Sequence[tuple[Kind[Any], Offered[Any]]]) -> Report:
    return Report("plugin", name, (_loads(), _light(value), _documented(offers)))


def _loads() -> Outcome:
    promise = "It imports, keeps the contract, and has names of its own."
    return Outcome("loads", promise, "passed")  # otherwise load_plugins has raised


def _light(value: str) -> Outcome:
    promise = "Importing it imports nothing heavy: plugins list answers in under a second."
    code = (
        f"import sys, importlib; importlib.import_module({value.partition(':')[0]!r})\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    heavy = ", ".join(done.stdout.split())
    if not heavy:
        return Outcome("light_import", promise, "passed")
    said = f"importing {value} imports {heavy}. Import it inside the function that needs it."
    return Outcome("light_import", promise, "failed", said)


def _documented(offers: Sequence[tuple[Kind[Any], Offered[Any]]]) -> Outcome:
    promise = "Every class and every setting has a docstring."
    missing = []
    for _, offered in offers:
        cls = offered.cls
        if not vars(cls).get("__doc__"):
            missing.append(f"class {cls.__qualname__}")
        for key, field in cls.config_class.model_fields.items():
            if not field.description:
                missing.append(f"{cls.config_class.__qualname__}.{key}")
    if not missing:
        return Outcome("documented", promise, "passed")
    said = f"no docstring: {', '.join(dict.fromkeys(missing))}. Put a string below it."
    return Outcome("documented", promise, "failed", said)


def _offer(kind: Kind[Any], offered: Offered[Any], settings: Mapping[str, Any]) -> Report:
    cls = offered.cls
    known = {k: v for k, v in settings.items() if k in cls.config_class.model_fields}
    try:
        config = settings_of(cls, kind, known, "--set")
    except ConfigError as error:
        if known:
            raise
        said = f"its defaults are not enough: {error} Give settings with --set KEY=VALUE."
        return _one(kind.name, cls.name, "conformance", "skipped", said)
    if kind is not ALGORITHM:
        return check_offer(kind.name, cls, config)
    try:
        return conformance(cls(config))
    except ConfigError as error:
        said = (
            f"it refuses the kit's rollouts: {error} Call prime_rl.testing.check_algorithm with a "
            "make_group of your own in your tests."
        )
        return _one(kind.name, cls.name, "conformance", "skipped", said)


def _engine(cls: type[Any], settings: Mapping[str, Any], by_name: bool) -> Report:
    from prime_rl_devkit.engines.bench import Bench, not_started

    return Bench(cls, settings, "--set").report() if by_name else not_started(cls)


def _one(kind: str, name: str, check: str, status: Status, message: str) -> Report:
    return Report(kind, name, (Outcome(check, "", status, message),))
