"""The server process: ``python -m prime_rl_vllm.server --model DIR --port PORT``.

    supervisor -> argv, PRIME_RL_ADMIN_KEY -> [import vLLM | wait for the model | vLLM's own server]
    vLLM's server -> Front (our routes, keys) -> vLLM's routes -> engine process -> WeightExtension

All additions use vLLM's own options (``--middleware``, ``--worker-extension-cls``). vLLM is
imported before the model needs to exist.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any

from prime_rl import ConfigError
from prime_rl.rundir.machine import visible_gpus
from prime_rl.rundir.status import Status
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.process import command_line, exit_now, run_server, wait_for_model
from prime_rl_vllm import VllmConfig, cpu_start
from prime_rl_vllm import state as shared
from prime_rl_vllm.arguments import coarse_parts, num_gpus, to_flags, with_defaults
from prime_rl_vllm.interpreter import check_interpreter
from prime_rl_vllm.prefill import end_engines, engine_settings, start_engines
from prime_rl_vllm.state import State

log = logging.getLogger("prime_rl_vllm.server")
_POLL_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = "120"
"""Longer than clients keep idle connections: else they may send on one that is closing."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. It carries no key, because other users can read argument lists."""
    parser = command_line("prime_rl_vllm.server", __doc__)
    add = parser.add_argument
    add("--can-sleep", action="store_true", help="free a GPU's memory on /sleep")
    add("--settings", type=VllmConfig.model_validate_json, default=VllmConfig())
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns the exit code."""
    logging.getLogger("prime_rl_vllm").setLevel(logging.INFO)  # vLLM raises the root's level
    return run_server(parse(argv), _serve)


def _serve(args: argparse.Namespace, status: Status) -> int:
    status.report("importing vLLM")
    check_interpreter(None)
    settings = with_defaults(args.settings.arguments)
    for note in coarse_parts(settings):
        log.warning("inference.vllm.%s", note)
    if cpu_start.is_cpu_build():
        settings = cpu_start.cpu_settings(settings)
    elif args.can_sleep:
        settings.setdefault("enable_sleep_mode", True)

    _set_environment(settings)
    on_gpu = not cpu_start.is_cpu_build()
    if args.settings.prefill_engines:
        if on_gpu:
            _check_gpus(args.settings)
        namespace, *prefill = (
            parse_vllm(args, engine_settings(settings, number, on_gpu))
            for number in range(1 + args.settings.prefill_engines)
        )
    else:
        namespace = parse_vllm(args, settings)
        prefill = []
    if cpu_start.is_cpu_build():
        cpu_start.fork_the_engine()
    if args.wait_for_model:
        wait_for_model(args.model, status)
    status.report("loading weights")
    shared.current = State(
        model_name=args.served_model_name or args.model.name,
        model_dir=str(args.model),
        max_model_len=args.max_model_len,
        keys=Keys.of_environment(),
        status=status,
        weights_roots=args.weights_root,
        version=args.policy_version,
    )
    shared.current.prefill = start_engines(prefill) if prefill else []
    try:
        return _run(namespace, shared.current)
    finally:
        end_engines(shared.current.prefill)


def _check_gpus(settings: VllmConfig) -> None:
    """Raises ``ConfigError`` if the engines of the server do not have a GPU for each part."""
    needed = num_gpus(settings.arguments) * (1 + settings.prefill_engines)
    found = visible_gpus()
    if len(found) < needed:
        raise ConfigError(
            f"inference.vllm.prefill_engines: is {settings.prefill_engines}, so the engines of a "
            f"server need {needed} GPUs, and it has {len(found)} ({', '.join(found)}). Give it "
            "more (deployment.inference_gpus, inference.replicas), or lower it."
        )


def _set_environment(settings: dict[str, Any]) -> None:
    """Set what vLLM reads during its import. Variables that the user has set stay."""
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _KEEP_ALIVE_SECONDS)
    os.environ.setdefault(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1"
    )  # for the extra token: see parse_vllm
    if cpu_start.is_cpu_build():
        cpu_start.set_environment(eager=bool(settings.get("enforce_eager")))


def parse_vllm(args: argparse.Namespace, settings: dict[str, Any]) -> argparse.Namespace:
    """Parse vLLM's own command line. Raises ``ConfigError`` for an unknown argument."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(prog="[inference.vllm]"))
    ours = {
        "model": str(args.model),
        "served_model_name": args.served_model_name or args.model.name,
        "host": args.host,
        "port": args.port,
        # vLLM requires room for one token after a prompt that is only scored. Our schema keeps
        # requests within max_model_len, so the extra position is never computed.
        "max_model_len": args.max_model_len + 1,
        "seed": args.seed,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "prime_rl_vllm.worker.WeightExtension",
        "middleware": "prime_rl_vllm.front.Front",
    }
    argv = to_flags(ours | settings, parser)
    try:
        namespace: argparse.Namespace = parser.parse_args(argv)
    except SystemExit:  # argparse has printed the reason
        raise ConfigError(f"[inference.vllm]: refused by vLLM: {' '.join(argv)}") from None

    validate_parsed_serve_args(namespace)
    return namespace


def _run(namespace: argparse.Namespace, state: State) -> int:
    import uvloop
    import vllm
    from vllm.entrypoints.launchers.api_server.entry import run_server

    log.info("vLLM %s serves %s", vllm.__version__, state.model_name)
    uvloop.run(run_server(namespace))
    if state.died:
        state.status.report(state.reason)
        log.error("%s", state.reason)  # once more: a run that ends shows the last lines of its log
        return 1

    state.status.report("stopped")
    return 0


if __name__ == "__main__":
    exit_now(main())
