"""PCGrad: gradient surgery between envs (Yu et al. 2020, arXiv:2001.06782, Algorithm 1).

    for each env i:   h_i = g_i
        for each other j, in random order:   if h_i . g_j < 0:   h_i -= (h_i . g_j / |g_j|^2) g_j
    the step takes the sum of the h_i

Each h_i is a weighted sum of the g_j, so the inner products of the g_j are all it takes.

Changed from the paper: 1. tasks are envs, and the gradients that of each env's part of the loss,
whose divisor is that of the run (``trainer.loss.normalize_by``); 2. the order is drawn from the
step's number, so that all ranks and a resumed run draw the same.
"""

from __future__ import annotations

import numpy as np


def weights_of(products: np.ndarray, step: int) -> list[float]:
    """The weight of each g_j in the sum. ``products``: [E, E], g_i . g_j."""
    number = len(products)
    order = np.random.default_rng(step)
    total = np.zeros(number)
    for env in range(number):
        mine = np.zeros(number)  # h_env as weights of the g_j
        mine[env] = 1.0
        for other in order.permutation(number):
            conflict = float(mine @ products[:, other])
            if other != env and conflict < 0:
                mine[other] -= conflict / products[other, other]
        total += mine
    return [float(weight) for weight in total]
