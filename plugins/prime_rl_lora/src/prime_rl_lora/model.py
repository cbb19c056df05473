"""The adapter inside the model: small matrices beside its linear modules.

PEFT adds them to the transformers model in place, so that the model keeps its class, its
``base_model`` and its head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl import ConfigError, WeightsError
from prime_rl.weights.tensors import pieces_of
from prime_rl_engine_kit.adapter import PREFIX, check_base, read_adapter
from prime_rl_engine_kit.model_files import ModelFiles

if TYPE_CHECKING:
    from prime_rl_lora.tuning import LoraConfig

NAME = "default"
"""PEFT's name of the only adapter, a part of its parameters' names."""


def add_lora(model: PreTrainedModel, config: LoraConfig) -> Any:
    """Freeze the model and add an adapter, which changes nothing yet; its ``peft.LoraConfig``.

    Raises ``ConfigError`` if a module is missing or cannot have an adapter.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    saved = config.modules_to_save
    targets = config.target_modules or block_linears(model, saved)
    _check_targets(model, targets, saved)
    _check_saved(model, saved)
    stacked = _stacked(model) if config.experts else {}
    # "experts.down_proj" names that parameter in each layer.
    ends = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    peft_config = PeftConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.use_rslora,
        target_modules=_qualified(model, targets),
        target_parameters=ends or None,
        modules_to_save=list(saved) or None,
    )
    with _stand_ins(model, saved, stacked):
        # In a model of transformers, PEFT would take gate_proj and up_proj of a shared expert for
        # names of an older version, and adapt all experts instead. It looks at the outer module.
        inject_adapter_in_model(peft_config, nn.ModuleList([model]), NAME)

    if stacked:
        from prime_rl_lora.experts import install

        install(model)

    model.eval()
    return peft_config


def _qualified(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """In a mixture with the name of the module around: the folder of its base calls a matrix of
    each expert ``down_proj`` too, and a reader would miss their adapters."""
    from prime_rl_lora.experts import stacks

    if not stacks(model):
        return list(targets)
    ends = {
        ".".join(name.split(".")[-2:]) if "." not in target else target
        for name, module in model.named_modules()
        for target in targets
        if isinstance(module, nn.Linear) and f".{name}".endswith(f".{target}")
    }
    return sorted(ends)


def _stacked(model: PreTrainedModel) -> dict[str, Tensor]:
    from prime_rl_lora.experts import stacked_parameters

    stacked = stacked_parameters(model)
    if not stacked:
        raise ConfigError(
            f"trainer.lora.experts: {type(model).__name__} has no experts that can have adapters: "
            "expected a mixture whose experts transformers stacks in one parameter and computes by "
            "grouped products. Leave experts out."
        )

    return stacked


@contextmanager
def _stand_ins(
    model: PreTrainedModel, saved: Sequence[str], stacked: Iterable[str]
) -> Iterator[None]:
    """In place of weights that are still in their files, on the meta device: PEFT moves a new
    matrix to the device of the weight beside it, where its random numbers would be lost."""
    linears = [
        f"{n}.weight"
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and not _matches(n, saved)
    ]
    places = [
        (model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], n in stacked)
        for n in [*linears, *stacked]
    ]
    kept = [
        (m, name, is_stack, w) for m, name, is_stack in places if (w := getattr(m, name)).is_meta
    ]
    for module, name, is_stack, weight in kept:
        # PEFT reads the shape of a stack, which takes no memory like this.
        value = torch.empty(1).expand(weight.shape) if is_stack else torch.empty(0)
        setattr(module, name, nn.Parameter(value))

    yield
    for module, name, _, weight in kept:
        setattr(module, name, weight.requires_grad_(getattr(module, name).requires_grad))


