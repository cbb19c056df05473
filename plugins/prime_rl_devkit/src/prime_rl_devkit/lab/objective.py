"""What an algorithm climbs: ``Algorithm.objective``, and its exact gradient.

``"expected_reward"`` is the default; ``"none"`` declares nothing. An algorithm with another
objective defines a method, which gets one question's ``Outcomes`` and returns a 0-dim tensor, or
None where it makes no claim::

    def objective(self, outcomes):
        return outcomes.mean_reward.log()

Shapes: K = replies, S = states (prefixes of replies), V = tokens, P = S * V parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prime_rl import Algorithm
from prime_rl_devkit.lab.problem import Floats, Question, log_softmax


@dataclass(frozen=True)
class Outcomes:
    """Every reply to one question. Tensors are float64; those of the policy carry a gradient."""

    group_size: int
    """Rollouts of the group that did not fail."""
    rewards: Tensor
    """[K]"""
    probabilities: Tensor
    """[K] of each reply under the policy; with gradient."""
    log_probabilities: Tensor
    """[K] their logarithm, without the environment's tokens."""
    reference_log_probabilities: Tensor
    """[K] the same under the lab's reference model."""
    sampled: Tensor
    """[K] under the policy that sampled."""
    visits: Tensor
    """[S] how often a sampled reply passes each state in which the policy acts."""
    log_policy: Tensor
    """[S, V] of each token after each prefix, with gradient; 0 where no token can follow."""
    policy: Tensor
    """[S, V] its exponential; 0 where no token can follow."""
    log_reference: Tensor
    """[S, V] the same under the lab's reference model: the frozen one, the initial one, and the
    policy that has seen a hint."""
    reference: Tensor
    """[S, V] its exponential."""

    @property
    def mean_reward(self) -> Tensor:
        """0-dim: the expected reward of the policy."""
        return (self.probabilities * self.rewards).sum()

    @property
    def is_binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(((self.rewards == 0) | (self.rewards == 1)).all())

    @property
    def reverse_kl(self) -> Tensor:
        """[S] KL(policy || reference) in each state."""
        return (self.policy * (self.log_policy - self.log_reference)).sum(1)

    @property
    def forward_kl(self) -> Tensor:
        """[S] KL(reference || policy) in each state."""
        return (self.reference * (self.log_reference - self.log_policy)).sum(1)


def objective_gradient(
    algorithm: Algorithm,
    sampler: Question,
    logits: Floats,
    reference: Floats,
    group_size: int,
) -> Floats | None:
    """[P] the gradient at the policy with ``logits``, of groups that ``sampler`` samples. None: the
    algorithm declares no objective here."""
    declared = algorithm.objective
    if declared == "none":
        return None
    possible = torch.from_numpy(np.isfinite(logits))
    leaf = torch.tensor(np.where(np.isfinite(logits), logits, -1e9), requires_grad=True)
    logp = leaf.log_softmax(1).where(possible, torch.zeros(()).double())
    old = np.where(np.isfinite(reference), log_softmax(reference), 0.0)
    counts = torch.from_numpy(sampler.counts)
    chances = torch.tensor([reply.chance for reply in sampler.replies], dtype=torch.float64)
    outcomes = Outcomes(
        group_size=group_size,
        rewards=torch.from_numpy(sampler.rewards),
        log_probabilities=counts @ logp.flatten(),
        reference_log_probabilities=counts @ torch.from_numpy(old).flatten(),
        probabilities=chances * (counts @ logp.flatten()).exp(),
        sampled=torch.from_numpy(sampler.probabilities(sampler.logits)),
        visits=torch.from_numpy(sampler.visits(sampler.logits)),
        log_policy=logp,
        policy=logp.exp() * possible,
        log_reference=torch.from_numpy(old),
        reference=torch.from_numpy(np.exp(old)) * possible,
    )
    if callable(declared):
        value = declared(outcomes)
        if value is None:
            return None
    elif declared == "expected_reward":
        value = outcomes.mean_reward
    else:
        raise ValueError(
            f'algorithm {algorithm.name!r}: objective is {declared!r}, expected "expected_reward", '
            '"none" or a method that takes Outcomes'
        )

    (gradient,) = torch.autograd.grad(value, leaf)
    return np.asarray(gradient.numpy().ravel())
