"""LoRA adapters as PEFT writes them, and the weights that a base and an adapter make together.

    FOLDER/adapter_config.json          rank, alpha, which modules
    FOLDER/adapter_model.safetensors    A and B of each module; modules that are replaced whole

An engine that is handed such a folder serves ``merged_tensors(base, folder)``. Everything is
checked before the first tensor is handed out, so that who writes them into a live model stops
before it has changed anything. Importing this brings in neither torch nor safetensors.

Shapes: r = rank, I = inputs of a linear module, O = its outputs; A [r, I], B [O, r], W [O, I].
Source: LoRA, arXiv 2106.09685, section 4.1; rsLoRA, arXiv 2312.03732, section 3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.errors import WeightsError
from prime_rl.model_files import ModelFiles, opened

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Metadata key of ``adapter_model.safetensors``: the ``fingerprint`` of the adapter's base."""
PREFIX = "base_model.model."
"""PEFT puts it before every module's name."""

_READ = {"r", "lora_alpha", "use_rslora", "modules_to_save", "target_modules", "peft_type"}
_HARMLESS = {
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "runtime_config", "megatron_core", "lora_dropout", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "init_lora_weights", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
}
"""Keys that do not change what base and adapter make together. Any other has to be unset."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_UNSET: tuple[Any, ...] = (None, False, "none", {}, [])
_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` under which training does not start from an altered base."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors, checked against its own config, by the names of the base's tensors."""

    directory: Path
    tensors: Mapping[str, Tensor]
    """All of them, by the names that PEFT publishes them under."""
    scaling: float
    """What B A is multiplied by: alpha / r; with rsLoRA alpha / sqrt(r)."""
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """(A, B) by the name of W."""
    replaced: Mapping[str, Tensor]
    """Tensors of ``modules_to_save``, which take the place of the base's."""
    target_modules: tuple[str, ...] | str | None
    """Ends of module names, or a pattern for whole names; None: which ones cannot be told."""
    base: str | None
    """``fingerprint`` of its base; None if whoever wrote it did not say."""


def is_adapter(directory: Path) -> bool:
    """Whether a folder of weights holds an adapter instead of a model."""
    return (directory / ADAPTER_CONFIG).exists() or (directory / ADAPTER_WEIGHTS).exists()


def merged_tensors(base_dir: Path, adapter_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model folder with an adapter added, one by one, by their names there and in
    the order of ``ModelFiles.tensors``.

    What the adapter does not touch comes as it lies there, what it does in float32:
    W + scaling * B A, or a module's replacement. One tensor of the base is in memory at a time.
    Raises ``WeightsError``, before the first tensor comes, if the adapter is damaged, incomplete,
    of a kind that is not supported or not of this base.
    """
    base, adapter = ModelFiles(base_dir), read_adapter(adapter_dir)
    check_base(base, adapter)
    _check_fit(base, adapter)
    return _stream(base, adapter)


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling * B A, in float32: [O, I]."""
    import torch

    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)


