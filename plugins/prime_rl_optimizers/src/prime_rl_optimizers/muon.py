"""Muon for the matrices of the blocks, as one optimizer with AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from prime_rl_optimizers.makers import MuonConfig


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices between embeddings and LM head."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    ends += [] if (head := find_head()) is None else [head]
    outside = {id(parameter) for module in ends for parameter in module.parameters()}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in outside
    ]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that train: the hidden matrices, and all others."""
    matrices = hidden_matrices(model)
    inside = set(map(id, matrices))
    rest = (each for each in model.parameters() if each.requires_grad)
    return matrices, [each for each in rest if id(each) not in inside]


class Muon(Optimizer):
    """Muon for hidden matrices and AdamW for everything else, as one optimizer of two groups.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Deviations:

    1. Updates of an A x B matrix are scaled by 0.2 sqrt(max(A, B)), to AdamW's usual size (Liu et
       al. 2025, arXiv:2502.16982, section 2.2), so that both share learning rate and weight decay.
    2. Each rank gathers the whole update of a sharded matrix and orthogonalizes it itself. In
       shards the products of bfloat16 would be summed, and rounded, once per rank: after three
       steps weights were off by a quarter of a step.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        config: MuonConfig,
        lr: float,
        weight_decay: float,
    ) -> None:
        self._muon: Optimizer = torch.optim.Muon(
            [{"params": matrices}],
            lr=lr,
            weight_decay=weight_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            eps=config.eps,
            ns_steps=config.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        # Others may be empty.
        self._adamw = torch.optim.AdamW(
            [{"params": others}],
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=weight_decay,
            fused=True,
        )
        # Settings of one name have one value, so that each group may hold those of both.
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others}]
        super().__init__(groups, {**self._muon.defaults, **self._adamw.defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step both. They share our state and groups, which a checkpoint saves."""
        matrices, others = self.param_groups
        whole = [each for each in matrices["params"] if not isinstance(each, DTensor)]
        self._muon.state = self._adamw.state = self.state
        self._muon.param_groups = [{**matrices, "params": whole}]
        self._adamw.param_groups = [others]
        self._muon.step()
        self._adamw.step()
        for matrix in matrices["params"]:
            if isinstance(matrix, DTensor) and matrix.grad is not None:
                self._step_in_shards(matrix, matrices)

    def _step_in_shards(self, matrix: DTensor, group: dict[str, Any]) -> None:
        """Momentum in shards, the update whole; each rank applies its shard."""
        gradient = matrix.grad
        momentum = group["momentum"]
        assert gradient is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        assert isinstance(direction, DTensor)
        update = orthogonal_step(direction.full_tensor(), group)
        replicated = DTensor.from_local(
            update, matrix.device_mesh, [Replicate()] * matrix.device_mesh.ndim, run_check=False
        )
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(replicated.redistribute(matrix.device_mesh, matrix.placements))


def orthogonal_step(direction: Tensor, group: dict[str, Any]) -> Tensor:
    """The update of torch's Muon for a gradient ``direction``, which includes momentum."""
    matrix = nn.Parameter(torch.zeros_like(direction))
    matrix.grad = direction
    optimizer: Optimizer = torch.optim.Muon(
        [matrix],
        lr=group["lr"],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        ns_coefficients=group["ns_coefficients"],
        eps=group["eps"],
        ns_steps=group["ns_steps"],
        adjust_lr_fn=group["adjust_lr_fn"],
    )
    optimizer.step()
    return matrix.detach()
