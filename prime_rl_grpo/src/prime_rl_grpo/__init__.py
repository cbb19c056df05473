"""The group-relative family: grpo and max_rl."""

from prime_rl import Algorithm, hookimpl
from prime_rl_grpo.grpo import GRPO as GRPO
from prime_rl_grpo.max_rl import MaxRL as MaxRL


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    """Offer the family."""
    return [GRPO, MaxRL]
