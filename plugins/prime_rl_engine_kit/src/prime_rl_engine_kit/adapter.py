"""LoRA adapters as PEFT writes them, and the weights that a base and an adapter make together.

    FOLDER/adapter_config.json          rank, alpha, which modules
    FOLDER/adapter_model.safetensors    A and B of each module; modules that are replaced whole

An engine with such a folder serves ``merged_tensors(base, folder)``. Everything is checked before
the first tensor is yielded: a bad adapter changes nothing in a live model. Importing this brings in
neither torch nor safetensors.

Shapes: r = rank, I = inputs of a linear module, O = its outputs; A [r, I], B [O, r], W [O, I].
E experts of a mixture have theirs in one pair: A [E r, I], expert after expert; B [O, r E], the
experts innermost.
Source: LoRA, arXiv 2106.09685, section 4.1; rsLoRA, arXiv 2312.03732, section 3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from prime_rl import WeightsError
from prime_rl_engine_kit.model_files import ModelFiles, opened, regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Metadata key of ``adapter_model.safetensors``: the ``fingerprint`` of the adapter's base."""
STACKS = "stacks"
"""Another: ``StackLayout`` by module, as JSON. PEFT names a stacked parameter of transformers'
model, while a model's folder may have a tensor for each expert."""
PREFIX = "base_model.model."
"""PEFT puts it before every module's name."""

_READ = {"r", "lora_alpha", "use_rslora", "modules_to_save", "target_modules", "peft_type"}
_READ |= {"target_parameters"}
_HARMLESS = {
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "runtime_config", "megatron_core", "lora_dropout", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "init_lora_weights", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
}
"""Keys that do not change the merged weights. Any other has to be unset."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_UNSET: tuple[Any, ...] = (None, False, "none", {}, [])
_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` under which training does not start from an altered base."""


class StackLayout(TypedDict):
    """How the experts of a layer are stacked in one parameter of transformers' model."""

    num: int
    """E."""
    transposed: bool
    """Whether the parameter is [E, I, O] instead of [E, O, I]."""
    tensors: dict[str, list[int]]
    """By tensor of the model's folder: the rows of the parameter before it, then its shape."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors, checked against its own config, by the names of the base's tensors."""

    directory: Path
    tensors: Mapping[str, Tensor]
    """All of them, by the names that PEFT publishes them under."""
    scaling: float
    """The factor on B A: alpha / r; with rsLoRA alpha / sqrt(r)."""
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """(A, B) by the name of W, so that B A is added to W; [E, ...] each for a W of all experts."""
    replaced: Mapping[str, Tensor]
    """Tensors of ``modules_to_save``, which replace the base's."""
    target_modules: tuple[str, ...] | str | None
    """Ends of module names, or a pattern for whole names; None: unknown."""
    base: str | None
    """``fingerprint`` of its base; None: unknown."""


def is_adapter(directory: Path) -> bool:
    """Whether a folder of weights holds an adapter instead of a model."""
    return (directory / ADAPTER_CONFIG).exists() or (directory / ADAPTER_WEIGHTS).exists()


def merged_tensors(
    base_dir: Path, adapter_dir: Path, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model folder with an adapter added, one by one, by name and in the order of
    ``ModelFiles.tensors``.

    Tensors that the adapter does not change are as they are in the folder. The others are in
    float32: W + scaling * B A, or a module's replacement. One tensor of the base is in memory at a
    time. ``device``: where the products are computed and stay; None: the host. Raises
    ``WeightsError``, before the first tensor is yielded, if the adapter is damaged, incomplete, not
    supported or of another base.
    """
    base = ModelFiles(base_dir)
    adapter = read_adapter(adapter_dir)
    check_base(base, adapter)
    _check_fit(base, adapter)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for path, names in base.by_file():
            with opened(path) as file:
                for name in names:
                    if name in adapter.replaced:
                        yield name, adapter.replaced[name].float()
                    elif pair := adapter.pairs.get(name):
                        a, b = (half.to(device or "cpu") for half in pair)
                        weight = file.get_tensor(name).to(a.device)
                        yield name, merge(weight, a, b=b, scaling=adapter.scaling)
                    else:
                        yield name, file.get_tensor(name)

    return stream()


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling * B A, in float32: [O, I], or [E, O, I]."""
    import torch

    add = torch.addmm if weight.dim() == 2 else torch.baddbmm
    return add(weight.float(), b.float(), a.float(), alpha=scaling)


def read_adapter(directory: Path) -> Adapter:
    """Read and check an adapter. Raises ``WeightsError`` with its fault."""
    import torch

    config = _read_config(directory / ADAPTER_CONFIG)
    path = directory / ADAPTER_WEIGHTS
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata() or {}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise WeightsError(f"{path}: {name!r} holds values that aren't finite numbers")

    rank = config["r"]
    modules = config.get("modules_to_save") or []
    halves: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, half = name.removeprefix(PREFIX).rpartition(".lora_")
        if half in ("A.weight", "B.weight"):
            halves.setdefault(f"{module}.weight", {})[half[0]] = tensor
        elif ".lora_" not in name and any(_is_within(name, saved) for saved in modules):
            replaced[name.removeprefix(PREFIX)] = tensor
        else:
            raise WeightsError(f"{path}: {name!r} is not a tensor of a LoRA adapter")

    unused = [m for m in modules if not any(_is_within(name, m) for name in replaced)]
    if unused:
        raise WeightsError(f"{path}: no tensor of modules_to_save {unused}")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module, layout in _stacks(path, config, metadata).items():
        parts = halves.pop(f"{module}.weight", {})
        pair = _pair(path, f"{module}.weight", parts=parts, rank=rank * layout["num"])
        pairs |= _pairs_of_experts(path, module, pair=pair, layout=layout)

    pairs |= {name: _pair(path, name, parts=parts, rank=rank) for name, parts in halves.items()}
    if not tensors:
        raise WeightsError(f"{path}: there is no tensor in it")
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    targets = config.get("target_modules")
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        targets = None  # only some of the modules that it names
    targets = tuple(targets) if isinstance(targets, list) else targets
    return Adapter(
        directory,
        tensors,
        scaling=scaling,
        pairs=pairs,
        replaced=replaced,
        target_modules=targets,
        base=metadata.get(BASE),
    )


def _stacks(
    path: Path, config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, StackLayout]:
    """Raises ``WeightsError`` if the file does not say where its experts are in a folder."""
    parameters = config.get("target_parameters")
    if not parameters:
        return {}
    try:
        layouts: dict[str, StackLayout] = json.loads(metadata[STACKS])
        for layout in layouts.values():
            positive = layout["num"] > 0 and isinstance(layout["transposed"], bool)
            places = layout["tensors"].values()
            right = all(len(each) in (3, 4) and min(each) >= 0 for each in places)
            if not (positive and right):
                raise ValueError("a place is not its first row and a shape")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{path}: target_parameters is {parameters!r}, and the metadata {STACKS!r}, with which "
            "prime-rl says which tensors of a model folder these are, is missing or damaged "
            f"({error}). Merge the adapter with peft and load the model that this makes."
        ) from error

    return layouts


