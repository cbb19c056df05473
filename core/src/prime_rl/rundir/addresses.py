"""Names and addresses of this machine."""

from __future__ import annotations

import socket

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Loopback names of this machine."""
ELSEWHERE = ("192.0.2.1", 9)
"""An address reserved for documentation. Nothing is sent to it: the kernel only looks up the
route."""


def own_address() -> str:
    """The numeric address at which other machines reach this machine: the source address of
    outgoing packets. Without a route, the address of the host name.

    Raises ``OSError`` if there is neither."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
