"""Which torch and NCCL the trainer and the engines have, where an engine has an interpreter of its
own. Read from what is installed: nothing is imported, so no CUDA context is made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import make_transport

PROBE_SECONDS = 60.0

_PROBE = """
import json, re
from importlib.metadata import PackageNotFoundError, requires, version
found = {}
try:
    found["torch"] = version("torch")
    for line in requires("torch") or ():
        name = re.match(r"[\\w.-]+", line).group()
        if name.startswith("nvidia-nccl"):
            found["NCCL"] = version(name)
except PackageNotFoundError:
    pass
print(json.dumps(found))
"""


def libraries(python: Path | None) -> dict[str, str]:
    """Versions of ``torch`` and of the ``NCCL`` that it brings, in an interpreter (None: this one);
    without what is not installed there. A torch with NCCL built in does not say which."""
    command = [str(python or sys.executable), "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}  # the engine's own check of its interpreter gives the reason
    return versions


def weight_notes(config: RunConfig, hooks: Hooks) -> list[str]:
    """What the libraries of trainer and engines mean for how new weights reach the engines."""
    transport = make_transport(config.weight_broadcast, hooks)
    if transport is None or config.inference.base_url is not None:
        return []
    interpreter = config.inference.interpreter
    trainer = libraries(None)
    engines: Mapping[str, str] = trainer if interpreter is None else libraries(interpreter)
    note = transport.compare(trainer, engines)
    return [] if note is None else [f"weight_broadcast.type = {transport.name!r}: {note}"]
