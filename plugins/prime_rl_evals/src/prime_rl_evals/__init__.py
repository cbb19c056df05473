"""Evaluations of held-out environments: an observer of the loop, and the figures it measures."""

from prime_rl import Observer, hookimpl


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer ``evals``."""
    from prime_rl_evals.evaluation import Evaluation

    return [Evaluation]
