"""The state that all routes share: the engine's client, version, pause and sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.rundir.status import Status
from prime_rl_broadcast.group import backends
from prime_rl_engine_kit.keys import Keys


@dataclass
class State:
    """One server. ``engine`` is vLLM's ``AsyncLLM``, set when the application starts."""

    model_name: str
    model_dir: str
    max_model_len: int
    """Tokens of prompt and completion."""
    keys: Keys
    status: Status
    weights_roots: Sequence[Path] | None = None
    """Weight updates lie in one of these folders; None: anywhere."""
    version: int = 0
    """Policy version of the current weights."""
    engine: Any = None
    prefill: Sequence[Any] = ()
    """vLLM's ``AsyncLLM`` of each engine that only computes prompts."""
    prefill_failures: int = 0
    """Prompts that a prefill engine has failed to compute."""
    adapter: Any = None
    """vLLM's ``LoRARequest`` of the adapter that every request gets; None: the base alone."""
    ending: bool = False
    ended: bool = False
    """Whether the engine is shut down: what waits for it gets no answer any more."""
    died: bool = False
    """Whether the engine ended before it was shut down."""
    reason: str = "the engine died; its log has the reason"
    """Why the server ends, if ``died``."""
    paused: bool = False
    asleep: bool = False
    pauses: int = 0
    """Number of pauses, which is part of the cache's salt: weights change only during a pause."""
    running: int = 0
    """Requests of our own generate route."""
    generated_tokens: int = 0
    weight_updates: int = 0
    weight_update_seconds: float = 0.0
    """Duration of the last update, from request to answer."""
    serving: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests in flight, on all routes."""
    reporting: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None
    pending: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that go on by themselves: pauses of prefill engines that vLLM does not call complete
    yet, and prompts whose client has left. asyncio keeps only weak references."""
    admin: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One admin request at a time."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self.engine.model_config.get_vocab_size())

    @property
    def engines(self) -> list[Any]:
        """All that have the weights: the one that samples, then those that compute prompts."""
        return [self.engine, *self.prefill]

    async def ask_workers(self, method: str, *args: Any) -> list[Any]:
        """What ``method`` of each worker returns, over all engines in order."""
        answers = await asyncio.gather(
            *(self.ask_workers_of(engine, method, *args) for engine in self.engines)
        )
        return [answer for of_engine in answers for answer in of_engine]

    async def ask_workers_of(self, engine: Any, method: str, *args: Any) -> list[Any]:
        """What ``method`` of each worker of one engine returns, over its data-parallel engines in
        order. vLLM's own ``collective_rpc`` asks all of them, and hands on what the first engine's
        return."""
        of_engines = await engine.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
        return [answer for answers in of_engines for answer in answers]

    @property
    def num_workers(self) -> int:
        """Workers of one engine: all are started with the same parallelism."""
        parallel = self.engine.vllm_config.parallel_config
        return int(parallel.world_size * parallel.data_parallel_size)

    @property
    def receives(self) -> dict[str, Any] | None:
        """The number of workers that can receive weights from the trainer's memory, and their
        backends. None if data-parallel engines have servers of their own: a broadcast reaches
        those of this address alone."""
        parallel = self.engine.vllm_config.parallel_config
        if parallel.local_engines_only:
            return None
        on_gpu = self.engine.vllm_config.device_config.device_type == "cuda"
        num_workers = self.num_workers * len(self.engines)
        return {"workers": num_workers, "backends": backends(on_gpu)}

    @property
    def capacity(self) -> int:
        """Requests that run at once: ``max_num_seqs`` of each data-parallel engine."""
        config = self.engine.vllm_config
        return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)

    @property
    def serves_adapters(self) -> bool:
        """Whether adapters are loaded beside the base (``enable_lora``), and not merged into it."""
        return self.engine.vllm_config.lora_config is not None

    def salt(self, client: str | None) -> str:
        """The prefix cache's salt. It changes at every pause, so no request reuses KV that older
        weights computed, including requests that arrive during an update."""
        return f"{self.pauses}:{client or ''}"

    def end(self, reason: str) -> None:
        """End the server as one whose engine has died: the run starts it again."""
        self.reason = reason
        self.died = True
        self.ending = True
        os.kill(os.getpid(), signal.SIGTERM)

    def release(self) -> None:
        """The engine is shut down: end the requests that wait for it. vLLM's server ends when all
        have been answered, and would wait until their clients have left."""
        self.ended = True
        for task in self.serving:
            task.cancel()


current: State | None = None
"""This process's server. Global, because vLLM creates the middleware from its name, without
arguments."""
