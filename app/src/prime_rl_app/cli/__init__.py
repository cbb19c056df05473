"""The command line. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import errno
import os
import sys


def main() -> None:
    """``prime-rl``. Our own errors, and a full or read-only disk, end in one message without a
    traceback."""
    from prime_rl.errors import PrimeRLError
    from prime_rl.proxies import settle

    try:
        _disable_plugins()
        for notice in settle(os.environ):
            print(f"prime-rl: {notice}", file=sys.stderr)
        from prime_rl_app.cli.app import app

        app()
    except KeyboardInterrupt:  # during imports: a run and its commands end in order themselves
        sys.exit(130)
    except PrimeRLError as error:
        from prime_rl_app.errors import explained

        message = explained(str(error), sys.argv[1:])  # says where in which file
        print(f"error: {message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"error: the disk is full or read-only: {error}", file=sys.stderr)
        sys.exit(2)


def _disable_plugins() -> None:
    """Move each ``--without NAME`` to the environment, for this process and those it starts."""
    from prime_rl.entries import DISABLE
    from prime_rl.errors import ConfigError

    kept = []
    names = [os.environ.get(DISABLE, "")]
    rest = iter(sys.argv)
    for word in rest:
        if word.partition("=")[0] != "--without":
            kept.append(word)
        elif not (name := word.partition("=")[2] or next(rest, "")):
            raise ConfigError("--without: expected the name of a plugin (prime-rl plugins list)")
        else:
            names.append(name)

    sys.argv[:] = kept
    os.environ[DISABLE] = ",".join(filter(None, names))
