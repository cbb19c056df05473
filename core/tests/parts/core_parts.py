"""All that is installed in core's tests: one small plugin of each kind that they need.

``core/tests/conftest.py`` puts this folder on the path, and leaves out every other distribution.
Keep torch inside the methods: the tests of the contract run without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    OptimizerMaker,
    PluginConfig,
    TokenMetric,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

# -- losses: t, i = the trainer's and the sampler's logprob, A = advantage, w = weight ------------


def weighted_sum(terms: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.loss_weights is not None:
        terms = terms * inputs.loss_weights
    return terms[inputs.loss_mask].sum()


class CrossEntropy(Loss):
    """-t w"""

    name = "ce"
    reads = ()
    token_wise = True
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        nll = -inputs.trainer_logprobs
        metrics = {"nll": TokenMetric(nll.detach(), inputs.loss_mask)}
        return LossOutputs(weighted_sum(nll, inputs), metrics)


class ReferenceKL(Loss):
    """-(ref - t) exp(t - i) w, where (ref - t) is a constant"""

    name = "ref_kl"
    reads = ("ref_logprobs",)
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.ref_logprobs is not None
        signal = inputs.ref_logprobs - inputs.trainer_logprobs.detach()
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        metrics = {"ref_kl": TokenMetric(signal, inputs.loss_mask)}
        return LossOutputs(weighted_sum(-signal * ratio, inputs), metrics)


class PolicyGradient(Loss):
    """-A t w"""

    name = "plain"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(weighted_sum(-inputs.advantages * inputs.trainer_logprobs, inputs), {})


class ClipConfig(PluginConfig):
    """Settings of ``clipped``."""

    clip_eps_high: float = 0.2


class Clipped(Loss):
    """-A min(exp(t - i), 1 + clip_eps_high) w"""

    name = "clipped"
    config_class = ClipConfig
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        kept = ratio.clamp(max=1 + self.config.clip_eps_high)  # type: ignore[attr-defined]
        return LossOutputs(weighted_sum(-inputs.advantages * kept, inputs), {})


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [CrossEntropy, ReferenceKL, PolicyGradient, Clipped]


# -- optimizers: one with state and one without ---------------------------------------------------


class SgdConfig(PluginConfig):
    """Settings of ``sgd``."""

    momentum: float = 0.0


class Sgd(OptimizerMaker):
    """torch's. It takes no weight decay."""

    name = "sgd"
    config_class = SgdConfig

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Any:
        import torch

        momentum = self.config.momentum  # type: ignore[attr-defined]
        return torch.optim.SGD(trained(model), lr=lr, momentum=momentum)


class Signs(OptimizerMaker):
    """w <- w - lr sign(g), without state. It takes no weight decay."""

    name = "signs"

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Any:
        import torch

        class Stateless(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    for each in group["params"]:
                        if each.grad is not None:
                            each.sub_(group["lr"] * each.grad.sign())

        return Stateless(trained(model), {"lr": lr})


def trained(model: nn.Module) -> Iterable[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@hookimpl
def register_optimizers() -> list[type[OptimizerMaker]]:
    return [Sgd, Signs]
