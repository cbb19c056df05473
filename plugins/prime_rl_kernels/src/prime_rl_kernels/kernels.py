"""The kernels ``auto``, ``varlen`` and ``mask``, and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from prime_rl import Kernel, PluginConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from prime_rl.trainer.packing import Packing

FEW_LOGITS = {"cpu": 2**22, "cuda": 2**26}
"""By device: up to as many logits of a row, keeping them is faster than computing them again. On
CPU the crossover was measured between 2M and 8M; on a GPU it is a bound on memory, 256 MiB."""
BLOCK_LOGITS = {"cpu": 2**20, "cuda": 2**26}
"""By device: logits of a block of the fused head. 4 MiB in float32 fit into a CPU's cache."""


class KernelConfig(PluginConfig):
    """Keys of ``[trainer]``; its page documents them."""

    fused_lm_head: Literal["auto"] | bool = "auto"
    """Compute logits in blocks and never store them."""
    share_prompts: bool = True
    """Compute a prompt shared by rollouts of a row once."""
    triton_kernels: bool = True
    """On a GPU: norms, rotary embeddings, SwiGLU and the head's passes over logits by Triton."""
    keep_attention: bool = False
    """Recomputed blocks keep the output of their attention."""
    offload_activations: bool = False
    """The inputs of recomputed blocks lie in host memory between the passes."""


class Varlen(Kernel):
    """The row in one call; each document attends to itself. Many logits are computed block by
    block."""

    name = "varlen"
    config_class = KernelConfig
    computes_tokens_of_others = True
    config: KernelConfig

    def prepare(self, compiled: bool) -> None:
        """Register experts and attentions. The latter are not compiled: the documents differ with
        every row, and a graph that knew them would be compiled for each."""
        import torch

        from prime_rl_kernels import attention, experts

        attention.register(torch.compiler.disable) if compiled else attention.register()
        experts.register()

    def prepare_blocks(
        self, model: nn.Module, recomputed: int, compiled: bool, device: torch.device
    ) -> None:
        """Besides, layers are replaced by faster ones; the compiler has its own."""
        from prime_rl_kernels import gpu_layers
        from prime_rl_kernels.blocks import prepare_blocks
        from prime_rl_kernels.layers import replace_layers
        from prime_rl_kernels.products import replace_linears

        if not compiled and self.uses_triton(device):
            gpu_layers.replace_layers(model)
        elif device.type == "cpu" and not compiled:
            replace_linears(model)
            replace_layers(model)
        prepare_blocks(
            model,
            recomputed,
            compiled=compiled,
            device=device,
            keeps_attention=self.config.keep_attention,
            offloads=self.config.offload_activations,
        )

    def uses_triton(self, device: torch.device) -> bool:
        """Whether Triton kernels compute there: their numbers are checked once."""
        from prime_rl_kernels import gpu_check

        return self.config.triton_kernels and gpu_check.is_usable(device)

    def packings(self, device: torch.device) -> Sequence[Packing]:
        """Apart, transformers' ``sdpa`` takes less memory than its ``eager``."""
        from prime_rl.trainer.packing import Packing
        from prime_rl_kernels.attention import NAMES, has_flash_attention_3
        from prime_rl_kernels.packing import SharedPrompts, WholeRow

        # The GPU's kernel has no continuations.
        shared = [SharedPrompts()] if self.config.share_prompts and device.type == "cpu" else []
        # If its numbers are off, the self-check goes on to torch's own kernel.
        flash3 = [WholeRow(attention=NAMES["flash3"])] if has_flash_attention_3(device) else []
        return [*shared, *flash3, WholeRow(), Packing("apart", NAMES["sdpa"])]

    def logprobs(
        self,
        head: nn.Linear,
        hidden: Tensor,
        temperatures: Tensor | None,
        labels: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """Block by block, if the row has many logits. Under autocast that is faster and exact:
        rounded to bfloat16, logits near 20 would be 0.125 apart. Few logits are one product."""
        import torch

        from prime_rl.trainer.logprobs import LogprobAndEntropy
        from prime_rl_kernels.fused_head import fused_logprobs
        from prime_rl_kernels.products import is_plain, pad_rows, product

        kind = hidden.device.type
        fused = self.config.fused_lm_head
        if fused == "auto":
            few = FEW_LOGITS.get(kind, FEW_LOGITS["cpu"])
            fused = len(labels) * head.out_features > few

        if not (fused or torch.is_autocast_enabled(kind)):
            if not is_plain(hidden, head.weight):
                return None
            logits = product(pad_rows(hidden), head.weight, head.bias)[: len(hidden)]
            apply: Any = LogprobAndEntropy.apply
            outputs: tuple[Tensor, Tensor] = apply(logits, temperatures, labels, entropy_gradient)
            return outputs

        block = self.block_logits or BLOCK_LOGITS.get(kind, BLOCK_LOGITS["cpu"])
        return fused_logprobs(
            hidden,
            head.weight,
            bias=head.bias,
            temperatures=temperatures,
            labels=labels,
            block_logits=block,
            entropy_gradient=entropy_gradient,
            triton=self.uses_triton(hidden.device),
        )


class Auto(Varlen):
    """The fastest kernel for the device."""

    name = "auto"


class Mask(Varlen):
    """The row in one call, under a dense block mask: the reference, and for models that need what
    the kernels lack."""

    name = "mask"

    def packings(self, device: torch.device) -> Sequence[Packing]:
        """The mask has no continuations."""
        from prime_rl.trainer.packing import Packing
        from prime_rl_kernels.attention import NAMES
        from prime_rl_kernels.packing import WholeRow

        return [WholeRow(attention=NAMES["mask"]), Packing("apart", NAMES["sdpa"])]
