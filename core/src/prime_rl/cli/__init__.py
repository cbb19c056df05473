"""The command line, one module a command group. Nothing heavy is imported before a command needs
it."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    """``prime-rl``: errors we raise on purpose end as one clear message, without a traceback. So
    does a disk that is full."""
    from prime_rl.cli.app import app
    from prime_rl.plugins.errors import PrimeRLError

    try:
        app()
    except PrimeRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"error: the disk refuses: {error}", file=sys.stderr)
        sys.exit(2)
