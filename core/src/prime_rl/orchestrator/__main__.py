"""``python -m prime_rl.orchestrator RUN_DIR``: the orchestrator's process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

from prime_rl.config.run import RunConfig
from prime_rl.orchestrator import build
from prime_rl.orchestrator.host import Outages
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.producers import SampledFrozen, Supplied
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.summary import write_summary
from prime_rl.plugins.errors import PrimeRLError
from prime_rl.plugins.manager import Hooks, load_plugins
from prime_rl.run.launch import Launch, wait_for_model
from prime_rl.run.processes import exit_with_parent, lasting_imports
from prime_rl.run.status import DONE, Status
from prime_rl.wire.transport import make_sender

log = logging.getLogger("prime_rl")

FAILED = "failed"

TEARDOWN_SECONDS = 20.0
"""What closing may take once the run is over, well or badly."""


def main() -> None:
    """Run one run's orchestrator. Exits with 0 when every step was taken, or when asked to end."""
    exit_with_parent()
    run_dir = Path(sys.argv[1])
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    code = loop.run_until_complete(_supervised(run_dir, config))
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End at once: what an environment left running must not keep a finished run alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _supervised(run_dir: Path, config: RunConfig) -> int:
    """The exit code. SIGTERM cancels the run, so that everything is closed in order."""
    status = Status(run_dir / "status" / "orchestrator.json")
    task = asyncio.ensure_future(_run(run_dir, config, status))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    except PrimeRLError as error:
        if status.last.state != FAILED:
            _say(error, status)
        return 1
    except Exception:
        log.exception("the orchestrator failed")
        return 1
    return 0


async def _run(run_dir: Path, config: RunConfig, status: Status) -> None:
    launch = Launch.read(run_dir)
    status.report("loading plugins and verifiers")
    with lasting_imports():
        hooks = load_plugins(disabled=config.plugins.disabled)
        import verifiers.v1  # noqa: F401 - takes seconds: pay while the model is being made

    if launch.wait_for_model:
        status.report("waiting", waiting_for="model (being made)")
        await wait_for_model(Path(launch.model_path))
    async with AsyncExitStack() as stack:
        try:
            orchestrator = await _build(stack, run_dir, config, launch, hooks, status)
            if launch.checkpoint is not None:
                orchestrator.restore(launch.checkpoint)
            results = await orchestrator.run()
            status.report("writing the summary")
            write_summary(run_dir, config, results)
            status.report(DONE)
            _end_within(TEARDOWN_SECONDS, 0)
        except BaseException as error:
            if isinstance(error, PrimeRLError):
                _say(error, status)  # before closing, which may take its time
            _end_within(TEARDOWN_SECONDS, 1)
            raise


def _say(error: PrimeRLError, status: Status) -> None:
    log.error("%s: %s", type(error).__name__, error)
    status.report(FAILED, error=str(error))


def _end_within(seconds: float, code: int) -> None:
    """Should closing hang, the process ends all the same."""
    timer = threading.Timer(seconds, _exit, (code,))
    timer.daemon = True
    timer.start()


async def _build(
    stack: AsyncExitStack,
    run_dir: Path,
    config: RunConfig,
    launch: Launch,
    hooks: Hooks,
    status: Status,
) -> Orchestrator:
    policy, outages = Policy(launch.first_step - 1), Outages()
    fleet = build.build_fleet(config, launch, outages, run_dir)
    stack.push_async_callback(fleet.close)
    build.report_engines(config, launch, fleet, run_dir)
    shared = build.build_shared(config, hooks, launch, fleet, lambda: policy.version, outages)
    stack.push_async_callback(shared.policy.close)
    envs = build.build_train_envs(shared)
    eval_envs = build.build_eval_envs(shared)
    for environment in [*(e.environment for e in envs), *(e.environment for e in eval_envs)]:
        await stack.enter_async_context(environment)
    for env in envs:
        stack.push_async_callback(env.host.close)
        stack.push_async_callback(env.algorithm.close)
        await env.algorithm.setup(env.host)
        if isinstance(env.producer, Supplied):
            await env.producer.source.setup(env.host)
    monitors = build.build_monitors(config, hooks, run_dir)
    for monitor in monitors:
        stack.callback(monitor.close)
    sender = make_sender(launch, run_dir)
    stack.callback(sender.close)
    status.report("waiting", waiting_for="inference (engine start)")
    await fleet.wait_ready(config.inference.ready_timeout)
    outages.changed = lambda: status.report("waiting", waiting_for=outages.waiting_for or "models")
    for env in envs:
        await env.host.wait_ready(config.inference.ready_timeout)
        if isinstance(env.producer, SampledFrozen):
            stack.push_async_callback(env.producer.close)
            await env.producer.wait_ready(config.inference.ready_timeout)
    return Orchestrator(
        config=config,
        launch=launch,
        run_dir=run_dir,
        hooks=hooks,
        envs=envs,
        eval_envs=eval_envs,
        sampler=build.build_sampler(config, hooks, envs),
        assembler=build.build_assembler(config, hooks, launch),
        reporter=Reporter(run_dir, monitors, config.max_steps, config.orchestrator.save_rollouts),
        sender=sender,
        fleet=fleet,
        place=shared.place,
        status=status,
        policy=policy,
        outages=outages,
    )


if __name__ == "__main__":
    main()
