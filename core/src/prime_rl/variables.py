"""Which variables of the user's environment each process of a run inherits.

| process | gets |
|---|---|
| programs of a rollout, which may be code of the model | ``PROGRAMS`` |
| environment workers | also ``DEVICES``, and what their table names |
| engines, the trainer's agents and ranks, the guard | also ``LIBRARIES``, no key among them |
| orchestrator and model maker, which ask judges, monitors and hubs | all |

What a process needs beside that, its command adds: the keys of the run among it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from prime_rl.entries import DISABLE
from prime_rl.errors import ConfigError
from prime_rl.rundir.attempts import PROCESS

if TYPE_CHECKING:
    from prime_rl.config.contract import FrozenModel

PROGRAMS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_\w+|"
    r"PYTHON\w*|VIRTUAL_ENV|LD_LIBRARY_PATH|UV_(CACHE_DIR|PYTHON\w*|OFFLINE|(DEFAULT_)?INDEX(_URL)?)|"
    r"(HTTPS?|ALL|NO)_PROXY|(SSL_CERT|REQUESTS_CA|CURL_CA)_\w+|(OMP|MKL|OPENBLAS)_NUM_THREADS|"
    r"TOKENIZERS_PARALLELISM|HF_HOME|HF_HUB_(CACHE|OFFLINE)|VF_RUN_ID|"
    rf"{PROCESS}",
    re.IGNORECASE,
)
"""They may run code that the model has written, so none holds a key. A harness's ``forward_env``
adds others by name."""

DEVICES = ("CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "NVIDIA_VISIBLE_DEVICES", DISABLE)
"""Variables without a secret that workers get and the programs of rollouts do not."""

LIBRARIES = re.compile(
    r"(CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|NCCL|GLOO|UCX|UCC|FI|OMPI|RDMAV|NIXL|HIP|ROCR?|HSA|RCCL|"
    r"TORCH|TORCHINDUCTOR|TORCHELASTIC|TORCHDYNAMO|PYTORCH|TRITON|XLA|VLLM|SGLANG|LMCACHE|"
    r"FLASHINFER|FLASH_ATTN|DG|OMP|KMP|GOMP|MKL|OPENBLAS|NUMEXPR|NUMBA|DNNL|ONEDNN|GLIBC|MALLOC|"
    r"JEMALLOC|LD|DYLD|HF|TRANSFORMERS|TOKENIZERS|SAFETENSORS|SLURM|RAY|COVERAGE|PRIME_RL)_\w+|"
    r"HOSTNAME|CC|CXX|NO_COLOR|COLUMNS",
    re.IGNORECASE,
)
"""Settings of the libraries that engines and trainer consist of."""

SECRET = re.compile(
    r"(^|.*_)(\w*KEYS?|TOKEN|JWT|AUTH|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_.*|$)",
    re.IGNORECASE,
)
"""Names of variables that hold a key, whatever library they belong to."""


def is_public(name: str) -> bool:
    """Whether engines and trainer inherit it."""
    if PROGRAMS.fullmatch(name) or name in DEVICES:
        return True
    return bool(LIBRARIES.fullmatch(name)) and not SECRET.fullmatch(name)


def for_programs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What programs of a rollout inherit."""
    return {name: value for name, value in environ.items() if PROGRAMS.fullmatch(name)}


def for_workers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every environment worker inherits."""
    return for_programs(environ) | {name: environ[name] for name in DEVICES if name in environ}


def inherited(
    more: Collection[str] | None = (), environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What other processes of a run inherit. ``more``: names that the config adds; None: all."""
    if more is None:
        return dict(environ)
    return {name: value for name, value in environ.items() if is_public(name) or name in more}


def all_headers(headers: Mapping[str, str], from_env: Mapping[str, str]) -> dict[str, str]:
    """Headers with their values, those of environment variables among them."""
    return {**headers, **{name: os.environ[variable] for name, variable in from_env.items()}}


def check_exported(model: FrozenModel, where: str) -> None:
    """The variables of a table of the TOML are in the environment. Raises ``ConfigError``."""
    for variable in model.key_vars:
        if not os.environ.get(variable):
            raise ConfigError(
                f"{where}: api_key_var is {variable!r}, and the environment has no such variable, "
                "or an empty one. Export it, or leave api_key_var out if the endpoint needs no key."
            )
    check_headers(model.headers_from_env, where)


def check_headers(from_env: Mapping[str, str], where: str) -> None:
    """The variables with values of headers are in the environment. Raises ``ConfigError``."""
    for name, variable in from_env.items():
        if not os.environ.get(variable):
            raise ConfigError(
                f"{where}: headers_from_env has the header {name} from {variable!r}, and the "
                "environment has no such variable, or an empty one. Export it."
            )
