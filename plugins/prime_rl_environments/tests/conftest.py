"""A scripted inference engine on loopback, and tasksets that need no file."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import pytest
from scripted_replies import TOKENIZER, ScriptedEngine, replying


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with replying() as scripted:
        yield scripted


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def taskset_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``taskset_module("my_id", ClassA, ClassB)`` makes verifiers find these classes by that id."""

    def install(name: str, *classes: type) -> None:
        module = ModuleType(name)
        module.__all__ = [cls.__name__ for cls in classes]  # type: ignore[attr-defined]
        for cls in classes:
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)

    return install
