"""ECHO: GRPO on what the policy sampled, cross-entropy on what the environment answered."""

from prime_rl import Algorithm, hookimpl
from prime_rl_echo.echo import Echo as Echo
from prime_rl_echo.echo import EchoConfig as EchoConfig


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    """Offer echo."""
    return [Echo]
