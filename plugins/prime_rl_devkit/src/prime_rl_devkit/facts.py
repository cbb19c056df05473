"""Facts about plugins that need no run: origin, offered classes and their settings."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

from prime_rl import Loss
from prime_rl.entries import entries, misspelt_groups
from prime_rl.errors import ConfigError, PluginError
from prime_rl.registry.checks import marked_hooks
from prime_rl.registry.components import Component
from prime_rl.registry.manager import (
    CONTRACT,
    GROUPS,
    Hooks,
    Origin,
    add_entry,
    contract_of,
    core_misfit,
    disabled_names,
    source_of,
)
from prime_rl.registry.offers import KINDS, Kind, Offered, collect
from prime_rl_devkit.limits import SECONDS, time_limit

Row = dict[str, Any]
Schema = Mapping[str, Any]

TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "object": "table",
    "null": "None",
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass
class Plugin:
    """An installed plugin. Each has a manager of its own, so that a broken one hides no other."""

    entry: EntryPoint
    source: Origin
    hooks: Hooks
    offers: list[tuple[Kind[Any], Offered[Any]]] = field(default_factory=list)
    error: str | None = None
    """Why the plugin is broken; None if it works."""

    @property
    def row(self) -> Row:
        """What the list and the full description have in common."""
        impls = [
            (caller.name, impl)
            for caller in self.hooks.get_hookcallers(self.hooks.get_plugin(self.entry.name)) or ()
            for impl in caller.get_hookimpls()
            if not caller.name.startswith("register_")
        ]
        return {
            "plugin": self.entry.name,
            "distribution": self.source.distribution,
            "version": self.source.version,
            "group": self.entry.group,
            "contract": contract_of(self.entry, self.hooks.get_plugin(self.entry.name)),
            "implements": sorted(name for name, impl in impls if not impl.wrapper),
            "wraps": sorted(name for name, impl in impls if impl.wrapper),
            "error": self.error,
        }


def load(entry: EntryPoint, source: Origin, limit: float = SECONDS) -> Plugin:
    """Import one plugin; ``limit`` is in seconds. What is wrong with it is in ``error``."""
    plugin = Plugin(entry, source, Hooks(entry.group))
    try:
        with time_limit(limit):
            add_entry(plugin.hooks, entry, source)
            plugin.offers = offers_by_plugin(plugin.hooks).get(entry.name, [])
    except PluginError as error:
        plugin.error = str(error)

    if plugin.error is None:
        misfit = core_misfit((entry.dist and entry.dist.requires) or [])
        plugin.error = f"plugin {source}: {misfit}" if misfit else None
    return plugin


def installed(limit: float = SECONDS) -> Iterator[Plugin]:
    """Every plugin of both entry-point groups, broken ones and those of a misspelt group
    included."""
    disabled_names()  # an unknown name is an error
    for group in GROUPS:
        taken: dict[tuple[str, str], Origin] = {}
        for entry in entries(group):
            plugin = load(entry, source_of(entry), limit)
            names = [("plugin", entry.name), *((k.name, o.cls.name) for k, o in plugin.offers)]
            for what in names:
                first = taken.setdefault(what, plugin.source)
                if first is not plugin.source:
                    plugin.error = (
                        f"{what[0]} {what[1]!r} is also brought by plugin {first}. Uninstall one, "
                        f"or list {plugin.source.distribution!r} under plugins.disabled."
                    )
            yield plugin

    for misspelt in misspelt_groups():
        for entry in misspelt.entries:
            yield Plugin(entry, source_of(entry), Hooks(), error=str(misspelt))


def offers_by_plugin(hooks: Hooks) -> dict[str, list[tuple[Kind[Any], Offered[Any]]]]:
    """The classes that each plugin of a group registers. Raises ``PluginError``."""
    offers: dict[str, list[tuple[Kind[Any], Offered[Any]]]] = {}
    for kind in KINDS:
        for offered in collect(hooks, kind).values():
            offers.setdefault(offered.source.plugin, []).append((kind, offered))
    return offers


def inventory() -> list[Row]:
    """One entry per installed plugin, with the names of its offers."""
    rows = []
    for plugin in installed():
        names: dict[str, list[str]] = {}
        for kind, offered in plugin.offers:
            names.setdefault(kind.plural, []).append(offered.cls.name)
        rows.append(plugin.row | {"offers": names})
    return rows


def described(name: str) -> list[Row]:
    """Everything about the plugins called ``name``: an entry point, a distribution, or an offered
    class. Raises ``ConfigError`` if there is none."""
    plugins = [*installed()]
    matching = [
        plugin
        for plugin in plugins
        if name in (plugin.entry.name, plugin.source.distribution)
        or name == plugin.source.distribution.replace("-", "_")
    ]
    if not matching:
        for plugin in plugins:
            offers = [each for each in plugin.offers if each[1].cls.name == name]
            matching += [replace(plugin, offers=offers)] if offers else []

    if not matching:
        raise ConfigError(_unknown(name, plugins))
    return [_described(plugin) for plugin in matching]


def _unknown(name: str, plugins: Sequence[Plugin]) -> str:
    names = sorted({plugin.entry.name for plugin in plugins})
    offered = [offer.cls.name for plugin in plugins for _, offer in plugin.offers]
    close = difflib.get_close_matches(name, [*names, *offered], n=1)
    way_out = f"Did you mean {close[0]!r}?" if close else f"Plugins: {', '.join(names)}."
    return f"no installed plugin is called {name!r} or offers anything of that name. {way_out}"


def _described(plugin: Plugin) -> Row:
    module = plugin.hooks.get_plugin(plugin.entry.name)
    try:
        file = inspect.getfile(module if inspect.ismodule(module) else type(module))
    except TypeError:  # broken, or not from a file
        file = ""

    dist = plugin.entry.dist
    ours = ("prime-rl-core", CONTRACT)
    needs = [each for each in (dist and dist.requires) or () if each.startswith(ours)]
    return plugin.row | {
        "summary": (dist and dist.metadata["Summary"]) or "",
        "requires": "; ".join(needs),
        "entry_point": plugin.entry.value,
        "file": file,
        "offers": [_offer(kind, each) for kind, each in plugin.offers],
    }


def _offer(kind: Kind[Any], offered: Offered[Any]) -> Row:
    cls = offered.cls
    key = kind.key
    return {
        "kind": kind.name,
        "name": cls.name,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "doc": " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()),
        # The TOML that selects it.
        "select": f"[{key.replace('<name>', cls.name)}]"
        if "<name>" in key
        else f'{key} = "{cls.name}"',
        "declares": _declares(kind, cls),
        "hooks": marked_hooks(cls),
        "settings": settings(cls.config_class),
    }


def _declares(kind: Kind[Any], cls: type[Any]) -> Row:
    """Class attributes of the contract whose values differ from the base class; all of a loss."""
    declared = [key for key in kind.base.__annotations__ if key not in ("name", "config_class")]
    values = {key: getattr(cls, key, None) for key in declared}
    changed = {k: v for k, v in values.items() if v != getattr(kind.base, k, None)}
    if issubclass(cls, Loss):
        changed = values | {"scope": Component(cls.name, cls).scope}
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in changed.items()}


def settings(model: Any) -> list[Row]:
    """Key, type, default and doc of every setting; a required setting has the default None."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {
            "key": key,
            "type": type_name(prop).replace("`", ""),
            "required": key in required,
            "default": prop.get("default"),
            "doc": " ".join(prop.get("description", "").replace("``", "`").split()),
        }
        for key, prop in schema.get("properties", {}).items()
    ]


def type_name(prop: Schema) -> str:
    """A property's type in words: ``int > 0``, ``"zmq" or "filesystem"``, ``list of tables``."""
    if "$ref" in prop:
        return "table"
    choices = prop.get("anyOf", prop.get("oneOf"))
    if choices:
        return " or ".join(dict.fromkeys(type_name(choice) for choice in choices))
    if "enum" in prop or "const" in prop:
        return " or ".join(f"`{toml(each)}`" for each in prop.get("enum", [prop.get("const")]))
    if prop.get("type") == "array":
        return f"list of {type_name(prop['items'])}s" if "items" in prop else "list"
    bounds = ", ".join(f"{sign} {prop[name]:g}" for name, sign in BOUNDS.items() if name in prop)
    return f"{TYPES.get(prop.get('type', ''), 'any')} {bounds}".strip()


def toml(value: Any) -> str:
    """A JSON value as TOML writes it; null is ``None``."""
    if value is None:
        return "None"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)
