"""AdamW whose moments lie in host memory: 8 bytes per weight on the device instead of 16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from prime_rl import AdamWConfig

BLOCK = 1 << 25
"""Elements that are on the device at a time: 256 MiB of moments."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(Optimizer):
    """Loshchilov and Hutter 2019, arXiv:1711.05101, by torch's fused kernel, block by block: the
    numbers of ``torch.optim.AdamW``.

    A step copies the moments to the device and back, 16 bytes per weight, and waits for the last
    copy: a checkpoint may read them.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: AdamWConfig, lr: float, decay: float
    ) -> None:
        betas = (config.beta1, config.beta2)
        defaults = {"lr": lr, "betas": betas, "eps": config.eps, "weight_decay": decay}
        super().__init__(parameters, defaults | {"on_host": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every parameter that has a gradient."""
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    devices.add(parameter.device)

        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = _on_host(parameter)

        state["step"] += 1
        step = torch.full((), float(state["step"]), device=parameter.device)
        assert parameter.grad is not None
        whole = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
        columns = [torch.split(_flat(each), BLOCK) for each in whole]
        for weights, gradient, *kept in zip(*columns, strict=True):
            moments = [each.to(weights.device, non_blocking=True) for each in kept]
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                [weights],
                [gradient],
                [moments[0]],
                [moments[1]],
                [],
                [step],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            if weights.is_cuda:
                for each, moment in zip(kept, moments, strict=True):
                    each.copy_(moment, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, without a copy of the moments on the device."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                mine = _on_host(parameter) if name in MOMENTS else torch.tensor(0.0)
                self.state[parameter][name] = mine.copy_(value)


def _on_host(like: Tensor) -> Tensor:
    """Zeros in the shards of ``like``; pinned, which makes copies quick and lets them overlap."""
    local = like.to_local() if isinstance(like, DTensor) else like
    zeros = torch.zeros_like(local, device="cpu", pin_memory=local.is_cuda)
    if not isinstance(like, DTensor):
        return zeros
    return DTensor(zeros, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _flat(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).view(-1)
