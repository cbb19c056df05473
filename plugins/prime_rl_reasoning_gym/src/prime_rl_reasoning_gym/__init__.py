"""Makes the taskset ``reasoning-gym-tasks`` available under the shorter id ``reasoning-gym``.

verifiers resolves the id ``reasoning-gym`` to ``verifiers.v1.tasksets.reasoning_gym``, where its
own tasksets are, and otherwise to the top-level module ``reasoning_gym``: the package of the
generators, which exports no taskset. ``Alias`` fills the first place. It is the last finder on
``sys.meta_path``, so a taskset of that name in verifiers itself would win.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

ALIAS = "verifiers.v1.tasksets.reasoning_gym"
TASKSET = "reasoning_gym_tasks"


class Alias(MetaPathFinder, Loader):
    """Finds the module ``TASKSET`` when ``ALIAS`` is imported. Nothing is imported before that."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == ALIAS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(TASKSET)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: ``create_module`` has run it under its own name."""


if not any(isinstance(finder, Alias) for finder in sys.meta_path):
    sys.meta_path.append(Alias())
