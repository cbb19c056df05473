"""What the routes share: the engine's client, and what they know of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from prime_rl.rundir.status import Status
from prime_rl_broadcast.group import backends
from prime_rl_engine_kit.keys import Keys


@dataclass
class State:
    """One server. ``engine`` is vLLM's ``AsyncLLM``, there once the application starts."""

    model_name: str
    model_dir: str
    max_model_len: int
    """Prompt and completion, in tokens."""
    keys: Keys
    status: Status
    version: int = 0
    """Of the weights that sample now."""
    engine: Any = None
    ending: bool = False
    died: bool = False
    """The engine ended by itself."""
    paused: bool = False
    asleep: bool = False
    pauses: int = 0
    """So far. What comes after one may be computed under the next weights."""
    running: int = 0
    """Requests of our own generate route."""
    generated_tokens: int = 0
    weight_updates: int = 0
    weight_update_seconds: float = 0.0
    """What the last update took, from the request to the answer."""
    reporting: asyncio.Task[None] | None = None
    admin: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One admin request at a time."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: ids go up to one less."""
        return int(self.engine.model_config.get_vocab_size())

    @property
    def receives(self) -> dict[str, Any] | None:
        """How many workers take weights from the trainer's memory, and by what. With several
        engine processes behind one address, none can."""
        parallel = self.engine.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            return None
        on_gpu = self.engine.vllm_config.device_config.device_type == "cuda"
        return {"workers": parallel.world_size, "backends": backends(on_gpu)}

    def salt(self, client: str | None) -> str:
        """The prefix cache's salt: what old weights computed is never found by new requests,
        those that come while weights are swapped included, whatever salt a client brings."""
        return f"{self.pauses}:{client or ''}"


current: State | None = None
"""This process's server: vLLM builds the middleware itself, from its name alone."""
