"""From a command line of ``prime-rl serve`` to checked settings. No process starts here."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl import Engine
from prime_rl.errors import ConfigError
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import ENGINE, collect, select, settings_of
from prime_rl.rundir.machine import free_ports
from prime_rl.rundir.rows import read_table
from prime_rl_app.api import Run
from prime_rl_app.config import installed_defaults, parse_overrides, set_at
from prime_rl_app.models import build_model_maker
from prime_rl_app.run_states import LATEST, find_run
from prime_rl_tools.commands.options import OUTPUTS, validated
from prime_rl_tools.serve.settings import EngineTable, ServeSettings

PORT = 8000
"""Tried first if no port is set."""


def read_settings(
    model: str, overrides: Sequence[str], options: Mapping[str, Any]
) -> ServeSettings:
    """The command line over the installed defaults, checked with the plugins loaded. Raises
    ``ConfigError``."""
    for word in (model, *overrides[:1]):
        if word.startswith("-") is (word is model):
            raise ConfigError(f"{word!r}: expected one MODEL, then options")

    defaults = installed_defaults()
    below = defaults.pop("inference", {})
    known = defaults | below | options
    table = {key: value for key, value in known.items() if key in ServeSettings.model_fields}
    keys = (*EngineTable.model_fields, table.get("engine"))
    table["inference"] = {key: value for key, value in below.items() if key in keys}
    for path, value in parse_overrides(overrides):
        if path == ["model", "name"]:
            raise ConfigError("--model.name: unknown option. MODEL, the first word, is the name")
        set_at(table, path, value)

    run_dir = _run_named(model)
    if run_dir is not None:
        model = str(Run(run_dir).weights)
    set_at(table, ["model", "name"], model)
    settings = validated(ServeSettings, table)
    for key in settings.inference.model_extra or {}:
        if key != settings.engine:
            raise ConfigError(
                f"--inference.{key}: unknown option. Settings of the engine are "
                f"--inference.{settings.engine}.KEY; --help lists the others"
            )

    build_model_maker(settings, load_plugins(disabled=settings.plugins.disabled))
    build_engine(settings).check(settings.interpreter)
    return settings


def _run_named(model: str) -> Path | None:
    for path in (Path(model), OUTPUTS / model):
        if model != LATEST and (path / "configs" / "run.json").is_file():
            return path
    return find_run(LATEST, OUTPUTS) if model == LATEST else None


def build_engine(settings: ServeSettings) -> Engine:
    """The engine plugin with its settings. Raises ``ConfigError``."""
    offers = collect(load_plugins(disabled=settings.plugins.disabled), ENGINE)
    cls = select(ENGINE, settings.engine, offers=offers, where=ENGINE.key)
    where = f"inference.{settings.engine}"
    return cls(settings_of(cls, ENGINE, settings=settings.engine_settings, where=where))


def choose_port(host: str, port: int | None) -> int:
    """``port`` if it is set, else 8000, else a free one. Raises ``ConfigError`` if ``port`` is
    taken."""
    if port is not None:
        if not _is_free(host, port):
            raise ConfigError(
                f"--port: {port} is taken on {host}. Choose another, or leave --port out to get a "
                "free one"
            )
        return port
    return PORT if _is_free(host, PORT) else free_ports(1, host)[0]


def _is_free(host: str, port: int) -> bool:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine will
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(f"--host {host} --port {port}: {error}") from error

    return True


def read_key(variable: str | None) -> str:
    """The key in an environment variable; empty for None. Raises ``ConfigError``."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"--api-key-var: the environment variable {variable} is not set or empty")
    return key


def model_context(folder: Path) -> int:
    """The model's context in tokens, from its ``config.json``. Raises ``ConfigError``, and
    ``RunError`` if the file is damaged."""
    config = read_table(folder / "config.json")
    for table in (config.get("text_config"), config):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(table, dict) and isinstance(table.get(key), int):
                return int(table[key])

    raise ConfigError(
        f"--max-model-len: {folder / 'config.json'} does not give the model's context "
        "(max_position_embeddings); give --max-model-len"
    )
