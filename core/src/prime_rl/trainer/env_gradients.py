"""The policy's gradient of each env, for an optimizer that weighs them (``OptimizerMaker.weighs``).

    rows of env 1 -> g_1, rows of env 2 -> g_2, ...      (the packer puts one env into a row)
    products [E, E]: g_i . g_j over all weights and ranks -> weights [E] -> sum of w_e g_e -> clip

The loss of a step is a sum over its tokens, so the g_e sum up to the plain gradient, and weights of
1 are the plain step, up to the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.errors import PluginError, StreamError
from prime_rl.plugins.trainer import OptimizerMaker
from prime_rl.registry.calls import running
from prime_rl.trainer import parallel
from prime_rl.wire.micro_batch import MicroBatch


def rows_by_env(rows: Iterable[MicroBatch]) -> Iterator[tuple[str, list[MicroBatch]]]:
    """The rows of each env, which follow each other. Raises ``StreamError`` for a row of several
    envs."""
    for envs, of_env in groupby(rows, lambda row: row.envs):
        if len(envs) != 1:
            raise StreamError(
                f"micro batch (envs: {', '.join(envs)}): trainer.optim.type needs rows of one env "
                "each, and the orchestrator sent one of several. Both sides must run with the same "
                "config and plugins."
            )
        yield envs[0], [*of_env]


class EnvGradients:
    """The gradients of one optimizer step, by env."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._kept: dict[str, list[Tensor | None]] = {}

    def keep(self, env: str) -> None:
        """The rows of ``env`` have gone backward: put the gradient aside."""
        # Moved and not copied: the next env's backward pass finds no gradient and makes its own.
        self._kept[env] = [each.grad for each in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def combine(self, maker: OptimizerMaker, step: int, replicas: int) -> dict[str, float]:
        """Make the weighted sum the policy's gradient. Metrics. ``replicas``: ranks that hold one
        shard (``trainer.dp_replicate``)."""
        envs = [*self._kept]
        products = self._products(replicas)
        weights = [1.0] * len(envs)
        if np.isfinite(products).all():  # otherwise the step is skipped
            call = running(maker.name, hook="env_weights", owner=maker, arguments={"step": step})
            with call:
                # The plugin gets a copy: it may write into it, and the metrics read the products.
                weights = _checked(maker, maker.env_weights(step, envs, products.copy()), envs)

        columns = zip(self._parameters, *self._kept.values(), strict=True)
        for parameter, *gradients in columns:
            total: Tensor | None = None
            for gradient, weight in zip(gradients, weights, strict=True):
                if gradient is None:
                    continue
                total = (
                    gradient.mul_(weight) if total is None else total.add_(gradient, alpha=weight)
                )

            parameter.grad = total

        self._kept.clear()

        metrics = {}
        for number, env in enumerate(envs):
            metrics[f"optim/env_norm/{env}"] = math.sqrt(max(products[number, number], 0.0))
            metrics[f"optim/env_weight/{env}"] = weights[number]
        return metrics

    def _products(self, replicas: int) -> np.ndarray:
        """[E, E] float64. Each rank multiplies its shards; equal shards count once."""
        number = len(self._kept)
        sums = np.zeros((number, number))

        for gradients in zip(*self._kept.values(), strict=True):
            present = [(i, _local(each)) for i, each in enumerate(gradients) if each is not None]
            # The products are symmetric, so the upper half is enough.
            for (i, first), (j, second) in combinations_with_replacement(present, 2):
                sums[i, j] += float((first * second).sum(dtype=torch.float64))

        sums += np.triu(sums, 1).T
        parts = parallel.gather(sums.tolist())
        total: np.ndarray = np.sum(parts, axis=0) / (replicas if len(parts) > 1 else 1)
        return total


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _checked(maker: OptimizerMaker, weights: Sequence[float], envs: Sequence[str]) -> list[float]:
    try:
        numbers = [float(each) for each in weights]
    except (TypeError, ValueError) as error:
        raise PluginError(_expected(maker, weights, envs)) from error

    if len(numbers) != len(envs) or not all(math.isfinite(number) for number in numbers):
        raise PluginError(_expected(maker, weights, envs))
    return numbers


def _expected(maker: OptimizerMaker, weights: object, envs: Sequence[str]) -> str:
    return (
        f"optimizer {maker.name!r}: env_weights gave {weights!r:.200}, expected a finite number "
        f"for each of the {len(envs)} envs ({', '.join(envs)}). Fix the plugin."
    )
