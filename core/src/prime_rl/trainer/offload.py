"""Colocated: the trainer's part of the GPU, held only while a step is taken.

    load -> step -> publish -> unload -> the version is announced, and the engines wake

Weights and optimizer state rest on the host in between. On a CPU both are there anyway, and moving
them does nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

HOST = torch.device("cpu")


class Offload:
    """Moves a model and its optimizer's state to the device and back. ``enabled = False``: they
    stay where they are."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, enabled: bool
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device, self._enabled = device, enabled

    def load(self) -> float:
        """Everything onto the device, before a step; the seconds it took."""
        return self._move(self._device)

    def unload(self) -> float:
        """Everything to the host, and the device's memory back to whoever shares it; seconds."""
        if not self._enabled:
            return 0.0
        seconds = self._move(HOST)
        started = time.perf_counter()
        if self._device.type == "cuda":
            gc.collect()  # graphs in cycles hold activations
            torch.cuda.empty_cache()
        return seconds + time.perf_counter() - started

    def _move(self, device: torch.device) -> float:
        if not self._enabled:
            return 0.0
        started = time.perf_counter()
        self._model.to(device)  # in place: parameters stay the objects that the optimizer knows
        for state, name in moving_state(self._optimizer):
            state[name] = state[name].to(device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def moving_state(optimizer: Optimizer) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Tensors that lie where their parameters lie. The count of steps does so only where the
    optimizer is fused or capturable; elsewhere it stays on the host."""
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if torch.is_tensor(value) and (counts_there or name != "step"):
                    yield state, name
