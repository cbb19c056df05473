"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Deviations:

1. Updates of an A x B matrix are scaled by 0.2 sqrt(max(A, B)), to AdamW's usual size (Liu et al.
   2025, arXiv:2502.16982, section 2.2), so that learning rate and weight decay are the same for
   both.
2. Of a matrix in shards each rank gathers the whole update and makes it orthogonal for itself. In
   shards the products of bfloat16 would be summed, and rounded, once a rank: after three steps
   weights were off by a quarter of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from prime_rl.config.trainer import OptimConfig


class Muon(Optimizer):
    """Two groups: the matrices, and the rest."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: OptimConfig
    ) -> None:
        self._muon: Optimizer = torch.optim.Muon(
            [{"params": matrices}],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95 if config.momentum is None else config.momentum,
            nesterov=True if config.nesterov is None else config.nesterov,
            eps=config.eps,
            ns_steps=config.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            [{"params": others}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Settings of one name have one value, so that each group may hold those of both.
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others}]
        super().__init__(groups, {**self._muon.defaults, **self._adamw.defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Both, on the state and the groups that are held, and saved, here."""
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
        """Momentum in shards, the update whole, and its shard off the weights."""
        gradient, momentum = matrix.grad, group["momentum"]
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
    """What torch's Muon adds to a matrix whose gradient, momentum included, is ``direction``."""
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
