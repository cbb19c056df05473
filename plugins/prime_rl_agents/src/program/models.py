# mypy: allow-subclassing-any, allow-untyped-decorators
"""Further models of a program: frozen ones, which it names in its requests.

Each has a session of its own on the rollout's interception server, so its exchanges are served and
counted by verifiers and stay out of the trace that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict, model_validator

from prime_rl import FrozenModel as Endpoint
from program.dialects import for_frozen
from program.seam import RolloutSession

_turns: dict[str, count[int]] = {}
"""The rollouts that have used a list of keys, by its names: the keys take turns."""


class FrozenTable(BaseModel):
    """One entry of ``models``: a model that answers and does not train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """As its endpoint calls it."""
    base_url: str
    """Ends in ``/v1``. It must speak the API that the program uses."""
    api_key_var: str | list[str] = "PRIME_RL_FROZEN_API_KEY"
    """Environment variable with its key, which the program does not get; or a list of several,
    which take turns: each rollout has the next key."""
    headers: dict[str, str] = {}
    """HTTP headers of every request. No secrets: this is written to the run directory."""
    headers_from_env: dict[str, str] = {}
    """HTTP headers of every request, from environment variables."""

    @model_validator(mode="after")
    def _is_an_endpoint(self) -> FrozenTable:
        """Keys and headers are those of any frozen model of a run, and refused as there."""
        Endpoint(
            name=self.name,
            base_url=("http://any/v1",),
            api_key_var=self.api_key_var,
            headers=self.headers,
            headers_from_env=self.headers_from_env,
        )
        return self

    @property
    def next_key_var(self) -> str:
        """The environment variable with the key of the next rollout."""
        names = self.api_key_var
        if isinstance(names, str):
            return names
        turn = next(_turns.setdefault(" ".join(names), count()))
        return names[turn % len(names)]


class FrozenModel:
    """A frozen model in one rollout."""

    def __init__(self, table: FrozenTable, server: Any, trace: vf.Trace) -> None:
        self.server = server
        self.trace = vf.Trace(task=trace.task, agent=trace.agent)
        """Its own exchanges. They do not train."""
        client = vf.EvalClientConfig(
            base_url=table.base_url,
            api_key_var=table.next_key_var,
            headers=table.headers,
            headers_from_env=table.headers_from_env,
        )
        context = vf.ModelContext(model=table.name, client=client, sampling=vf.SamplingConfig())
        self.secrets = server.register(RolloutSession(ctx=context, trace=self.trace))

    def dialect(self, dialect: Any) -> Any:
        """The dialect that answers with this model."""
        return for_frozen(dialect, self.secrets[0])

    def close(self) -> None:
        self.server.unregister(*self.secrets)

    @property
    def record(self) -> dict[str, Any]:
        """Counts of the program's requests to it."""
        calls = self.trace.calls
        errors = [str(call.error.message) for call in calls if call.error is not None]
        usages = [call.usage for call in calls if call.usage is not None]
        record: dict[str, Any] = {
            "calls": len(calls),
            "input_tokens": sum(usage.input_tokens for usage in usages),
            "output_tokens": sum(usage.completion_tokens for usage in usages),
        }
        return record | ({"last_error": errors[-1]} if errors else {})


def open_models(
    tables: Mapping[str, FrozenTable], server: Any, trace: vf.Trace
) -> dict[str, FrozenModel]:
    return {name: FrozenModel(table, server, trace) for name, table in tables.items()}
