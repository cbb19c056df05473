"""The address of this machine that others can reach it by."""

from __future__ import annotations

import ipaddress
import socket

from prime_rl.plugins.errors import ConfigError

AUTO = "auto"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine that lead nowhere else."""
ANYWHERE_ELSE = ("192.0.2.1", 9)
"""An address kept for documentation: nothing is sent to it, only the way there is looked up."""


def numeric(address: str) -> str:
    """An address as a number: sockets bind no names. ``auto``: this machine's own.

    Raises ``ConfigError`` for a name nobody knows, and for "everywhere", which is no place."""
    found = _own() if address == AUTO else _look_up(address)
    if ipaddress.ip_address(found).is_unspecified:
        raise ConfigError(
            f"address: {address!r} means every interface, and the others need one to call. Give "
            "the address of this machine, or 'auto'."
        )
    return found


def _own() -> str:
    """The source address of what would go out; without a way out, what our own name stands for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANYWHERE_ELSE)
            return str(probe.getsockname()[0])
        except OSError:
            return _look_up(socket.gethostname())


def _look_up(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"address: {name!r} cannot be looked up: {error}") from error
