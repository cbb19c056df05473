"""``python -m prime_rl.orchestrator RUN_DIR``: the orchestrator's process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from prime_rl.config.run import RunConfig
from prime_rl.env.loading import import_tasksets
from prime_rl.env.rendering import load_tokenizer, write_renderer
from prime_rl.errors import PrimeRLError, RunError, text_of
from prime_rl.orchestrator import build
from prime_rl.orchestrator.context import Engines, RunContext, TrainEnv
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.sources import ExternalSource, SampledFrozen
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.proxies import settle
from prime_rl.registry.calls import exit_refused, facts_of_failure, fault, watching_coroutines
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.chat_template import write_chat_template
from prime_rl.rundir.control import stop_asked
from prime_rl.rundir.directory import read_config
from prime_rl.rundir.launch import Launch, wait_for_model
from prime_rl.rundir.logs import set_up_logging
from prime_rl.rundir.processes import exit_with_parent, hide_from_others, lasting_imports
from prime_rl.rundir.status import DONE, Status
from prime_rl.wire.transport import make_sender

log = logging.getLogger("prime_rl")

FAILED = "failed"
ENDED = 128 + signal.SIGTERM
"""Exit code after a SIGTERM that came before the run was done."""

TEARDOWN_SECONDS = 20.0
"""How long closing may take once the run is over."""

BEAT_SECONDS = 5.0


def main() -> None:
    """Run one run's orchestrator. Exits with 0 after the last step, or after a requested stop."""
    exit_with_parent()
    run_dir = Path(sys.argv[1])
    config = read_config(run_dir)
    set_up_logging(config.log.level)

    for notice in settle(os.environ):  # a remote launcher's machine has an environment of its own
        log.warning(notice)

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    with watching_coroutines():
        try:
            code = loop.run_until_complete(_supervised(run_dir, config))
        except SystemExit as error:  # in a task of the loop: it ends the loop itself
            _report(error, Status(run_dir / "status" / "orchestrator.json"))
            code = 1

    _exit(code)


def _exit(code: int) -> NoReturn:
    """End at once: threads that an environment left must not keep a finished run alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _supervised(run_dir: Path, config: RunConfig) -> int:
    """The exit code. SIGTERM cancels the run, so that everything is closed in order. A run that is
    cancelled before it is done has not succeeded."""
    status = Status(run_dir / "status" / "orchestrator.json")
    task = asyncio.ensure_future(_run(run_dir, config, status))
    loop = asyncio.get_running_loop()
    terminated = asyncio.Event()

    def end() -> None:
        terminated.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.set_exception_handler(_end_without_memory)
    beats = asyncio.create_task(_beat(status))

    try:
        await task
    except asyncio.CancelledError:
        if status.last.state == DONE:  # a stop before the first step
            return 0
        if terminated.is_set():
            return ENDED

        # The cancellation came from inside: no signal and no stop caused it.
        text = "an environment or a plugin raised CancelledError, or cancelled all tasks"
        _report(RunError(text), status)
        return 1
    except (Exception, SystemExit) as error:
        # `_run` has reported its error before it closed everything.
        if status.last.state != FAILED:
            _report(error, status)
        return 1
    finally:
        beats.cancel()

    return 0


async def _beat(status: Status) -> None:
    while True:
        status.beat()
        await asyncio.sleep(BEAT_SECONDS)


def _end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """After a ``MemoryError`` in a callback the loop may have lost an event, and wait for ever."""
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), MemoryError):
        _exit(1)


async def _run(run_dir: Path, config: RunConfig, status: Status) -> None:
    launch = Launch.read(run_dir)
    status.report("loading plugins and verifiers")

    with lasting_imports():
        hooks = load_plugins(disabled=config.plugins.disabled)
        trainer_hooks = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
        import verifiers.v1  # noqa: F401 - takes seconds: pay while the model is being made

        envs = [*config.orchestrator.train.env, *config.orchestrator.eval.env]
        import_tasksets((env.label, env.id) for env in envs)

    run = RunContext(
        config,
        launch,
        run_dir=run_dir,
        hooks=hooks,
        status=status,
        losses=Components.load(config.trainer, trainer_hooks),
    )

    stop = asyncio.create_task(stop_asked(run_dir))
    async with AsyncExitStack() as stack:
        try:
            with _cancelled_by(stop, launch, status):
                orchestrator = await _build(stack, run)

            hide_from_others()  # from here on programs of rollouts run
            last = await orchestrator.run(stop)
            if last is None:
                status.report(DONE)
            else:
                status.report(DONE, last_step=last)  # see ``Stop.result``

            _exit_within(TEARDOWN_SECONDS, 0)
        except BaseException as error:
            if isinstance(error, Exception | SystemExit):
                _report(error, status)  # before closing, which may take time
            # A cancelled run has not failed, however long its environments take to close.
            is_cancelled = isinstance(error, asyncio.CancelledError)
            _exit_within(TEARDOWN_SECONDS, 0 if is_cancelled else 1)
            raise


@contextmanager
def _cancelled_by(stop: asyncio.Task[None], launch: Launch, status: Status) -> Iterator[None]:
    """While the orchestrator is being built, a stop cancels the task: no step was trained."""
    task = asyncio.current_task()
    is_building = True

    def cancel(stop: asyncio.Task[None]) -> None:
        # A stop that failed is no stop: the loop raises its error.
        if is_building and task is not None and not stop.cancelled() and not stop.exception():
            task.cancel()

    stop.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if stop.done() and not stop.cancelled() and not stop.exception():
            status.report(DONE, last_step=launch.first_step - 1)
        raise
    finally:
        is_building = False


def _report(error: Exception | SystemExit, status: Status) -> None:
    """The log has the framework's frames too; they stand before the line that the user sees."""
    if isinstance(error, SystemExit):
        error = exit_refused(error)
    if not isinstance(error, PrimeRLError):
        log.error("the orchestrator failed", exc_info=error)
    text = fault(error) or text_of(error)
    log.error("%s: %s", type(error).__name__, text)
    status.report(FAILED, facts=facts_of_failure(error), error=text)


