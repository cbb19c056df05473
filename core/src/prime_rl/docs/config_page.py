"""``docs/config.md``: every key of the TOML, and of the plugins that come with ``prime-rl``.

Reads the JSON schema pydantic makes of each model: types, bounds, defaults and field docs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires
from typing import Any

from pydantic import BaseModel

from prime_rl.config.run import RunConfig
from prime_rl.docs.markdown import GENERATED, one_line, plain, table
from prime_rl.plugins.manager import GROUPS, load_plugins
from prime_rl.plugins.offers import KINDS, Kind, Offered, collect

Schema = Mapping[str, Any]

META = "prime-rl"
"""The distribution whose requirements are documented; what else is installed is not ours to say."""

TABLES = {
    "algorithm": '[orchestrator.algo] type = "{}"',
    "filter": '[[orchestrator.post_batch_filters]] type = "{}"',
    "renderer": '[orchestrator.renderer] name = "{}"',
    "sampler": '[orchestrator.sampler] type = "{}"',
    "source": '[orchestrator.algo.sampling.source] type = "{}"',
    "engine": "[inference.{}]",
    "monitor": "[monitors.{}]",
    "model": '[model] name = "{}"',
    "launcher": '[launcher] type = "{}"',
    "loss": '[trainer.loss] type = "{}"',
}
"""The table that holds an offer's settings, by kind."""

TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "object": "table",
    "null": "None",
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

INTRODUCTION = """\
One TOML describes a run. Several compose left to right (tables merge key by key, lists are
replaced whole), and `--dotted.key value` overrides come last; a number in the path names an entry
of a list. Unknown keys are errors. `--dry-run` validates and writes the resolved config without
training."""

PLUGINS = """\
A table that selects a plugin's class also holds that class's settings. These classes come with
`prime-rl`, or with the distribution that is named."""


def config_page() -> str:
    """The whole page."""
    schema = RunConfig.model_json_schema()
    parts = ["# Configuration", GENERATED.format(source="the pydantic models"), INTRODUCTION]
    for name, paths in tables_of(schema).items():
        parts.append(_section(schema["$defs"].get(name, schema), paths))
    parts += ["## Settings of plugins", PLUGINS, *_plugin_sections()]
    return "\n\n".join(parts) + "\n"


def tables_of(schema: Schema) -> dict[str, list[str]]:
    """Every model of the schema with the tables it validates, parents first, short paths first."""
    found: dict[str, list[str]] = {"RunConfig": ["Top level"]}
    for name, path in _walk(schema, schema["$defs"], ""):
        found.setdefault(name, []).append(path)
    return {name: sorted(paths, key=len) for name, paths in found.items()}


def _walk(model: Schema, models: Schema, prefix: str) -> Iterator[tuple[str, str]]:
    for key, prop in model.get("properties", {}).items():
        for name, is_list in _models_in(prop):
            path = f"{prefix}{key}"
            yield name, f"`[[{path}]]`" if is_list else f"`[{path}]`"
            yield from _walk(models[name], models, f"{path}.")


def _models_in(prop: Schema, is_list: bool = False) -> Iterator[tuple[str, bool]]:
    """The models a property may hold, and whether in a list."""
    if "$ref" in prop:
        yield prop["$ref"].rpartition("/")[2], is_list
    for choice in (*prop.get("anyOf", ()), *prop.get("oneOf", ())):
        yield from _models_in(choice, is_list)
    if "items" in prop:
        yield from _models_in(prop["items"], True)


def _section(model: Schema, paths: list[str]) -> str:
    first, *others = paths
    about = re.sub(r"^`\[[^:]*(: |$)", "", plain(model.get("description")))
    also = f"Also {', '.join(others)}." if others else ""
    return _join(f"## {first}", about[:1].upper() + about[1:], also, keys_table(model))


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def keys_table(model: Schema) -> str:
    """Key, type, default and doc of every key."""
    required = model.get("required", ())
    rows = [
        (f"`{key}`", type_name(prop), _default(prop, key in required), _doc(prop))
        for key, prop in model.get("properties", {}).items()
    ]
    return table(("key", "type", "default", "what"), rows) if rows else "No settings."


def _default(prop: Schema, required: bool) -> str:
    if required:
        return "required"
    return "its own" if "$ref" in prop else f"`{toml(prop.get('default'))}`"


def _doc(prop: Schema) -> str:
    return one_line(prop.get("description"))


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


def _plugin_sections() -> Iterator[str]:
    """One section a settings class; offers that share theirs share a section."""
    ours = _documented()
    for kind in KINDS:
        shared: dict[tuple[type[BaseModel], str], list[str]] = {}
        for name, offered in _offers(kind).items():
            if ours is None or offered.source.distribution in ours:
                key = (offered.cls.config_class, offered.source.distribution)
                shared.setdefault(key, []).append(name)
        for (model, distribution), names in shared.items():
            yield _plugin_section(kind, names, model, distribution)


def _offers(kind: Kind[Any]) -> dict[str, Offered[Any]]:
    """From both groups: a kind is offered in one of them only."""
    found: dict[str, Offered[Any]] = {}
    for group in GROUPS:
        found |= collect(load_plugins(group), kind)
    return found


def _documented() -> set[str] | None:
    """What ``META`` requires or knows of; None, for everything, where it is not installed."""
    try:
        named = requires(META) or []
    except PackageNotFoundError:
        return None
    known = {entry.value.replace("_", "-") for entry in entry_points(group="prime_rl.known")}
    return known | {re.split(r"[\s\[<>=!~;]", each, maxsplit=1)[0] for each in named}


def _plugin_section(
    kind: Kind[Any], names: list[str], model: type[BaseModel], distribution: str
) -> str:
    schema = model.model_json_schema()
    title = ", ".join(f"`{name}`" for name in names)
    where = TABLES[kind.name].format(names[0] if len(names) == 1 else "<name>")
    passes_on = plain(model.__doc__) if schema.get("additionalProperties") is True else ""
    head = kind.name if len(names) == 1 else kind.plural
    return _join(
        f"### {head.capitalize()} {title}",
        f"`{where}`, from `{distribution}`.",
        passes_on or keys_table(schema),
        *_inner_tables(schema),
    )


def _inner_tables(schema: Schema) -> Iterator[str]:
    """The tables inside a plugin's own table, each model once."""
    models, seen = schema.get("$defs", {}), set()
    for name, path in _walk(schema, models, ""):
        if name not in seen and models[name].get("properties"):
            seen.add(name)
            yield f"Its table {path}:\n\n{keys_table(models[name])}"
