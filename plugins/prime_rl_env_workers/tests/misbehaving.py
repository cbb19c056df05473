# mypy: ignore-errors
"""A taskset whose rows say how their reward function misbehaves."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from contextlib import suppress

import verifiers.v1 as vf

from in_process import InProcessHarness

KINDS = (
    *("fine", "sys_exit", "os_exit", "segfault", "abort", "close_files", "stop_loop"),
    *("cancel_all", "raise_cancelled", "base_exception", "keyboard_interrupt", "recursion"),
    *("nan", "infinite_metric", "surrogate", "cycle", "nesting", "huge_int", "no_number"),
    *("cpu_loop", "blocking", "leak", "orphan", "endless_await", "immortal"),
)
ORPHAN = "98765.4321"
"""Seconds that the child of ``orphan`` sleeps."""


class Odd(BaseException):
    """Not an ``Exception``."""


class Data(vf.TaskData):
    kind: str


async def misbehave(kind: str, trace: vf.Trace) -> float:
    if kind == "sys_exit":
        sys.exit(3)
    elif kind == "os_exit":
        os._exit(4)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "close_files":
        os.closerange(3, 4096)
    elif kind == "stop_loop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)
    elif kind == "cancel_all":
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(3600)
    elif kind == "raise_cancelled":
        raise asyncio.CancelledError
    elif kind == "base_exception":
        raise Odd("not an Exception")
    elif kind == "keyboard_interrupt":
        raise KeyboardInterrupt
    elif kind == "recursion":
        return await misbehave(kind, trace)
    elif kind == "nan":
        return float("nan")
    elif kind == "infinite_metric":
        trace.record_metric("size", float("inf"))
    elif kind == "surrogate":
        trace.info["text"] = "\ud800"
    elif kind == "cycle":
        trace.info["self"] = trace.info
    elif kind == "nesting":
        nested: list = []
        for _ in range(3000):
            nested = [nested]
        trace.info["deep"] = nested
    elif kind == "huge_int":
        trace.info["number"] = 10**5000
    elif kind == "no_number":
        trace.metrics["size"] = "large"
    elif kind == "cpu_loop":
        while True:
            pass
    elif kind == "blocking":
        time.sleep(3600)
    elif kind == "leak":
        leaked = []
        while True:
            leaked.append(b"x" * (16 << 20))
            time.sleep(0.01)
    elif kind == "orphan":
        subprocess.Popen(["sleep", ORPHAN], start_new_session=True)
        os._exit(5)
    elif kind == "endless_await":
        await asyncio.sleep(3600)
    elif kind == "immortal":
        while True:
            with suppress(BaseException):
                await asyncio.sleep(3600)
    return 1.0


class MisbehavingTask(vf.Task[Data]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward
    async def behaves(self, trace: vf.Trace) -> float:
        return await misbehave(self.data.kind, trace)


class MisbehavingTaskset(vf.Taskset[MisbehavingTask, vf.TasksetConfig]):
    def load(self):
        for kind in KINDS:
            yield MisbehavingTask(Data(prompt="ab", kind=kind), self.config.task)


__all__ = ["InProcessHarness", "MisbehavingTaskset"]
