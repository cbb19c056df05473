"""The server process: ``python -m prime_rl_embedded.server --model DIR --port PORT``.

    supervisor -> argv, PRIME_RL_ADMIN_KEY -> [import torch | wait for the model | load | serve]
    asyncio thread: HTTP            engine thread: EngineLoop -> Scheduler -> forward -> sample

Torch is imported before the model needs to exist: ``--wait-for-model`` then polls for its
``.ready`` file.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from prime_rl.rundir.processes import lasting_imports
from prime_rl.rundir.status import Status
from prime_rl_embedded import EmbeddedConfig
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.process import command_line, exit_now, run_server, wait_for_model

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from uvicorn import Server

    from prime_rl_embedded.loop import EngineLoop
    from prime_rl_embedded.scheduler import Scheduler
    from prime_rl_embedded.schema import Limits

log = logging.getLogger("prime_rl_embedded.server")
_STATUS_SECONDS = 1.0
_POLL_SECONDS = 0.05
# Longer than clients keep idle connections: else they may send on one that the server is closing.
_KEEP_ALIVE_SECONDS = 120
_MALLOC = {-1: 2**30, -3: 2**25, -8: 1}
"""mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (32 MiB is the most that glibc allows) and
M_ARENA_MAX, because the engine's thread would have an arena of its own, which returns memory."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. It carries no key, because other users can read argument lists."""
    parser = command_line("prime_rl_embedded.server", __doc__)
    parser.add_argument(
        "--settings", type=EmbeddedConfig.model_validate_json, default=EmbeddedConfig()
    )
    parser.add_argument(
        "--record-routes", action="store_true", help="report the experts that compute each token"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns the exit code."""
    return run_server(parse(argv), _serve)


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory: to return and fault in a step's activations anew takes a
    quarter of the time of a long prefill. A user's ``MALLOC_`` variables win."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        for option, value in _MALLOC.items():
            mallopt(option, value)


def _serve(args: argparse.Namespace, status: Status) -> int:
    _keep_freed_memory()
    status.report("importing torch")
    with lasting_imports():
        import torch

        from prime_rl_embedded.loop import EngineLoop
        from prime_rl_embedded.model import load_model
        from prime_rl_embedded.prefixes import PrefixCache
        from prime_rl_embedded.scheduler import Scheduler
        from prime_rl_embedded.schema import Limits

    settings: EmbeddedConfig = args.settings
    torch.set_num_threads(settings.num_threads)
    if args.wait_for_model:
        wait_for_model(args.model, status)
    status.report("loading weights")
    model = load_model(
        args.model,
        max_len=args.max_model_len,
        dtype=settings.dtype,
        device=settings.device,
        fused=settings.fused,
        records_routes=args.record_routes,
    )
    scheduler = Scheduler(
        model,
        num_slots=settings.num_slots,
        max_model_len=args.max_model_len,
        max_prefill_tokens=settings.max_prefill_tokens,
        seed=args.seed,
        version=args.policy_version,
    )
    scheduler.kept = PrefixCache(settings.prefix_cache_mib * 2**20)
    limits = Limits(
        model_name=args.served_model_name or args.model.name,
        max_model_len=args.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    log.info("%s", describe(scheduler, limits))
    server = EngineServer(args, limits, status)
    return server.run(EngineLoop(scheduler, server.engine_died, settings.max_waiting))


def describe(scheduler: Scheduler, limits: Limits) -> str:
    """One line for the log: model, forward, slots and the cache's maximum size."""
    model = scheduler.model
    cache = scheduler.cache
    forward = type(model.forward).__name__
    return (
        f"{limits.model_name}: {type(model.module).__name__} on {model.device} by {forward}, "
        f"{scheduler.num_slots} slots of {limits.max_model_len} tokens, "
        f"KV cache at most {cache.max_bytes / 2**20:,.0f} MiB"
    )


class EngineServer:
    """HTTP in the main thread, the engine in its own. The process ends when either one does."""

    def __init__(self, args: argparse.Namespace, limits: Limits, status: Status) -> None:
        self.args = args
        self.limits = limits
        self.status = status
        self.failure: BaseException | None = None
        self._stop_serving: Callable[[], None] = lambda: None

    def run(self, engine: EngineLoop) -> int:
        """Serve until a signal (0) or the end of the engine's thread (1). Returns the exit code."""
        try:
            asyncio.run(self._serve(engine))
        finally:
            engine.stop()

        if self.failure is not None:
            traceback.print_exception(self.failure)
            self.status.report(f"the engine died: {self.failure}")
            return 1

        return 0

    def engine_died(self, error: BaseException) -> None:
        """Called in the engine's thread."""
        self.failure = error
        self._stop_serving()

    async def _serve(self, engine: EngineLoop) -> None:
        from prime_rl_embedded.answers import Texts
        from prime_rl_embedded.api import make_app

        texts = Texts(engine, self.limits, self.args.model)
        keys = Keys.of_environment()
        app = make_app(
            engine, self.limits, texts=texts, keys=keys, weights_roots=self.args.weights_root
        )
        server = _make_http_server(app, engine, self.args)
        self._stop_serving = lambda: setattr(server, "should_exit", True)
        engine.start()
        reporting = asyncio.create_task(self._report(engine, server))
        try:
            await server.serve()
        finally:
            reporting.cancel()

    async def _report(self, engine: EngineLoop, server: Server) -> None:
        """Report the engine's activity once a second, as soon as it accepts connections."""
        while not server.started:
            await asyncio.sleep(_POLL_SECONDS)
        before = 0
        then = time.monotonic()
        while True:
            stats = engine.scheduler.stats
            now = time.monotonic()
            rate = (stats.generated_tokens - before) / max(now - then, 1e-9)
            before = stats.generated_tokens
            then = now
            report_activity(self.status, engine, rate)
            await asyncio.sleep(_STATUS_SECONDS)


def report_activity(status: Status, engine: EngineLoop, tokens_per_second: float) -> None:
    scheduler = engine.scheduler
    running = len(scheduler.active)
    waiting = scheduler.num_waiting
    numbers: dict[str, Any] = {
        "running": float(running),
        "waiting": float(waiting),
        "sampled/s": round(tokens_per_second, 1),
        "policy_version": float(scheduler.version),
    }
    if scheduler.asleep:
        status.report("asleep", waiting_for="the trainer to give the device back", **numbers)
    elif engine.paused:
        status.report("paused", waiting_for="a weight update to end", **numbers)
    elif running or waiting:
        status.report("generating", **numbers)
    else:
        status.report("idle", waiting_for="requests", **numbers)


def _make_http_server(app: Starlette, engine: EngineLoop, args: argparse.Namespace) -> Server:
    from uvicorn import Config, Server

    from prime_rl_embedded.connections import PatientProtocol

    class ClosingServer(Server):
        """Fails requests in flight on a signal, so that shutdown does not wait for them."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            engine.close("the engine is shutting down")
            super().handle_exit(sig, frame)

    config = Config(
        app,
        host=args.host,
        port=args.port,
        lifespan="off",
        http=PatientProtocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    return ClosingServer(config)


if __name__ == "__main__":
    exit_now(main())