def _stream(base: ModelFiles, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for path, names in base.by_file():
        with opened(path) as file:
            for name in names:
                if name in adapter.replaced:
                    yield name, adapter.replaced[name].float()
                elif name in adapter.pairs:
                    yield name, merge(file.get_tensor(name), *adapter.pairs[name], adapter.scaling)
                else:
                    yield name, file.get_tensor(name)


def read_adapter(directory: Path) -> Adapter:
    """Read and check an adapter. Raises ``WeightsError`` saying what is wrong with it."""
    config = _read_config(directory / ADAPTER_CONFIG)
    path = directory / ADAPTER_WEIGHTS
    tensors, base = _read_tensors(path)
    rank, modules = config["r"], config.get("modules_to_save") or []
    halves: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, half = name.removeprefix(PREFIX).rpartition(".lora_")
        if half in ("A.weight", "B.weight"):
            halves.setdefault(f"{module}.weight", {})[half[0]] = tensor
        elif ".lora_" not in name and any(_is_within(name, saved) for saved in modules):
            replaced[name.removeprefix(PREFIX)] = tensor
        else:
            raise WeightsError(f"{path}: {name!r} is no part of a LoRA adapter that we know")
    if unused := [m for m in modules if not any(_is_within(name, m) for name in replaced)]:
        raise WeightsError(f"{path}: no tensor of modules_to_save {unused}")
    pairs = {name: _pair(path, name, parts, rank) for name, parts in halves.items()}
    if not tensors:
        raise WeightsError(f"{path}: there is no tensor in it")
    root = math.sqrt(rank) if config.get("use_rslora") else rank
    scaling = config["lora_alpha"] / root
    return Adapter(directory, tensors, scaling, pairs, replaced, _targets(config), base)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: can't be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise WeightsError(f"{path}: peft_type is {kind!r}, expected 'LORA'")
    strange = {
        key: value
        for key, value in config.items()
        if key not in _READ | _HARMLESS and value not in _UNSET
    }
    if config.get("init_lora_weights") not in _LEAVES_THE_BASE:
        strange["init_lora_weights"] = config["init_lora_weights"]
    if strange:
        key, value = next(iter(strange.items()))
        raise WeightsError(
            f"{path}: {key} is {value!r}, which merging into the base does not support; expected "
            "it unset. Merge the adapter with peft and load the model that this makes."
        )
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(config.get(key), kind) or not config[key] > 0:
            raise WeightsError(f"{path}: {key} is {config.get(key)!r}, expected a positive number")
    return config


def _targets(config: Mapping[str, Any]) -> tuple[str, ...] | str | None:
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return None
    targets = config.get("target_modules")
    return tuple(targets) if isinstance(targets, list) else targets


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    import torch

    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        base = (file.metadata() or {}).get(BASE)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise WeightsError(f"{path}: {name!r} holds values that aren't finite numbers")
    return tensors, base


def _pair(path: Path, name: str, parts: Mapping[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    module = _module(name)
    if missing := {"A", "B"} - parts.keys():
        raise WeightsError(f"{path}: {module}.lora_{missing.pop()}.weight is missing")
    a, b = parts["A"], parts["B"]
    for half, tensor, found in (("A", a, a.shape[0]), ("B", b, b.shape[-1])):
        if tensor.dim() != 2 or found != rank:
            raise WeightsError(
                f"{path}: {module}.lora_{half}.weight has shape {list(tensor.shape)}, expected "
                f"rank {rank} ({ADAPTER_CONFIG}: r)"
            )
    return a, b


def check_base(base: ModelFiles, adapter: Adapter) -> None:
    """Raises ``WeightsError`` if an adapter says that it was trained on another base."""
    if adapter.base is not None and adapter.base != (found := base.fingerprint()):
        raise WeightsError(
            f"{adapter.directory}: the adapter was trained on the base {adapter.base}, and "
            f"{base.directory} is {found}. It belongs to the model that its run started from."
        )


def _check_fit(base: ModelFiles, adapter: Adapter) -> None:
    """Each of the adapter's tensors has its place in the base, and none is missing."""
    for name, (a, b) in adapter.pairs.items():
        _check_shape(base, adapter, name, [len(b), a.shape[1]])
    for name, tensor in adapter.replaced.items():
        _check_shape(base, adapter, name, list(tensor.shape))
        if base.ties_embeddings() and len(tensor) == base.vocab_size:
            raise WeightsError(
                f"{adapter.directory}: modules_to_save replaces {name!r}, which the base "
                f"{base.directory} ties to another matrix (tie_word_embeddings)"
            )
    wanted = {name for name in base.tensors if _is_target(name, adapter.target_modules)}
    if missing := sorted(wanted - adapter.pairs.keys()):
        raise WeightsError(
            f"{adapter.directory}: no adapter for {len(missing)} of the {len(wanted)} modules that "
            f"its target_modules name, first {_module(missing[0])!r}"
        )


def _check_shape(base: ModelFiles, adapter: Adapter, name: str, shape: list[int]) -> None:
    if name not in base.tensors:
        raise WeightsError(
            f"{adapter.directory}: it changes {name!r}, which the base {base.directory} does not "
            "have"
        )
    if (dtype := base.tensors[name].dtype) not in _FLOATS:
        raise WeightsError(
            f"{adapter.directory}: it changes {name!r}, which the base {base.directory} holds as "
            f"{dtype}; expected one of {', '.join(_FLOATS)}. Merging into quantised weights is not "
            "supported."
        )
    if (found := base.tensors[name].shape) != shape:
        raise WeightsError(
            f"{adapter.directory}: it makes {name!r} {shape}, in the base {base.directory} it is "
            f"{found}"
        )


def _is_within(name: str, saved: str) -> bool:
    """Whether a tensor is of a module whose name ends with ``saved`` (as PEFT compares them)."""
    parts = _module(name).split(".")
    return any(".".join(parts[: count + 1]).endswith(saved) for count in range(len(parts)))


def _is_target(name: str, targets: tuple[str, ...] | str | None) -> bool:
    module, _, what = name.rpartition(".")
    if targets is None or what != "weight":
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in targets)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
