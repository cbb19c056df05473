"""``[trainer.lora]``: adapters in PEFT's format, with the fingerprint of their base."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from prime_rl import PluginConfig, Removed, Tuning
from prime_rl_engine_kit.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    STACKS,
    StackLayout,
    merged_tensors,
)
from prime_rl_engine_kit.model_files import ModelFiles
from prime_rl_lora.names import check_names

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class LoraConfig(PluginConfig):
    """``[trainer.lora]``."""

    rank: PositiveInt = 16
    """r, the inner size of the two matrices: A [r, inputs], B [outputs, r]."""
    alpha: PositiveInt = 32
    """A module's output is W x + alpha / rank * B A x."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank): large ranks learn as fast as small ones."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Name suffixes of the linear modules with an adapter. None: all but the head."""
    experts: bool = False
    """Add an adapter of this rank to each expert of a mixture."""
    modules_to_save: list[str] = []
    """Name suffixes of modules that train in full and are published with the adapter."""

    removed = {
        "dropout": Removed(
            default=0.0,
            instead="Tokens are sampled without dropout, so logprobs with it would not be those "
            "of the policy that sampled. Leave it out.",
        )
    }


class Lora(Tuning):
    """Trains small matrices beside the frozen weights (LoRA, arXiv 2106.09685)."""

    name = "lora"
    config_class = LoraConfig
    config: LoraConfig
    weights_file = ADAPTER_WEIGHTS

    peft_config: Any
    """The ``peft.LoraConfig`` of the prepared model."""
    base: str
    """``ModelFiles.fingerprint`` of its folder."""
    stacks: Mapping[str, StackLayout]
    """Layouts of the parameters that stack experts and have an adapter, by the module of its
    halves."""

    def check(self, model_dir: Path) -> None:
        """Names that no module has are refused."""
        check_names(self.config.target_modules or (), self.config.modules_to_save, model_dir)

    def prepare(self, model: PreTrainedModel, model_dir: Path, adapter: Path | None) -> None:
        """Raises ``ConfigError`` if a module is missing or cannot have an adapter, or if the
        adapter is of another base, rank or set of modules."""
        from prime_rl_lora.model import add_lora, load_adapter

        self.stacks = {}
        if self.config.experts:
            from prime_rl_lora.experts import by_module, layouts_of

            layouts = layouts_of(model)

        self.peft_config = add_lora(model, self.config)
        if self.config.experts:
            self.stacks = by_module(model, layouts)
        base = ModelFiles(model_dir)
        self.base = base.fingerprint()
        if adapter is not None:
            load_adapter(model, self.config, base=base, adapter_dir=adapter)

    def initial(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """The base, with the adapter switched off."""
        from prime_rl_lora.model import adapter_off

        return adapter_off(model)

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """By PEFT's names."""
        from prime_rl_lora.model import adapter_tensors

        return adapter_tensors(model)

    def metadata(self) -> dict[str, str]:
        """The fingerprint of the base; and where its experts have the adapter."""
        return {BASE: self.base} | ({STACKS: json.dumps(self.stacks)} if self.stacks else {})

    def write_config(self, directory: Path) -> None:
        """``adapter_config.json``, which PEFT and our engines read with the tensors."""
        config = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self.peft_config.to_dict().items()
        }
        (directory / ADAPTER_CONFIG).write_text(
            json.dumps(config, indent=2, sort_keys=True), "utf-8"
        )

    def merge(self, model_dir: Path, adapter: Path, directory: Path) -> None:
        """One tensor at a time."""
        import torch

        from prime_rl.trainer.tensor_file import write_stream

        like = {
            name: torch.empty(entry.shape, dtype=torch.float32, device="meta")
            for name, entry in ModelFiles(model_dir).tensors.items()
        }
        merged = merged_tensors(model_dir, adapter)
        stream = (tensor.float() for _, tensor in merged)
        write_stream(directory / "model.safetensors", like, stream)
