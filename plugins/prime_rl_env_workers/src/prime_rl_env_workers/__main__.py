"""``python -m prime_rl_env_workers``: a worker, forked from a process that has imported all of it.

Standard input is a file with the request: settings, address, key of the connection. Descriptor 3
is a pipe, on which a worker that cannot start says why.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from prime_rl_env_workers.forks import FAILED
from prime_rl_env_workers.server import serve

REASON = 3
"""Descriptor of the pipe."""
MOST_REASON = 2000
"""Characters."""
FIRST_TO_GO = 800
"""``oom_score_adj`` of workers: the kernel kills them before the rest of the run."""


def main() -> None:
    """Serve one environment until SIGTERM."""
    request = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO), "utf-8")
    faulthandler.enable()
    try:
        serve(request["settings"], request["address"], request.get("key"))
    except KeyboardInterrupt:
        pass
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:MOST_REASON]
        with suppress(OSError):
            os.write(REASON, FAILED + reason.encode(errors="replace"))
        sys.exit(1)


if __name__ == "__main__":
    main()
