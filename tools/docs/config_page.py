"""``docs/config.md``: every key of the TOML, and of the plugins that come with ``prime-rl``.

It reads pydantic's JSON schema of each model: types, bounds, defaults and field docs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from tools.docs.config_examples import example
from tools.docs.markdown import GENERATED, one_line, plain, table

from prime_rl.config.run import RunConfig
from prime_rl.registry.manager import GROUPS, load_plugins
from prime_rl.registry.offers import KINDS, Kind, Offered, collect
from prime_rl_app.config import installed_defaults
from prime_rl_app.sft import SftConfig
from prime_rl_devkit.facts import Schema, toml, type_name

META = "prime-rl"
"""The distribution whose requirements are documented. Other installed plugins are not."""

TABLES = {
    "algorithm": '[orchestrator.algo] type = "{}"',
    "filter": '[[orchestrator.post_batch_filters]] type = "{}"',
    "renderer": '[orchestrator.renderer] name = "{}"',
    "sampler": '[orchestrator.sampler] type = "{}"',
    "source": '[orchestrator.algo.sampling.source] type = "{}"',
    "engine": "[inference.{}]",
    "monitor": "[monitors.{}]",
    "observer": "[observers.{}]",
    "model": '[model] name = "{}"',
    "launcher": '[launcher] type = "{}"',
    "view": '[view] type = "{}"',
    "loss": '[trainer.loss] type = "{}"',
    "head": "[trainer.heads.{}]",
    "trainer_observer": "[trainer.{}]",
    "tuning": "[trainer.{}]",
    "optimizer": '[trainer.optim] type = "{}"',
    "kernel": '[trainer] attention = "{}"',
    "weight_transport": '[weight_broadcast] type = "{}"',
}
"""The table with a plugin class's settings, by kind."""

ABOUT = {
    "PluginsConfig": "Which installed plugins the run loads.",
    "OrchestratorConfig": "Rollouts: how they are sampled, scored, filtered and batched.",
    "TrainConfig": "What rollouts are trained on, and how they are sampled.",
    "EvalConfig": "Held-out evaluations between steps.",
    "TrainerConfig": "How a batch becomes an optimizer step.",
    "LogConfig": "The logs of the run's processes.",
    "RunDirConfig": "The name of the run directory.",
}
"""What a table without a docstring is for, by its model."""

INTRODUCTION = """\
A TOML file describes a run. Several files compose from left to right: tables merge key by key,
lists are replaced as a whole. They override the defaults of the distribution `prime-rl`, and
`--dotted.key value` overrides them; a number in the path selects an entry of a list.
Unknown keys are errors. `--dry-run` validates and writes the resolved config without
training.

The block below each table has all of its keys: at their defaults, or at an example where there
is no default."""

PLUGINS = """\
A table that selects a plugin's class also has that class's settings. These classes come with
`prime-rl`, or with the named distribution."""


def config_page() -> str:
    """The whole page."""
    schema = RunConfig.model_json_schema()
    parts = ["# Configuration", GENERATED.format(source="the pydantic models"), INTRODUCTION]
    for name, paths in tables_of(schema).items():
        model = schema["$defs"].get(name, schema)
        parts.append(_section(model, schema["$defs"], paths, defaults_at(paths[0])))
    sft = SftConfig.model_json_schema()
    parts.append(_section(sft, sft.get("$defs", {}), ["`[sft]`"], {}))
    parts += ["## Settings of plugins", PLUGINS, *_plugin_sections()]
    return "\n\n".join(parts) + "\n"


def tables_of(schema: Schema) -> dict[str, list[str]]:
    """Every model of the schema with the tables it validates, parents and short paths first."""
    tables: dict[str, list[str]] = {"RunConfig": ["Top level"]}
    for name, path in _walk(schema, schema["$defs"], ""):
        paths = tables.setdefault(name, [])
        if path not in paths:
            paths.append(path)
    return {name: sorted(paths, key=len) for name, paths in tables.items()}


def defaults_at(path: str) -> Schema:
    """The installed defaults of a table. A table in a list has none."""
    table: Any = installed_defaults()
    if path == "Top level":
        return dict(table)
    for key in path.strip("`[]").split("."):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _walk(model: Schema, models: Schema, prefix: str) -> Iterator[tuple[str, str]]:
    for key, prop in model.get("properties", {}).items():
        tables = prop.get("additionalProperties")
        named = tables if isinstance(tables, dict) else {}
        for name, is_list in (*_models_in(prop), *_models_in(named)):
            path = f"{prefix}{key}.<name>" if named else f"{prefix}{key}"
            yield name, f"`[[{path}]]`" if is_list else f"`[{path}]`"
            yield from _walk(models[name], models, f"{path}.")
        if isinstance(values := prop.get("additionalProperties"), dict):
            yield from ((name, f"`[{prefix}{key}.<name>]`") for name, _ in _models_in(values))


