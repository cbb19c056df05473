"""The command line. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Any


def main() -> None:
    """``prime-rl``. Our own errors, and a full or read-only disk, end in one message without a
    traceback."""
    from prime_rl.errors import PrimeRLError
    from prime_rl.proxies import settle

    try:
        _show_warnings_of_the_config()
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


def _show_warnings_of_the_config() -> None:
    """As one line for the user, without the line of our code that found it. A warning is shown
    once: a dry run loads the plugins and reads the config several times."""
    from prime_rl.errors import ConfigWarning

    show_others = warnings.showwarning
    shown = set[tuple[str, type[Warning]]]()

    def show(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
        if (str(message), category) in shown:
            return
        shown.add((str(message), category))
        if issubclass(category, ConfigWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            show_others(message, category, *more, **named)

    warnings.showwarning = show


def _disable_plugins() -> None:
    """Move each ``--without NAME`` to the environment, for this process and those it starts."""
    from prime_rl.entries import DISABLE
    from prime_rl.errors import ConfigError

    kept = []
    names = [os.environ.get(DISABLE, "")]
    rest = iter(sys.argv)
    for word in rest:
        option, _, name = word.partition("=")
        if option != "--without":
            kept.append(word)
            continue

        name = name or next(rest, "")
        if not name:
            raise ConfigError("--without: expected the name of a plugin (prime-rl plugins list)")
        names.append(name)

    sys.argv[:] = kept
    os.environ[DISABLE] = ",".join(filter(None, names))
