"""``python -m prime_rl_env_workers.forked DISABLED...``: the fork server of workers. It imports
verifiers, and the plugins that the run has: a plugin may give a taskset its id. It imports no
torch, which every worker would carry.

No library here starts a thread: a fork would lack it.
"""

from __future__ import annotations

import sys

from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.processes import raise_file_limit
from prime_rl_app import forkserver


def import_all() -> None:
    import renderers  # noqa: F401
    import transformers  # noqa: F401
    import verifiers.v1.serve  # noqa: F401

    import prime_rl_env_workers.server  # noqa: F401

    load_plugins(disabled=sys.argv[1:-1])


if __name__ == "__main__":
    raise_file_limit()
    forkserver.main(import_all, keeps=True)
