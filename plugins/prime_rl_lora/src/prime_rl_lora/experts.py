"""Adapters on the experts of a mixture, whose weights transformers stacks: W [E, O, I] of a layer.

PEFT has an adapter for such a parameter (``target_parameters``), but adds the product of its halves
to the weights of all experts in each forward, and so computes a gradient of that size. Here each
token meets the halves of its own experts:

    y = W_e x + scaling * B_e (A_e x)

in grouped products over the tokens sorted by expert. With ``trainer.expert_parallel`` tokens travel
to the ranks of their experts, which have the halves too. Names and shapes in files are PEFT's.

Shapes: E = experts of this rank, I = inputs, O = outputs, r = rank, T = tokens, k = experts of a
token, S = tokens of all experts. The halves are A [E * r, I] and B [E, O, r]: rows of one expert
after the other, which ranks can share. In files B is [O, r * E], the experts innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

# It takes the product by another kernel where torch lacks the grouped one.
from transformers.integrations.moe import _grouped_linear

from prime_rl.trainer.token_exchange import over_ranks
from prime_rl.weights.tensors import pieces_of
from prime_rl_engine_kit.adapter import StackLayout

Here = Callable[[Tensor], Tensor]
"""Of a weight of all experts: that of the experts which this rank computes."""
ALIGNED = 8
"""Grouped products read rows of 16 bytes: the rank, in bfloat16, is padded to a multiple of it."""


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer, by name, where transformers lets other code
    compute the products."""
    kind = ("has_gate", "has_bias", "is_transposed", "num_experts")
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, each) for each in kind) and hasattr(module, "down_proj")
    }


def projections(experts: Any) -> tuple[str, str]:
    """The parameters of the two products, in their order."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def stacked_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all experts by name, without biases."""
    return {
        f"{name}.{each}": getattr(experts, each)
        for name, experts in stacks(model).items()
        for each in projections(experts)
    }


def layouts_of(model: PreTrainedModel) -> dict[str, StackLayout]:
    """By parameter: how it is stacked, and which tensors of the model's folder it is. ``model``
    has no adapter yet."""
    stacked = stacked_parameters(model)
    layouts = dict[str, StackLayout]()
    for name, weight in stacked.items():
        experts: Any = model.get_submodule(name.rpartition(".")[0])
        transposed = experts.is_transposed
        layouts[name] = {"num": len(weight), "transposed": transposed, "tensors": {}}

    for piece in pieces_of(model, stacked):
        first = piece.start // stacked[piece.source].shape[-1]
        layouts[piece.source]["tensors"][piece.name] = [first, *piece.shape]

    return layouts


def by_module(model: nn.Module, layouts: Mapping[str, StackLayout]) -> dict[str, StackLayout]:
    """The layouts by the modules that have the halves, in an adapted model: wrappers are nested."""
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            stack = name.replace(".base_layer", "")
            modules[name] = layouts[f"{stack}.{module.parameter_name}"]
    return modules


def install(model: nn.Module) -> None:
    """Compute the products of adapted experts here instead of in PEFT's wrappers, and lay out B by
    expert."""
    inner = {id(m.base_layer) for m in model.modules() if isinstance(m, ParamWrapper)}
    for module in [each for each in model.modules() if isinstance(each, ParamWrapper)]:
        for half in module.lora_B.values():
            by_expert = from_file(half.weight.detach(), module.num_experts)
            half.weight = nn.Parameter(by_expert, half.weight.requires_grad)

        if id(module) not in inner:
            module.__class__ = ExpertsWithAdapter


def from_file(b: Tensor, num_experts: int) -> Tensor:
    """B as PEFT stores it, [O, r * E], by expert: [E, O, r]."""
    return b.view(len(b), -1, num_experts).permute(2, 0, 1).contiguous()


