"""The command line. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    """``prime-rl``. Our own errors, and a full or read-only disk, end in one message without a
    traceback."""
    from prime_rl.cli.app import app
    from prime_rl.errors import PrimeRLError

    try:
        app()
    except PrimeRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"error: the disk is full or read-only: {error}", file=sys.stderr)
        sys.exit(2)