def block_linears(model: PreTrainedModel, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The last names of all linear modules but the head: ``q_proj``, ``down_proj`` ..."""
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not _matches(name, without)
    }
    return tuple(sorted(names))


def _check_targets(model: PreTrainedModel, targets: Sequence[str], saved: Sequence[str]) -> None:
    head = model.get_output_embeddings()
    for target in targets:
        modules = {n: m for n, m in model.named_modules() if f".{n}".endswith(f".{target}")}
        if not modules:
            raise ConfigError(
                f"trainer.lora.target_modules: no module is called {target!r}; linear ones are "
                f"called {', '.join(block_linears(model))}"
            )

        for name, module in modules.items():
            if module is head or not isinstance(module, nn.Linear) or _matches(name, saved):
                raise ConfigError(
                    f"trainer.lora.target_modules: {name!r} is a {type(module).__name__} that "
                    "cannot have an adapter: expected linear modules below the head that are not "
                    "in modules_to_save"
                )


def _check_saved(model: PreTrainedModel, saved: Sequence[str]) -> None:
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    for end in saved:
        modules = {n: m for n, m in model.named_modules() if _matches(n, [end])}
        if not modules:
            raise ConfigError(f"trainer.lora.modules_to_save: no module's name ends with {end!r}")
        if model.config.tie_word_embeddings and any(m in tied for m in modules.values()):
            raise ConfigError(
                f"trainer.lora.modules_to_save: {end!r} is tied to another matrix of this model "
                "(tie_word_embeddings), which would not follow. Leave it out."
            )

        weights = {
            f"{name}.{inner}": weight
            for name, module in modules.items()
            for inner, weight in module.named_parameters()
        }
        # An adapter is published by the model's names, and engines look for those of its folder.
        for piece in pieces_of(model, weights):
            if piece.name != piece.source:
                raise ConfigError(
                    f"trainer.lora.modules_to_save: {end!r} has {piece.source!r}, which a folder "
                    f"of this model has in parts ({piece.name!r} and others), so engines could not "
                    "load it. Name modules without experts; trainer.lora.experts = true trains an "
                    "adapter on each expert."
                )


def _matches(name: str, ends: Sequence[str]) -> bool:
    """As PEFT compares ``modules_to_save``."""
    return any(name.endswith(end) for end in ends)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base alone, modules that train in full included."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    # PEFT's own switch also sets ``requires_grad``, which sharded parameters have to keep.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by PEFT's names, in its shapes; sharded if the model is. Every rank
    calls this."""
    from prime_rl_lora.experts import for_file

    by_expert = _by_expert(model)
    return {
        _in_files(name): for_file(each) if name in by_expert else each
        for name, each in model.named_parameters()
        if each.requires_grad
    }


def _by_expert(model: nn.Module) -> dict[str, int]:
    """The parameters that are laid out in another way than in files, with the number of experts."""
    from peft.tuners.lora.layer import ParamWrapper

    return {
        f"{name}.lora_B.{NAME}.weight": module.num_experts
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


def _in_files(name: str) -> str:
    return PREFIX + name.replace(f".modules_to_save.{NAME}.", ".").replace(f".{NAME}.", ".")


def load_adapter(
    model: PreTrainedModel, config: LoraConfig, base: ModelFiles, adapter_dir: Path
) -> None:
    """Copy a published adapter into the model. Raises ``ConfigError`` if it is of another base,
    rank or set of modules."""
    from prime_rl_lora.experts import from_file

    try:
        saved = read_adapter(adapter_dir)
        check_base(base, saved)
    except WeightsError as error:
        raise ConfigError(f"--resume: {error}") from error

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    mine = adapter_tensors(model)
    shapes = [{n: list(t.shape) for n, t in each.items()} for each in (saved.tensors, mine)]
    scaling = config.alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)
    if shapes[0] != shapes[1] or saved.scaling != scaling:
        strange = [n for n in sorted(shapes[0] | shapes[1]) if shapes[0].get(n) != shapes[1].get(n)]
        raise ConfigError(
            f"--resume: the adapter in {adapter_dir} is not the one that [trainer.lora] describes: "
            f"scaling {saved.scaling:g}, expected {scaling:g}; {len(strange)} tensors of another "
            f"shape or missing{f', first {strange[0]!r}' if strange else ''}. Set the table back."
        )

    by_expert = _by_expert(model)
    with torch.no_grad():
        for name, parameter in trained.items():
            value = saved.tensors[_in_files(name)]
            if name in by_expert:
                value = from_file(value, by_expert[name])
            (module, _, last) = name.rpartition(".")
            if parameter.is_meta:  # of a module that trains whole, and is still in the base's file
                value = nn.Parameter(value.to(parameter.dtype))
                model.get_submodule(module).register_parameter(last, value)
            else:
                parameter.copy_(value)
