"""Facts about plugins that need no run: origin, offered classes and their settings."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires
from typing import Any

from prime_rl.errors import ConfigError
from prime_rl.plugins import manager
from prime_rl.plugins.checks import CONTRACT_VERSION, marked_hooks
from prime_rl.plugins.manager import GROUPS, Hooks, Origin, installed_entries
from prime_rl.plugins.offers import KINDS, Kind, Offered, collect

Row = dict[str, Any]

CORE = "prime-rl-core"

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


def inventory() -> list[Row]:
    """One entry per plugin of both entry-point groups, with the names of its offers."""
    return [row for group in GROUPS for row in _of_group(manager.load_plugins(group))]


def _of_group(hooks: Hooks) -> list[Row]:
    offers = offers_by_plugin(hooks)
    rows = []
    for name, source in hooks.sources.items():
        names: dict[str, list[str]] = {}
        for kind, offered in offers.get(name, ()):
            names.setdefault(kind.plural, []).append(offered.cls.name)
        implements, wraps = _hooks_of(hooks, name)
        rows.append(
            {
                "plugin": name,
                "distribution": source.distribution,
                "version": source.version,
                "group": hooks.group,
                "offers": names,
                "implements": implements,
                "wraps": wraps,
            }
        )
    return rows


def offers_by_plugin(hooks: Hooks) -> dict[str, list[tuple[Kind[Any], Offered[Any]]]]:
    """The classes that each plugin of a group registers."""
    found: dict[str, list[tuple[Kind[Any], Offered[Any]]]] = {}
    for kind in KINDS:
        for offered in collect(hooks, kind).values():
            found.setdefault(offered.source.plugin, []).append((kind, offered))
    return found


def _hooks_of(hooks: Hooks, name: str) -> tuple[list[str], list[str]]:
    """The hooks that a plugin implements beyond registration, and those that it wraps."""
    implements: list[str] = []
    wraps: list[str] = []
    for caller in hooks.get_hookcallers(hooks.get_plugin(name)) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == name and not caller.name.startswith("register_"):
                (wraps if impl.wrapper or impl.hookwrapper else implements).append(caller.name)
    return sorted(implements), sorted(wraps)


def described(name: str) -> list[Row]:
    """Everything about the plugins called ``name``: an entry point, a distribution, or an offered
    class. Raises ``ConfigError`` if there is none."""
    rows = [row for group in GROUPS for row in _described_group(manager.load_plugins(group))]
    found = [*_matching(rows, name)]
    if not found:
        raise ConfigError(_unknown(name, rows))
    return found


def _matching(rows: Sequence[Row], name: str) -> Iterator[Row]:
    named = [row for row in rows if name in _names(row)]
    if named:
        yield from named
        return
    for row in rows:
        offers = [offer for offer in row["offers"] if offer["name"] == name]
        if offers:
            yield row | {"offers": offers}


def _names(row: Row) -> set[str]:
    distribution = row["distribution"]
    return {row["plugin"], distribution, distribution.replace("-", "_")}


def _unknown(name: str, rows: Sequence[Row]) -> str:
    plugins = sorted({row["plugin"] for row in rows})
    known = [*plugins, *(offer["name"] for row in rows for offer in row["offers"])]
    close = difflib.get_close_matches(name, known, n=1)
    way_out = f"Did you mean {close[0]!r}?" if close else f"Plugins: {', '.join(plugins)}."
    return f"no installed plugin is called {name!r} or offers anything of that name. {way_out}"


def _described_group(hooks: Hooks) -> list[Row]:
    entries = {entry.name: entry for entry in installed_entries(hooks.group)}
    offers = offers_by_plugin(hooks)
    rows = []
    for name, source in hooks.sources.items():
        plugin = hooks.get_plugin(name)
        implements, wraps = _hooks_of(hooks, name)
        rows.append(
            {
                "plugin": name,
                **_origin(source),
                "contract": getattr(plugin, "prime_rl_contract", CONTRACT_VERSION),
                "group": hooks.group,
                "entry_point": entries[name].value if name in entries else "",
                "file": _file(plugin),
                "offers": [_offer(kind, each) for kind, each in offers.get(name, ())],
                "implements": implements,
                "wraps": wraps,
            }
        )
    return rows


def _origin(source: Origin) -> Row:
    try:
        summary = metadata(source.distribution)["Summary"] or ""
        needs = [each for each in requires(source.distribution) or [] if each.startswith(CORE)]
    except PackageNotFoundError:
        summary, needs = "", []
    return {
        "distribution": source.distribution,
        "version": source.version,
        "summary": summary,
        "requires": "; ".join(needs),
    }


def _file(plugin: object) -> str:
    try:
        return inspect.getfile(plugin if inspect.ismodule(plugin) else type(plugin))
    except TypeError:
        return ""


def _offer(kind: Kind[Any], offered: Offered[Any]) -> Row:
    cls = offered.cls
    return {
        "kind": kind.name,
        "name": cls.name,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "doc": " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()),
        "select": _select(kind, cls.name),
        "declares": _declares(kind, cls),
        "hooks": marked_hooks(cls),
        "settings": settings(cls.config_class),
    }


def _select(kind: Kind[Any], name: str) -> str:
    """The TOML that selects it."""
    if "<name>" in kind.key:
        return f"[{kind.key.replace('<name>', name)}]"
    return f'{kind.key} = "{name}"'


def _declares(kind: Kind[Any], cls: type[Any]) -> Row:
    """Class attributes of the contract whose values differ from the base class."""
    declared = [key for key in kind.base.__annotations__ if key not in ("name", "config_class")]
    found = {key: getattr(cls, key, None) for key in declared}
    changed = {k: v for k, v in found.items() if v != getattr(kind.base, k, None)}
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


def default_text(row: Row) -> str:
    """A setting's default in TOML notation."""
    if row["required"]:
        return "required"
    return "none" if row["default"] is None else json.dumps(row["default"])


def type_name(prop: Schema) -> str:
    """A property's type in words: ``int > 0``, ``"zmq" or "filesystem"``, ``list of tables``."""
    if "$ref" in prop:
        return "table"
    if choices := prop.get("anyOf", prop.get("oneOf")):
        return " or ".join(dict.fromkeys(type_name(choice) for choice in choices))
    if "enum" in prop or "const" in prop:
        return " or ".join(f"`{toml(each)}`" for each in prop.get("enum", [prop.get("const")]))
    if prop.get("type") == "array":
        return f"list of {type_name(prop['items'])}s"
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
