"""The default engine of a machine."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from prime_rl.rundir.machine import visible_gpus


def on_gpus() -> dict[str, Any]:
    """vLLM, if this machine has GPUs and this environment has vLLM; else nothing."""
    return {"inference": {"engine": "vllm"}} if visible_gpus() and _is_installed() else {}


@cache
def _is_installed() -> bool:
    return find_spec("vllm") is not None
