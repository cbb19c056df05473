"""The verifiers taskset ``function``: prompts from a list or a file, and reward functions.

    rows      ``rows``     a list, JSONL, CSV, Parquet, a data set of the hub -> rows, checked
    rewards   ``rewards``  functions -> what they are called with, and what they may return
    travel    ``travel``   functions of a script or a notebook, on their way to another process
    check     ``check_args``  all of it before a run starts, without verifiers
    taskset   ``taskset``  verifiers' classes
    groups    ``groups``   rewards of a whole group, in the orchestrator; ``env_hooks`` offers them

``import function`` imports no verifiers: the command line checks the args of an env with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FunctionTaskset", "InProcessHarness"]

_MODULES = {"FunctionTaskset": "function.taskset", "InProcessHarness": "in_process"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'function' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
