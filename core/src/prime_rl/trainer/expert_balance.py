"""How a mixture's tokens are spread over its experts: metrics, and two ways to even it out.

For U tokens of a mixture with E experts, k per token::

    f_e = choices of expert e / (U k)              without gradient
    P_e = mean over tokens of the router's probability of e
    balance = E * sum over e of f_e P_e            1 if all are chosen, and likely, equally

(Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6). ``trainer.balance_loss``
times the mean of it over mixtures and the step's tokens is added to the loss. Deviations:

1. f and P are those of a row, and not of the whole batch: no rank waits for another's row inside a
   layer. Where documents are computed apart they are those of a call.
2. The value is not in ``loss/mean``. The gradient enters where the router's choice leaves it.
3. With ``router_replay`` f counts the experts that were taken: those of the sampler.
4. A token counts once for each sequence that it is of, also where a prompt that several share is
   computed once. Padding does not count.

A probability is what the router ranks experts by, if it is one (a softmax), else the softmax of it.

Routers with a bias (DeepSeek V3, GLM) rank by score plus bias, which is no probability, and weigh
experts by the score alone. They have no such loss. After an optimizer step in which expert e was
chosen c_e times, ``trainer.balance_bias`` = u makes ::

    b_e <- b_e + u * sign(mean of c - c_e)

(Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Deviations:

5. With ``router_replay`` c counts the experts that were taken, as in 3.
6. A step that is skipped moves no bias. Biases have no place in ``optim/grad_norm``.

The order of a batch:

    rows of an optimizer step -> choices of this rank -> ``end_step``: of all ranks -> biases
    all steps of the batch    -> ``metrics`` of each layer, and ``num_choices`` of each expert
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prime_rl.config.trainer import ROUTER_BIASES
from prime_rl.errors import ConfigError
from prime_rl.trainer import context, parallel
from prime_rl.trainer.routes import Mixture

LOADS = "expert_load.jsonl"
"""File of the run with the choices of each expert, step by step."""


def have_biases(model: nn.Module) -> bool:
    """Whether the model's routers rank experts with a bias."""
    names = [name for name, _ in (*model.named_buffers(), *model.named_parameters())]
    return any(is_router_bias(name) for name in names)


def is_router_bias(name: str) -> bool:
    """Whether a tensor of a model is the bias of a router, by its name."""
    return name.rpartition(".")[2] in ROUTER_BIASES


def _fixed_bias(model: nn.Module) -> str:
    """Why neither setting works for a model whose router bias is a parameter; empty: it is not."""
    fixed = [name for name, _ in model.named_parameters() if is_router_bias(name)]
    if not fixed:
        return ""
    return (
        f"the routers of {type(model).__name__} have a bias that is a parameter ({fixed[0]}). "
        "Neither trainer.balance_bias nor trainer.balance_loss can balance them: leave both out"
    )


def check_routers(model: nn.Module) -> None:
    """Raises ``ConfigError`` for a model whose routers ``trainer.balance_loss`` cannot balance."""
    if _fixed_bias(model):
        raise ConfigError(f"trainer.balance_loss: {_fixed_bias(model)}.")
    if have_biases(model):
        raise ConfigError(
            f"trainer.balance_loss: the routers of {type(model).__name__} rank experts with a bias "
            "that balances them, and there is no probability to even out. Set trainer.balance_bias "
            "= 0.001 instead."
        )


def bias_places(model: nn.Module, mixtures: Sequence[Mixture]) -> list[tuple[nn.Module, str]]:
    """The bias of each mixture's router: a module, and the name of its buffer. A buffer that moves
    to another device is another tensor. Raises ``ConfigError`` for routers without one, and for a
    model whose published versions lack it."""
    problem = ""
    places: list[tuple[nn.Module, str]] = []
    for mixture in mixtures:
        found = [
            (module, name)
            for module in model.get_submodule(mixture.name).modules()
            for name, buffer in module._buffers.items()
            if name in ROUTER_BIASES and buffer is not None
        ]
        places += found[:1]
        if not found:
            problem = _fixed_bias(model) or (
                f"the router of {mixture.name} in {type(model).__name__} has no bias as a buffer "
                f"(expected {' or '.join(ROUTER_BIASES)}). Set trainer.balance_loss = 0.001 instead"
            )
            break

    if hasattr(model, "prime_rl_tuning"):
        problem = "adapters are published without the biases of routers. Leave it out"
    if problem:
        raise ConfigError(f"trainer.balance_bias: {problem}.")
    return places


