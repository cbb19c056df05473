"""``sitecustomize`` of the processes of a slow run: each stage takes ``SECONDS`` longer the first
time that a process comes to it, as with a large model, a slow disk or a slow judge. The processes
find the file by ``PYTHONPATH``; ``slow_seconds`` beside it has the number."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = {
    "prime_rl.trainer.model": ["load_model"],
    "prime_rl_embedded.model": ["load_model"],
    "prime_rl.trainer.state": ["find_packing"],  # where it would compile
    "prime_rl.trainer.update": ["BatchUpdate.run"],
    "prime_rl.trainer.published": ["_move_into_place"],
    "prime_rl.trainer.publish": ["export"],
    "prime_rl.trainer.checkpoint": ["write_shard"],
    "prime_rl_embedded.weights": ["read_weights"],
    "prime_rl_embedded.scheduler": ["Scheduler.step"],  # a generation
    "prime_rl_environments.words": ["position_score"],  # of training and of evaluation
    "text_reversal": ["TextReversalTaskset.load"],
}
"""Functions by module."""

slept: set[tuple[int, str]] = set()
searched: set[str] = set()
"""Modules that are being looked up."""


def slow(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        here = os.getpid(), stage
        if here not in slept and "PRIME_RL_PROCESS" in os.environ:
            slept.add(here)
            print(f"slow: {stage}", file=sys.stderr, flush=True)
            time.sleep(float(Path(__file__).with_name("slow_seconds").read_text()))
        return function(*args, **settings)

    return call


class Finder(importlib.abc.MetaPathFinder):
    """Patches a module when it is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name not in STAGES or name in searched:
            return None
        searched.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            searched.discard(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for stage in STAGES[name]:
                *outer, attribute = stage.split(".")
                owner = getattr(module, outer[0]) if outer else module
                setattr(owner, attribute, slow(getattr(owner, attribute), f"{name}.{stage}"))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
