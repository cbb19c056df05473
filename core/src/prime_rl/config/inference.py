"""``[inference]``, the engines that sample; and references to frozen models, which run somewhere
else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prime_rl.config.base import HeaderName, Headers, HostName, Settings, VariableName, Variables

STARTS_ENGINES = [
    "engine",
    "host",
    "port",
    "python",
    "replicas",
    "max_restarts",
    "hang_timeout",
    "env_vars",
]
"""Keys about engines that the run starts: unused with ``base_url``."""


URL = re.compile(r"https?://[^/\s]+(/\S*)?$")


def _as_urls(value: Any) -> Any:
    """One URL or several, with or without ``/v1``. Raises ``ValueError`` for anything else."""
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
        return value
    for url in urls:
        if not URL.match(url):
            raise ValueError(
                f"{url!r} is no URL of an engine: expected http:// or https://, a host and perhaps "
                "a port and a path, without spaces, such as 'http://10.0.0.5:8000/v1'"
            )

    return [url.rstrip("/").removesuffix("/v1") for url in urls]


class InferenceConfig(Settings):
    """``[inference]``: the engine. A table of the engine's name holds its own settings."""

    model_config = ConfigDict(extra="allow")

    engine: str = ""
    """Name of an installed engine. Needed unless ``base_url`` is set."""
    host: HostName = "127.0.0.1"
    """Address the server binds; by default loopback only."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the first replica; the others follow. None: free ports."""
    replicas: NonNegativeInt = 1
    """Engines to start, each with the whole model. Groups are spread over them. 0: none, for a run
    that samples nothing, because its data is a data set (``[sft]``)."""
    max_restarts: NonNegativeInt = 3
    """How often an engine that died or hung is restarted before the weights have a newer version.
    After that the run continues with the others, or ends if none is left."""
    hang_timeout: PositiveFloat = 300.0
    """Seconds an engine may accept connections without answering, health checks included, before it
    is restarted. Sleeping and starting engines are exempt."""
    base_url: Annotated[tuple[str, ...] | None, Field(min_length=1), BeforeValidator(_as_urls)] = (
        None
    )
    """One or more URLs of running engines: the run starts none. They must serve the model under
    ``model.name``, and see the run directory and the model's folder."""
    admin_key_var: VariableName = "PRIME_RL_ADMIN_KEY"
    """Environment variable with the key of the admin routes of ``base_url``."""
    headers: Headers = {}
    """HTTP headers of every request to ``base_url``. No secrets: this is written to the run
    directory."""
    headers_from_env: dict[HeaderName, VariableName] = {}
    """HTTP headers of every request to ``base_url``, from environment variables."""
    python: str | None = None
    """Interpreter of an engine with an environment of its own, relative to the working directory:
    ``.venv-vllm/bin/python``. None: the run's own."""
    max_model_len: PositiveInt | None = None
    """Prompt and completion together, in tokens. None: ``seq_len``."""
    ready_timeout: PositiveFloat = 1800.0
    """Seconds to wait for an engine: at the start, and whenever none is left. It may load a large
    model and compile; one whose process ends is noticed at once."""

    env_vars: Variables = {}
    """Environment variables of the engines, beside those of the top-level ``env_vars``."""

    @model_validator(mode="after")
    def _starts_them_or_not(self) -> InferenceConfig:
        if self.base_url is None:
            for key in ("headers", "headers_from_env"):
                if self._sets(key):
                    raise ValueError(
                        f"{key} are for engines that are running already, and base_url names "
                        "none. Leave them out."
                    )

            if self._sets("admin_key_var"):
                raise ValueError(
                    "admin_key_var is the key of engines that are running already, and base_url "
                    "names none; engines of the run get a key of their own. Leave it out."
                )
            return self

        if len(set(self.base_url)) < len(self.base_url):
            raise ValueError("base_url names an engine twice")

        keys = [key for key in STARTS_ENGINES if self._sets(key)]
        unread = [*keys, *(self.model_extra or {})]
        if unread:
            raise ValueError(
                f"{unread[0]} says how to start an engine, and base_url names engines that are "
                "running already: nothing would read it. Leave one of them out."
            )

        return self

    def _sets(self, key: str) -> bool:
        """Whether a key differs from its default. (Not ``model_fields_set``: the config that a run
        writes sets every key.)"""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @property
    def interpreter(self) -> Path | None:
        """``python`` as an absolute path. Links stay: they select the environment."""
        return None if self.python is None else Path(self.python).expanduser().absolute()

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's own table."""
        table = (self.model_extra or {}).get(self.engine, {})
        return dict(table) if isinstance(table, dict) else table
