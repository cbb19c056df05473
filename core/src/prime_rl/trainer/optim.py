"""Optimizers, clipping, and the learning rate over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from prime_rl.config.trainer import OptimConfig, SchedulerConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer of the parameters that train, in its fastest form."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "muon":
        matrices = hidden_matrices(model)
        inside = set(map(id, matrices))
        return Muon(matrices, [each for each in trained if id(each) not in inside], config)
    if config.type == "sgd":
        return _sgd(trained, config)
    if config.type == "sign_sgd":
        return SignSGD(trained, config.lr, config.weight_decay)
    return adamw(trained, config)


def adamw(parameters: list[Any], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with these settings, whatever ``config.type``."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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


def _sgd(trained: list[nn.Parameter], config: OptimConfig) -> torch.optim.SGD:
    """torch's, whose own weight decay would enter the momentum; ours is decoupled."""
    optimizer = torch.optim.SGD(
        trained,
        lr=config.lr,
        momentum=config.momentum or 0.0,
        nesterov=bool(config.nesterov),
        foreach=True,
    )

    def decay(*_: object) -> None:
        for group in optimizer.param_groups:
            with torch.no_grad():
                torch._foreach_mul_(group["params"], 1 - group["lr"] * config.weight_decay)

    optimizer.register_step_pre_hook(decay)
    return optimizer


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most ``max_norm``; their norm before, 0-dim."""
    bound = math.inf if max_norm is None else max_norm
    return torch.nn.utils.clip_grad_norm_(list(parameters), bound, foreach=True)


def make_schedule(config: SchedulerConfig, peak: float, max_steps: int) -> Callable[[int], float]:
    """The learning rate of step n = 1 .. ``max_steps``; W = warm-up steps, D = decay steps::

        warm-up  n <= W          peak * n / W                     (the first step already learns)
        constant                 peak
        decay    last D steps    from peak to min_lr after the last step (which still learns)

    ``linear`` decays on a line, ``cosine`` on half a wave over everything after warm-up. Raises
    ``ConfigError`` if warm-up and decay do not fit into the run or ``min_lr`` lies above ``lr``.
    """
    config.check(peak, max_steps)
    warmup, decay = config.warmup_steps, config.num_decay_steps(max_steps)

    def learning_rate(step: int) -> float:
        if step <= warmup:
            return peak * step / warmup
        done = step - 1 - (max_steps - decay)
        if done <= 0:
            return peak
        share = done / decay
        if config.type == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return peak + (config.min_lr - peak) * share

    return learning_rate


class SignSGD(Optimizer):
    """w <- w - lr * (sign(g) + weight_decay * w); no state.

    Bernstein et al. 2018, arXiv:1802.04434, Algorithm 1, with decoupled weight decay.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along the signs."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if trained:
                signs = torch._foreach_sign([each.grad for each in trained])
                torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(trained, signs, alpha=-group["lr"])


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
        self._adamw = adamw([{"params": others}], config)  # which may be empty
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
