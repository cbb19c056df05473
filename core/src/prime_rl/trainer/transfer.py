"""Host arrays onto the device, without waiting for what it is doing.

A copy from ordinary memory waits until the device has finished all it was asked before. From pinned
memory it lines up behind it, and the host goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(column: npt.NDArray[Any], dtype: type, device: torch.device) -> Tensor:
    """The column as a tensor of ``dtype`` on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(column, dtype))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
