"""The experts by which an engine computed each token, in its reply.

Shapes: N = tokens that were computed (all but the last sampled one), L = layers, k = experts per
token.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Routes: TypeAlias = npt.NDArray[Any]
"""[N, L, k] uint8 or uint16."""


def routes_entry(routes: Routes | None, start: int) -> dict[str, Any] | None:
    """``routed_experts`` of a choice: the rows from position ``start`` on, as renderers and
    verifiers read them. None: they were not recorded."""
    if routes is None:
        return None
    return packed_entry(routes[start:].tobytes(), routes[start:].shape, routes.dtype.name, start)


def packed_entry(data: bytes, shape: tuple[int, ...], dtype: str, start: int) -> dict[str, Any]:
    """The same from the bytes of the rows. ``data`` is the first key: renderers look for the two
    keys in this order."""
    text = b64encode(data).decode()
    return {"data": text, "shape": [*shape], "start": start, "dtype": dtype}


def joined(prompt: Routes | None, completion: Routes) -> Routes:
    """The routes of both, in as few bytes as their experts need. ``prompt``: None if ``completion``
    has them all."""
    routes = completion if prompt is None else np.concatenate([prompt, completion])
    return narrowed(routes, num_experts=int(routes.max(initial=0)) + 1)


def narrowed(routes: Routes, num_experts: int) -> Routes:
    """In one byte each if all the experts of a layer fit."""
    return routes.astype(np.uint8 if num_experts <= 256 else np.uint16)
