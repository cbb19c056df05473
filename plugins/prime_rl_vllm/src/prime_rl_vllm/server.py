"""The server process: ``python -m prime_rl_vllm.server --model DIR --port PORT``.

    supervisor -> argv, PRIME_RL_ADMIN_KEY -> [import vLLM | wait for the model | vLLM's own server]
    vLLM's server -> Front (our routes, keys) -> vLLM's routes -> engine process -> WeightExtension

Everything is put in by vLLM's own options (``--middleware``, ``--worker-extension-cls``). vLLM is
imported while the model may still be in the making.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from prime_rl import ConfigError, PrimeRLError
from prime_rl.run.launch import ADMIN_KEY, ENGINE_KEY, READY
from prime_rl.run.processes import exit_with_parent
from prime_rl.run.status import Status
from prime_rl_vllm import VllmConfig, cpu_start
from prime_rl_vllm import state as shared
from prime_rl_vllm.arguments import DEFAULTS, to_flags
from prime_rl_vllm.interpreter import check_interpreter
from prime_rl_vllm.keys import Keys
from prime_rl_vllm.state import State

log = logging.getLogger("prime_rl_vllm.server")
_POLL_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = "120"
"""Longer than clients keep idle connections, or they send into one that is closing."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. No key is on it: argument lists are public."""
    parser = argparse.ArgumentParser(prog="prime_rl_vllm.server", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a local Hugging Face folder")
    add("--served-model-name", help="default: the folder's name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--max-model-len", type=int, required=True, help="prompt and completion, in tokens")
    add("--seed", type=int, default=0, help="of requests that bring none")
    add("--policy-version", type=int, default=0, help="of the weights in the folder")
    add("--status-path", type=Path)
    add("--wait-for-model", action="store_true", help=f"until the folder holds {READY}")
    add("--can-sleep", action="store_true", help="give a GPU's memory away on /sleep")
    add("--settings", type=VllmConfig.model_validate_json, default=VllmConfig())
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = parse(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("prime_rl_vllm").setLevel(logging.INFO)  # vLLM raises the root's
    exit_with_parent()
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, _exit_cleanly)
    status = Status(args.status_path)
    try:
        return _serve(args, status)
    except (SystemExit, KeyboardInterrupt) as stop:  # a signal, at whatever point
        code = int(stop.code or 0) if isinstance(stop, SystemExit) else 0
        status.report("failed" if code else "stopped")
        return code
    except PrimeRLError as error:
        status.report(f"failed: {error}")
        log.error("%s", error)
        return 1


def _exit_cleanly(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _serve(args: argparse.Namespace, status: Status) -> int:
    status.report("importing vLLM")
    check_interpreter(None)
    settings: dict[str, Any] = DEFAULTS | args.settings.arguments
    if cpu_start.is_cpu_build():
        settings = cpu_start.cpu_settings(settings)
    elif args.can_sleep:
        settings.setdefault("enable_sleep_mode", True)
    _set_environment(settings)
    namespace = parse_vllm(args, settings)
    if cpu_start.is_cpu_build():
        cpu_start.fork_the_engine()
    if args.wait_for_model:
        wait_for_model(args.model, status)
    status.report("loading weights")
    shared.current = State(
        model_name=args.served_model_name or args.model.name,
        model_dir=str(args.model),
        max_model_len=args.max_model_len,
        keys=Keys(os.environ.get(ADMIN_KEY, ""), os.environ.get(ENGINE_KEY, "")),
        status=status,
        version=args.policy_version,
    )
    return _run(namespace, shared.current)


def _set_environment(settings: dict[str, Any]) -> None:
    """What vLLM reads while it is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _KEEP_ALIVE_SECONDS)
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # for the one token: parse_vllm
    if cpu_start.is_cpu_build():
        cpu_start.set_environment(eager=bool(settings.get("enforce_eager")))


def parse_vllm(args: argparse.Namespace, settings: dict[str, Any]) -> argparse.Namespace:
    """vLLM's own command line. Raises ``ConfigError`` for an argument that it does not have."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="[inference.vllm]"))
    ours = {
        "model": str(args.model),
        "served_model_name": args.served_model_name or args.model.name,
        "host": args.host,
        "port": args.port,
        # vLLM wants room for a token more than it scores; no position beyond ours is computed.
        "max_model_len": args.max_model_len + 1,
        "seed": args.seed,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "prime_rl_vllm.worker.WeightExtension",
        "middleware": "prime_rl_vllm.front.Front",
    }
    argv = to_flags(ours | settings, parser)
    try:
        namespace: argparse.Namespace = parser.parse_args(argv)
    except SystemExit:  # argparse has said what is wrong
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
        state.status.report("the engine died; its log says why")
        return 1
    state.status.report("stopped")
    return 0


def wait_for_model(path: Path, status: Status) -> None:
    """Return when the folder is complete."""
    status.report("waiting for the model", waiting_for=f"{path.name}/{READY}")
    while not ((path / READY).exists() and (path / "config.json").exists()):
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # the interpreter would take most of a second to take torch apart
