"""The command line, one module a command group. Nothing heavy is imported before a command needs
it."""

from __future__ import annotations

import sys


def main() -> None:
    """``prime-rl``: errors we raise on purpose end as one clear message, without a traceback."""
    from prime_rl.cli.app import app
    from prime_rl.plugins.errors import PrimeRLError

    try:
        app()
    except PrimeRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
