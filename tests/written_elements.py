"""How much a computation writes: a measure of its work that does not depend on the machine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WrittenElements(TorchDispatchMode):
    """Counts the elements of all tensors that operations make; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        result = func(*args, **(kwargs or {}))

        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in storages:
                self.number += each.numel()
        return result