def _exit_within(seconds: float, code: int) -> None:
    """End the process even if closing hangs."""
    timer = threading.Timer(seconds, _exit, (code,))
    timer.daemon = True
    timer.start()


async def _build(stack: AsyncExitStack, run: RunContext) -> Orchestrator:
    """Everything the loop holds, ready to run; ``stack`` closes it."""
    config = run.config
    launch = run.launch
    run_dir = run.run_dir

    if launch.wait_for_model:
        run.status.report("waiting", waiting_for="model (being made)")
        await wait_for_model(Path(launch.model_path))

    engines = build.build_engines(run)
    for fleet in engines.fleets:
        stack.push_async_callback(fleet.close)

    shared = build.build_shared(run, engines)
    stack.push_async_callback(shared.branches.close)

    write_renderer(run_dir, shared.renderer)
    _choose_chat_template(run, shared.renderer)

    envs = [build.build_train_env(shared, env) for env in config.orchestrator.train.env]
    for env in envs:
        await stack.enter_async_context(env.environment)

    for env in envs:
        # `close` is registered first, so a part whose `setup` fails is closed too.
        stack.push_async_callback(env.host.close)
        stack.push_async_callback(env.algorithm.close)
        await env.algorithm.setup(env.host)

        if isinstance(env.source, ExternalSource):
            stack.push_async_callback(env.source.source.close)
            await env.source.source.setup(env.host)

    monitors = build.build_monitors(config, run.hooks, run_dir)
    for monitor in monitors:
        stack.callback(monitor.close)

    wire = make_sender(launch, run_dir)
    stack.callback(wire.close)
    orchestrator = build.build_orchestrator(shared, envs, monitors=monitors, wire=wire)
    for observer in orchestrator.observers:
        stack.push_async_callback(observer.close)  # also if its set-up fails
        await observer.setup()

    # This wait comes last, so that the set-up above runs while the engines start.
    await _wait_for_models(stack, run, engines=engines, envs=envs)
    return orchestrator


def _choose_chat_template(run: RunContext, renderer: Any) -> None:
    """Write the chat template of the run's model folders, with a warning if none is exact."""
    tokenizer = load_tokenizer(Path(run.launch.model_path))
    chosen = build.renderer_offer(run.config, run.hooks).chat_template(tokenizer, renderer)
    write_chat_template(run.run_dir, chosen)
    if chosen.warning is not None:
        log.warning("renderer %r: %s", renderer.name, chosen.warning)


async def _wait_for_models(
    stack: AsyncExitStack, run: RunContext, engines: Engines, envs: Sequence[TrainEnv]
) -> None:
    """Until the policy and every frozen model answer."""
    timeout = run.config.inference.ready_timeout
    outages = engines.outages
    run.status.report("waiting", waiting_for="inference (engine start)")

    for fleet in engines.fleets:
        await fleet.wait_ready(timeout)

    outages.changed = lambda: run.status.report(
        "waiting", waiting_for=outages.waiting_for or "models"
    )

    for env in envs:
        await env.host.wait_ready(timeout)
        if isinstance(env.source, SampledFrozen):
            stack.push_async_callback(env.source.pool.close)
            await env.source.pool.wait_ready(timeout)


if __name__ == "__main__":
    main()
