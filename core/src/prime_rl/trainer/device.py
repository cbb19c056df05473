"""The trainer's device: which one, how host arrays get there, and when the trainer holds it."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Iterator, MutableMapping
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prime_rl.errors import ConfigError
from prime_rl.trainer.rank import Rank

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


def choose_device(name: Literal["auto", "cpu", "cuda"], rank: Rank | None = None) -> torch.device:
    """The device of ``rank``. Raises ``ConfigError`` if it has no GPU, or would share one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is 'cuda', but torch sees no GPU. Set it to 'auto' or 'cpu'."
        )

    if name == "cpu" or not torch.cuda.is_available():
        return HOST
    if rank is None or rank.size == 1:
        return torch.device("cuda")
    if rank.local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank.number} of {rank.size} is number {rank.local} on its machine, where "
            f"torch sees {torch.cuda.device_count()} GPUs: ranks cannot share one. Lower "
            "trainer.num_ranks, give deployment.trainer_gpus more, or set trainer.device = 'cpu'."
        )

    return torch.device("cuda", rank.local)


Precision: TypeAlias = Literal["float32", "bfloat16"]


def compute_dtype(name: Literal["auto"] | Precision, device: torch.device) -> Precision:
    """What ``trainer.dtype`` is on the device. An older GPU would emulate bfloat16, slowly."""
    if name == "auto":
        on_gpu = device.type == "cuda"
        computes_it = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if computes_it else "float32"
    return name


def to_device(column: npt.NDArray[Any], dtype: type, device: torch.device) -> Tensor:
    """The column as a tensor of ``dtype`` on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(column, dtype))
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from ordinary memory waits until the device has finished all its work. A copy from
    # pinned memory is queued, and the host goes on.
    return tensor.pin_memory().to(device, non_blocking=True)


class Offload:
    """Colocated with engines: moves model and optimizer state to the device for one step.

        load -> step -> publish -> unload -> the version is announced, and the engines wake

    ``enabled = False``: nothing moves. On the host the state lies in pinned memory, which is kept:
    copies run at the speed of the bus, and no page is allocated anew at each step.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], device: torch.device, enabled: bool
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._enabled = enabled
        self._home: dict[int, Tensor] = {}
        """Pinned memory of each tensor that moves, by its position in the order of moves."""
        self._pins = device.type == "cuda"

    def load(self) -> float:
        """Move everything to the device; the seconds it took."""
        return self._move(self._device)

    def unload(self) -> float:
        """Move everything to the host and free the device's memory; the seconds it took."""
        started = time.perf_counter()
        self._move(HOST)
        self.give_back()
        return time.perf_counter() - started if self._enabled else 0.0

    def give_back(self) -> None:
        """Free the device's memory that holds nothing: torch keeps it, and engines need it."""
        if self._enabled and self._device.type == "cuda":
            gc.collect()  # graphs in cycles hold activations
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> float:
        if not self._enabled:
            return 0.0

        started = time.perf_counter()
        positions = itertools.count()

        def moved(tensor: Tensor) -> Tensor:
            return self._moved(tensor, device, next(positions))

        # As ``Module.to``: in place, so that parameters stay the objects that the optimizer knows.
        self._model._apply(moved)  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            for state, name in moving_state(optimizer):
                state[name] = moved(state[name])

        # The copies are only queued, and the host must not read its memory before they are done.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _moved(self, tensor: Tensor, device: torch.device, position: int) -> Tensor:
        """The tensor on the device; a copy that is only queued if a GPU is involved."""
        if tensor.device.type == device.type:  # a tied parameter comes twice
            return tensor
        if device != HOST or not self._pins:
            return tensor.to(device, non_blocking=self._pins)

        home = self._home.get(position)
        # Positions shift when an optimizer gets more state: then the memory has another shape.
        if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
            try:
                home = torch.empty_like(tensor, device=HOST, pin_memory=True)
            except RuntimeError as error:
                logger.warning(
                    "the host has no more pinned memory for the trainer's state, so that moving it "
                    "is slower: %s",
                    error,
                )
                self._pins = False
                return tensor.to(HOST)

            self._home[position] = home

        return home.copy_(tensor, non_blocking=True)


def moving_state(optimizer: Optimizer) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """State tensors that belong on the device of their parameters. The step count belongs there
    only if the optimizer is fused or capturable."""
    for group in optimizer.param_groups:
        with_steps = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            # An optimizer may keep its state on the host: its groups then have `on_host`.

            for name, value in state.items() if not group.get("on_host") else ():
                if torch.is_tensor(value) and (with_steps or name != "step"):
                    yield state, name
