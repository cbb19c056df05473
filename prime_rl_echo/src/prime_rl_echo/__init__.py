"""ECHO: GRPO on the policy's tokens, cross-entropy on the environment's responses."""

from prime_rl import Algorithm, hookimpl
from prime_rl_echo.echo import Echo as Echo
from prime_rl_echo.echo import EchoConfig as EchoConfig


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [Echo]