class ExpertBalance:
    """Of the rows of one batch. ``coefficient``: of the loss; 0 only counts. ``num_tokens``: of the
    optimizer step, over all ranks; set before each. ``has_biases``: of routers, whose choices alone
    are counted. ``biases``: [E] of each mixture, which ``move_biases`` changes."""

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        coefficient: float,
        device: torch.device,
        has_biases: bool = False,
        biases: Sequence[Tensor] = (),
    ) -> None:
        self.coefficient = coefficient
        self.has_biases = has_biases
        self.biases = biases
        self.num_tokens = 1
        self.layers = [mixture.layer for mixture in mixtures]
        """Of each mixture."""
        shape = (len(mixtures), mixtures[0].num_experts)
        self.num_choices: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        """[mixtures, E] choices of each expert, over all ranks and the optimizer steps so far."""
        self._of_step = self.num_choices
        """The same of the last optimizer step."""
        self._balance_sums = np.zeros(len(mixtures))
        self._num_counted = 0
        """Tokens."""
        # In float32 a count would stop at 2^24.
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._begin_step()

    def _begin_step(self) -> None:
        """Of an optimizer step, on this rank."""
        num_mixtures, num_experts = self.num_choices.shape
        self._counts = [self._zero.new_zeros(num_experts) for _ in range(num_mixtures)]
        """[E] choices, by mixture."""
        self._balance = [self._zero for _ in range(num_mixtures)]
        """The sum over calls of tokens times balance, 0-dim, by mixture."""
        self._tokens = self._zero

    def watch(
        self,
        mixture: Mixture,
        scores: Tensor,
        chosen: Tensor,
        values: Tensor,
        num_owners: Tensor | None,
        again: bool,
    ) -> Tensor:
        """``values`` [U, k], the scores of the experts ``chosen`` [U, k] among ``scores`` [U, E],
        with the gradient of the loss. ``num_owners`` [U]: how often a token counts, 0 for padding;
        None: once. ``again``: the call has been counted. Every rank of a row calls this."""
        trains = bool(self.coefficient) and torch.is_grad_enabled()
        if again and not trains:
            return values

        ones = torch.ones_like(chosen[:, 0], dtype=torch.float32)
        weights = ones if num_owners is None else num_owners.float()  # [U]
        of_choices = weights[:, None].expand_as(chosen).flatten()

        counts = ones.new_zeros(mixture.num_experts)
        counts = counts.scatter_add_(0, chosen.flatten(), of_choices)
        # What has a sum of 1 and no negative number is a probability, of rounded numbers too.
        # Without a graph if nothing trains by it: a checkpointed block that is computed again saves
        # as many tensors as it did at first.
        wide = (scores if trains else scores.detach()).float()
        is_probability = (wide.detach() >= 0).all() & (wide.detach().sum(1) < 1.5).all()
        probabilities = torch.where(is_probability, wide, wide.softmax(1))

        # A rank that computes a part of a row knows P for its tokens, and f for all of them: the
        # ranks' products add up to that of the row.
        of_row = context.total(counts)
        share = of_row / of_row.sum().clamp(min=1)
        sums = (probabilities * weights[:, None]).sum(0)  # [E]: tokens times P
        balance = mixture.num_experts * (share * sums).sum()  # tokens times balance

        number = mixture.number
        if not again:
            self._counts[number] = self._counts[number] + counts
            self._balance[number] = self._balance[number] + balance.detach()
            if number == 0:
                self._tokens = self._tokens + weights.sum()
        if not trains:
            return values

        with_gradient: Any = _WithGradient.apply
        scale = self.coefficient / (self.num_tokens * len(self.layers))
        attached: Tensor = with_gradient(values, balance, scale)
        return attached

    def end_step(self) -> None:
        """After the rows of an optimizer step: add up what all ranks have seen. Every rank calls
        this."""
        counts = torch.stack(self._counts).flatten()
        flat = torch.cat([counts, torch.stack(self._balance), self._tokens[None]])
        if parallel.several_ranks():
            dist.all_reduce(flat)

        numbers = flat.cpu().numpy()
        self._begin_step()

        end = self.num_choices.size
        self._of_step = numbers[:end].reshape(self.num_choices.shape).astype(np.int64)
        self.num_choices = self.num_choices + self._of_step
        self._balance_sums += numbers[end:-1]
        self._num_counted += int(numbers[-1])

    @torch.no_grad()
    def move_biases(self, rate: float) -> None:
        """After an optimizer step: the biases of experts that were chosen too rarely rise by
        ``rate``, those of the others fall. Every rank has the same choices, and so does the same.
        """
        for bias, counts in zip(self.biases, self._of_step, strict=True):
            # E times the difference from the mean: in integers a tie is exact.
            signs = np.sign(counts.sum() - len(counts) * counts)
            bias += rate * torch.from_numpy(signs).to(bias)

    def table(self) -> dict[str, Any]:
        """The decoder layers with a mixture, and for each the choices of every expert: a row of
        ``LOADS``."""
        return {"layers": self.layers, "choices": self.num_choices.tolist()}

    def metrics(self) -> dict[str, float]:
        """Of the optimizer steps so far, over all ranks. Empty if no row trained.

        By layer: the choices of the most chosen expert, relative to equal ones; the share of
        experts without any; and the entropy of the shares, relative to that of equal ones. Over all
        mixtures: the extremes and means of these, and the mean balance, unless routers have a bias;
        the extremes of biases that move, as the last optimizer step has taken them.
        """
        if not self._num_counted:
            return {}

        shares = self.num_choices / self.num_choices.sum(1, keepdims=True)
        num_experts = shares.shape[1]
        relative = shares * num_experts
        unused = (shares == 0).mean(1)
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        entropy = -(shares * logs).sum(1) / math.log(num_experts)
        metrics = {
            "router/load/max": float(relative.max()),
            "router/load/min": float(relative.min()),
            "router/load/unused": float(unused.mean()),
            "router/load/entropy": float(entropy.mean()),
        }

        for number, layer in enumerate(self.layers):
            metrics[f"router/load/{layer}/max"] = float(relative[number].max())
            metrics[f"router/load/{layer}/unused"] = float(unused[number])
            metrics[f"router/load/{layer}/entropy"] = float(entropy[number])

        if self.biases:
            values = torch.stack([*self.biases]).cpu().numpy()
            metrics["router/bias/max"] = float(values.max())
            metrics["router/bias/min"] = float(values.min())

        if not self.has_biases:
            metrics["router/balance"] = float(self._balance_sums.mean()) / self._num_counted
        return metrics


class _WithGradient(torch.autograd.Function):
    """The first argument. Backward, ``scale`` times the second's gradient is added."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, balance: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(balance)
        # A copy: routers normalize what they have chosen in place, which a view would not allow.
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        (balance,) = ctx.saved_tensors
        return grad, torch.full_like(balance, ctx.scale), None