def for_file(b: Tensor) -> Tensor:
    """B [E, O, r] of all experts as PEFT stores it: [O, r * E]. Of one in shards, this rank has
    rows of the result; every rank calls this."""
    b = b.detach()
    if not isinstance(b, DTensor):
        return b.permute(1, 2, 0).reshape(b.shape[1], -1)

    mesh = b.device_mesh
    # Beside engines on its GPU, a trainer that waits has its weights on the host.
    whole = cast(DTensor, b.to(mesh.device_type)).full_tensor()
    num_experts, num_rows, rank = whole.shape
    # As torch.chunk cuts them, so that each rank writes its own rows of the file.
    height = -(-num_rows // mesh.shape[-1])
    first = height * mesh.get_local_rank(mesh.ndim - 1)
    rows = for_file(whole[:, first : first + height])
    part: Tensor = DTensor.from_local(
        rows,
        mesh,
        [*[Replicate()] * (mesh.ndim - 1), Shard(0)],
        run_check=False,
        shape=torch.Size((num_rows, rank * num_experts)),
        stride=(rank * num_experts, 1),
    )
    return part


def wrappers(outer: ParamWrapper) -> Iterator[ParamWrapper]:
    """PEFT wraps a module once per parameter."""
    module: Any = outer
    while isinstance(module, ParamWrapper):
        yield module
        module = module.base_layer


class ExpertsWithAdapter(ParamWrapper):  # type: ignore[misc]  # peft has no types
    """The experts of a layer with an adapter on each. The outermost of PEFT's wrappers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The output [T, D] for hidden states [T, D], the experts chosen for each token [T, k] and
        their weights [T, k]."""
        if self.disable_adapters:
            output: Tensor = self.base_layer(hidden_states, top_k_index, top_k_weights)
            return output

        experts = self.get_base_layer()
        first = getattr(experts, projections(experts)[0])
        if isinstance(first, DTensor):
            dtype = _autocast_dtype(hidden_states)
            output = over_ranks(
                self._of_rows,
                [*self.parameters()],
                hidden_states.to(dtype or hidden_states.dtype),
                chosen=top_k_index,
                weights=top_k_weights,
                num_experts=experts.num_experts,
                dtype=dtype,
            )
            return output.to(hidden_states.dtype)

        num_tokens, k = top_k_index.shape
        output = self._of_experts(_all_experts, hidden_states, top_k_index.reshape(-1), k)
        output = output.view(num_tokens, k, -1) * top_k_weights[..., None]
        return output.sum(1).to(hidden_states.dtype)

    def _of_rows(self, here: Here, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """[S, I] the results of rows [S, I] by experts [S]."""
        return self._of_experts(here, rows, expert_ids, k=1)

    def _of_experts(self, here: Here, hidden: Tensor, expert_ids: Tensor, k: int) -> Tensor:
        """[S, I] the results of hidden states [S / k, I] by experts [S], k for each."""
        experts = self.get_base_layer()
        first, last = projections(experts)
        num_experts = len(here(getattr(experts, first)))
        ids, order = expert_ids.sort()
        ends = torch.arange(1, num_experts + 1, device=ids.device)
        offsets = torch.searchsorted(ids, ends, out_int32=True)  # by expert: where its tokens end
        hidden = self._product(here, first, hidden[order // k], offsets=offsets, ids=ids)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        out = self._product(here, last, hidden, offsets=offsets, ids=ids)

        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return out[back]

    def _product(self, here: Here, name: str, x: Tensor, *, offsets: Tensor, ids: Tensor) -> Tensor:
        """[S, O] of the sorted rows ``x`` [S, I], whose experts are ``ids`` [S]."""
        experts = self.get_base_layer()
        weight = here(getattr(experts, name))
        bias = here(getattr(experts, f"{name}_bias"))[ids] if experts.has_bias else None
        # Grouped products are not on autocast's lists.
        dtype = _autocast_dtype(x) or weight.dtype
        x = x.to(dtype)
        weight = weight.to(dtype)
        y: Tensor = _grouped_linear(x, weight, offsets, bias, experts.is_transposed)
        for wrapper in wrappers(self):
            if wrapper.parameter_name == name:
                a, b = (each.to(dtype) for each in halves(wrapper, here))
                low = _grouped_linear(_grouped_linear(x, a, offsets), b, offsets)
                y = y + wrapper.scaling[wrapper.active_adapter[0]] * low

        return y


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _all_experts(weight: Tensor) -> Tensor:
    return weight


def halves(wrapper: ParamWrapper, here: Here = _all_experts) -> tuple[Tensor, Tensor]:
    """A [E, r, I] and B [E, O, r] of a wrapper's parameter, with r padded by zeros."""
    name = wrapper.active_adapter[0]
    rank = wrapper.r[name]
    a = here(wrapper.lora_A[name].weight)
    b = here(wrapper.lora_B[name].weight)
    a = a.view(len(b), rank, -1)
    rest = -rank % ALIGNED
    if rest:
        a = nn.functional.pad(a, (0, 0, 0, rest))
        b = nn.functional.pad(b, (0, rest))

    return a, b