def _pairs_of_experts(
    path: Path, module: str, pair: tuple[Tensor, Tensor], layout: StackLayout
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Each tensor of the model's folder with the two halves of its adapter: those of all experts
    that it holds, or of a part of one expert."""
    num = layout["num"]
    (a, b) = pair
    a = a.view(num, -1, a.shape[1])
    b = b.view(len(b), -1, num).permute(2, 0, 1)
    if layout["transposed"]:  # (B A)^T = A^T B^T
        a, b = b.mT, a.mT
    for name, (first, *shape) in layout["tensors"].items():
        expert, row = divmod(first, b.shape[1])
        if len(shape) == 3:
            yield name, (a, b)
        elif expert >= num:
            raise WeightsError(f"{path}: {module} has {num} experts, and {name!r} is of another")
        else:
            yield name, (a[expert], b[expert, row : row + shape[0]])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(regular(path).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
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


def _pair(path: Path, name: str, parts: Mapping[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    module = _module(name)
    missing = {"A", "B"} - parts.keys()
    if missing:
        raise WeightsError(f"{path}: {module}.lora_{missing.pop()}.weight is missing")
    a = parts["A"]
    b = parts["B"]
    for half, tensor, found in (("A", a, a.shape[0]), ("B", b, b.shape[-1])):
        if tensor.dim() != 2 or found != rank:
            raise WeightsError(
                f"{path}: {module}.lora_{half}.weight has shape {list(tensor.shape)}, expected "
                f"rank {rank} ({ADAPTER_CONFIG}: r)"
            )

    return a, b


def check_base(base: ModelFiles, adapter: Adapter) -> None:
    """Raises ``WeightsError`` if an adapter names another base."""
    if adapter.base is not None and adapter.base != (found := base.fingerprint()):
        raise WeightsError(
            f"{adapter.directory}: the adapter was trained on the base {adapter.base}, and "
            f"{base.directory} is {found}. It belongs to the model that its run started from."
        )


def _check_fit(base: ModelFiles, adapter: Adapter) -> None:
    """Raises ``WeightsError`` unless each of the adapter's tensors fits one of the base, and none
    is missing."""
    where = adapter.directory
    shapes = {n: [*b.shape[:-1], a.shape[-1]] for n, (a, b) in adapter.pairs.items()}
    shapes |= {name: list(tensor.shape) for name, tensor in adapter.replaced.items()}
    for name, shape in shapes.items():
        entry = base.tensors.get(name)
        if entry is None:
            raise WeightsError(
                f"{where}: it changes {name!r}, which the base {base.directory} does not have"
            )

        if entry.dtype not in _FLOATS:
            raise WeightsError(
                f"{where}: it changes {name!r}, which the base {base.directory} holds as "
                f"{entry.dtype}; expected one of {', '.join(_FLOATS)}. Merging into quantized "
                "weights is not supported."
            )

        if entry.shape != shape:
            raise WeightsError(
                f"{where}: it makes {name!r} {shape}, in the base {base.directory} it is "
                f"{entry.shape}"
            )

    for name, tensor in adapter.replaced.items():
        if base.ties_embeddings() and len(tensor) == base.text_config().get("vocab_size"):
            raise WeightsError(
                f"{where}: modules_to_save replaces {name!r}, which the base {base.directory} ties "
                "to another matrix (tie_word_embeddings)"
            )

    wanted = {name for name in base.tensors if _is_target(name, adapter.target_modules)}
    missing = sorted(wanted - adapter.pairs.keys())
    if missing:
        raise WeightsError(
            f"{where}: no adapter for {len(missing)} of the {len(wanted)} modules that its "
            f"target_modules name, first {_module(missing[0])!r}"
        )


def _is_within(name: str, saved: str) -> bool:
    """Whether a tensor is of a module whose name ends with ``saved``, as PEFT compares them."""
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
