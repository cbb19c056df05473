"""Settings of the source ``gateway``."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prime_rl import ConfigError, PluginConfig

SHORTEST_KEY = 16
"""Characters of a tenant's key."""
DEFAULT_TENANT = "default"


class Tenant(BaseModel):
    """A table of ``tenants``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(min_length=1, max_length=64)
    """The tenant's label, which its rollouts have in ``info``."""
    key_var: str
    """The environment variable with its key: at least 16 characters."""
    max_sessions: PositiveInt = 1024
    """Sessions of the tenant that may be open at once."""
    max_requests: PositiveInt = 256
    """Its requests to the model that may be in progress at once."""

    def key(self, where: str) -> str:
        """Raises ``ConfigError`` for a variable that is missing or has too short a key."""
        key = os.environ.get(self.key_var, "")
        if len(key) < SHORTEST_KEY:
            problem = f"{len(key)} characters" if key else "no such variable, or an empty one"
            raise ConfigError(
                f"{where}: key_var = {self.key_var!r} of tenant {self.name!r}: expected a key of "
                f"at least {SHORTEST_KEY} characters in the environment, found {problem}. Export "
                "it before the run starts."
            )
        return key


class GatewayConfig(PluginConfig):
    """Settings of ``gateway``."""

    host: str = "127.0.0.1"
    """Address to listen on. Traffic is not encrypted: for other machines, put a proxy with TLS in
    front of it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: a free one, which a restarted orchestrator takes again."""
    tenants: tuple[Tenant, ...] = ()
    """Who may open sessions, each with a key and quotas of its own. Without any there is one tenant
    with a key that the run makes."""
    session_timeout: PositiveFloat = 7200.0
    """Seconds without a request or a reward until a session expires. Time in which the gateway is
    away does not count."""
    group_timeout: PositiveFloat = 3600.0
    """Seconds from the first reward of a group until it trains with the members that it has. One
    that is alone then does not train. Time in which the gateway is away does not count."""
    max_sessions: PositiveInt = 4096
    """Sessions that may be open at once, of all tenants."""
    max_waiting: PositiveInt = 1024
    """Rewarded sessions that may wait for a batch. While so many wait, no session opens (503)."""
    max_concurrency: PositiveInt = 128
    """Requests to the engines at once; others wait."""
    max_turns: PositiveInt = 256
    """Replies of one session."""
    max_body: PositiveInt = 4 << 20
    """Bytes of a request's body."""
    retry_after: PositiveInt = 5
    """Seconds that ``Retry-After`` names in an answer 429 or 503."""

    @model_validator(mode="after")
    def _names_differ(self) -> GatewayConfig:
        names = [tenant.name for tenant in self.tenants]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tenants: two tables have the name {twice!r}; give each its own")
        return self
