"""What ``prime-rl serve`` was asked for, checked as far as that goes without starting a process."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.config.load import build_config, parse_overrides, set_at
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins.manager import load_plugins
from prime_rl.run.children import free_ports
from prime_rl.run.resolve import build_model_maker, check_engine

PORT = 8000
"""Tried first where none is asked for."""


@dataclass(frozen=True)
class Request:
    """What was asked for, as far as it can be checked without starting anything."""

    config: RunConfig
    """Of which only ``model``, ``inference`` and ``seed`` mean something here."""
    served_model_name: str
    api_key_var: str | None = None
    """Environment variable with the key that clients must bring. None: they need none."""
    show_admin_key: bool = False


def read_request(
    model: str,
    overrides: Sequence[str],
    *,
    seed: int,
    inference: Mapping[str, Any],
    served_model_name: str | None,
    **options: Any,
) -> Request:
    """Validate a command line. Inference: keys of ``[inference]``, None where not given.

    Raises ``ConfigError``.
    """
    given = {key: value for key, value in inference.items() if value is not None}
    table: dict[str, Any] = {"model": {"name": model}, "inference": given, "seed": seed}
    table["max_steps"] = 1  # every run has some; none is taken here
    for word in (model, *overrides[:1]):
        if word.startswith("-") is (word is model):
            raise ConfigError(f"{word!r}: expected one MODEL, then options")
    engine = build_config(table).inference.engine
    for path, value in parse_overrides(overrides):
        _check_override(path, engine)
        set_at(table, path, value)
    config = build_config(table)
    hooks = load_plugins()
    build_model_maker(config, hooks)
    check_engine(config, hooks)
    return Request(config, served_model_name or model.rstrip("/"), **options)


def _check_override(path: Sequence[str], engine: str) -> None:
    is_model = path[0] == "model" and len(path) > 1 and path[1] != "name"
    is_engine = list(path[:2]) == ["inference", engine] and len(path) > 2
    is_launch = list(path) in (["inference", "ready_timeout"], ["inference", "python"])
    if not (is_model or is_engine or is_launch):
        raise ConfigError(
            f"--{'.'.join(path)}: unknown option. prime-rl serve takes --model.KEY (of a model "
            f"that is made here), --inference.{engine}.KEY, --inference.ready_timeout, "
            "--inference.python, and what --help lists"
        )


def choose_port(host: str, port: int | None) -> int:
    """The port asked for, or 8000, or a free one. Raises ``ConfigError`` if it can't be had."""
    if port is not None:
        if not _is_free(host, port):
            raise ConfigError(
                f"--port: {port} is taken on {host}. Choose another, or leave it out to get a free "
                "one"
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
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"--api-key-var: the environment variable {variable} is not set or empty")
    return key


def model_context(folder: Path) -> int:
    """Positions the model was made for, from its ``config.json``. Raises ``ConfigError``."""
    config = json.loads((folder / "config.json").read_text())
    for table in (config.get("text_config") or {}, config):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(table.get(key), int):
                return int(table[key])
    raise ConfigError(
        f"--max-model-len: {folder / 'config.json'} does not say how long the model's context is "
        "(max_position_embeddings); give --max-model-len"
    )
