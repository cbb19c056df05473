"""New weights: all are read and checked before any of them is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl import WeightsError
from prime_rl_broadcast.group import Header
from prime_rl_engine_kit.adapter import is_adapter, merged_tensors
from prime_rl_engine_kit.model_files import ModelFiles, opened

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
"""Suffixes of the two names of one matrix in a tied model."""
BLOCK = 1 << 24
"""Elements that are checked at a time: 64 MiB of float32."""


class Staged:
    """Weights that fit the model, ready to be loaded once. The files stay open until ``close``, so
    that the folder may be deleted before."""

    def __init__(
        self,
        directory: Path,
        base: ModelFiles,
        *,
        look_inside: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Raises ``WeightsError`` if the folder is damaged or does not fit ``base``. ``device``:
        where values are checked, and an adapter is merged.

        ``look_inside``: read every value and refuse those that aren't finite.
        """
        self._stack = ExitStack()
        self._merged: Iterator[tuple[str, Tensor]] | None = None
        self._files: dict[str, Any] = {}
        if is_adapter(directory):
            self._merged = merged_tensors(base.directory, directory, device)
            return

        files = ModelFiles(directory)
        check_layout(files, base)
        with ExitStack() as stack:
            paths = {entry.path for entry in files.tensors.values()}
            handles = {path: stack.enter_context(opened(path)) for path in paths}
            self._files = {name: handles[entry.path] for name, entry in files.tensors.items()}
            self._untie(files, base)
            if look_inside:
                self._check_values(directory, device or torch.device("cpu"))
            self._stack = stack.pop_all()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under their Hugging Face names, one at a time."""
        if self._merged is not None:
            yield from self._merged
        for name, file in self._files.items():
            yield name, file.get_tensor(name)

    def close(self) -> None:
        self._stack.close()
        self._files = {}

    def _untie(self, files: ModelFiles, base: ModelFiles) -> None:
        """Drop the second copy of a tied matrix. Different values mean a model without tying."""
        if not base.ties_embeddings():
            return
        heads = [name for name in self._files if name.endswith(HEAD)]
        embeddings = [name for name in self._files if name.endswith(EMBEDDING)]
        for head in heads:
            file = self._files.pop(head)
            for name in embeddings[:1]:
                if not torch.equal(file.get_tensor(head), self._files[name].get_tensor(name)):
                    raise WeightsError(
                        f"{files.directory}: {head!r} and {name!r} are one tied parameter, but "
                        "differ"
                    )

    def _check_values(self, directory: Path, device: torch.device) -> None:
        """On a GPU one block at a time, because vLLM leaves hardly any memory free."""
        on_gpu = device.type == "cuda"
        stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream) if on_gpu else nullcontext():
            for name, file in self._files.items():
                values = file.get_tensor(name)
                blocks = values.flatten().split(BLOCK) if values.is_floating_point() else ()
                if not all(block.to(device).float().sum().isfinite() for block in blocks):
                    raise WeightsError(f"{directory}: {name!r} contains values that aren't finite")


class Announced:
    """The layout of a broadcast that has not begun, in the form that ``check_layout`` reads."""

    def __init__(self, header: Header) -> None:
        self.directory = Path("broadcast")
        self.tensors = {info.name: info for info in header}


def check_layout(files: ModelFiles | Announced, base: ModelFiles) -> None:
    """Require the same tensors with the same shapes and kinds. Raises ``WeightsError``.

    The head of a tied model is optional in both.
    """
    free = {n for n in files.tensors.keys() | base.tensors.keys() if n.endswith(HEAD)}
    free = free if base.ties_embeddings() else set()
    missing = sorted(base.tensors.keys() - files.tensors.keys() - free)
    if missing:
        raise WeightsError(
            f"{files.directory}: {_listed(missing)} missing; the model has {len(base.tensors)} "
            "tensors"
        )

    unknown = sorted(files.tensors.keys() - base.tensors.keys() - free)
    if unknown:
        raise WeightsError(f"{files.directory}: {_listed(unknown)} not in {base.directory}")
    for name in files.tensors.keys() & base.tensors.keys():
        actual = files.tensors[name]
        wanted = base.tensors[name]
        if actual.shape != wanted.shape:
            raise WeightsError(
                f"{files.directory}: {name!r} has shape {actual.shape}, the model's has "
                f"{wanted.shape}"
            )

        if _is_float(actual.dtype) != _is_float(wanted.dtype):
            raise WeightsError(
                f"{files.directory}: {name!r} is {actual.dtype}, the model's is {wanted.dtype}"
            )


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