def _models_in(prop: Schema, is_list: bool = False) -> Iterator[tuple[str, bool]]:
    """The models of a property, and whether they are in a list."""
    if "$ref" in prop:
        yield prop["$ref"].rpartition("/")[2], is_list
    for choice in (*prop.get("anyOf", ()), *prop.get("oneOf", ())):
        yield from _models_in(choice, is_list)
    if "items" in prop:
        yield from _models_in(prop["items"], True)


def _section(model: Schema, models: Schema, paths: list[str], defaults: Schema) -> str:
    first, *others = paths
    also = f"Also {', '.join(others)}." if others else ""
    header = "" if first == "Top level" else first.strip("`")
    keys = keys_table(model, models, defaults)
    return _join(f"## {first}", _about(model), also, keys, example(header, model, defaults))


def _about(model: Schema) -> str:
    about = re.sub(r"^`\[[^:]*(: |$)", "", plain(model.get("description")))
    about = about or ABOUT.get(model["title"], "")
    return about[:1].upper() + about[1:]


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def keys_table(model: Schema, models: Schema, defaults: Schema = MappingProxyType({})) -> str:
    """Key, type, default (from the installed ``defaults``, else the model) and doc of every key.
    ``models``: those of the tables in it, by name."""
    required = model.get("required", ())

    def laid(key: str, prop: Schema) -> Schema:
        return {**prop, "default": defaults[key]} if key in defaults else prop

    rows = [
        (
            f"`{key}`",
            type_name(prop),
            _default(laid(key, prop), key in required),
            _doc(prop, models),
        )
        for key, prop in model.get("properties", {}).items()
    ]
    return table(("key", "type", "default", "what"), rows) if rows else "No settings."


def _default(prop: Schema, required: bool) -> str:
    if required:
        return "required"
    return "its own" if "$ref" in prop else f"`{toml(prop.get('default'))}`"


def _doc(prop: Schema, models: Schema) -> str:
    """A field's own doc, else the purpose of its table or the place of its keys."""
    if "description" in prop:
        return one_line(prop["description"])
    if "const" in prop:
        return "Selects these settings."
    about = " ".join(_about(models[name]) for name, _ in _models_in(prop))
    first = one_line(about).partition(". ")[0].rstrip(".")
    return f"{first}." if first else ""


def _plugin_sections() -> Iterator[str]:
    """One section per settings class. Plugin classes with the same settings share a section."""
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
    """Plugin classes of both entry-point groups."""
    offers: dict[str, Offered[Any]] = {}
    for group in GROUPS:
        offers |= collect(load_plugins(group), kind)
    return offers


def _documented() -> set[str] | None:
    """The distributions that ``META`` requires or knows. None (all) if it is not installed."""
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
    selected = TABLES[kind.name].format(names[0])
    passes_on = plain(model.__doc__) if schema.get("additionalProperties") is True else ""
    head = (kind.name if len(names) == 1 else kind.plural).replace("_", " ")
    return _join(
        f"### {head.capitalize()} {title}",
        f"`{where}`, from `{distribution}`.",
        passes_on or keys_table(schema, schema.get("$defs", {})),
        "" if passes_on else example(selected, schema, {}),
        *_inner_tables(schema, selected),
    )


def _inner_tables(schema: Schema, selected: str) -> Iterator[str]:
    """The tables inside a plugin's table, each model once. ``selected``: the plugin's table."""
    outer = selected.partition("]")[0].strip("[")
    models, seen = schema.get("$defs", {}), set()
    for name, path in _walk(schema, models, ""):
        if name not in seen and models[name].get("properties"):
            seen.add(name)
            keys = keys_table(models[name], models)
            inner = path.strip("`")
            table = inner.strip("[]")
            header = inner.replace(table, f"{outer}.{table}")
            block = example(header, models[name], {})
            if outer != selected.strip("[]"):
                # Alone, it would not say whose table it is.
                chosen = selected.replace("] ", "]\n")
                block = block.replace("```toml\n", f"```toml\n{chosen}\n\n", 1)
            yield _join(f"Its table {path}:", keys, block)
