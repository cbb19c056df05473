"""vLLM's own server as an engine of prime-rl.

This module only builds the command line of ``prime_rl_vllm.server``, which may run in another
Python environment. It imports nothing heavy.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, NonNegativeInt, model_validator

from prime_rl import (
    ConfigError,
    ConfigWarning,
    Engine,
    EngineCommand,
    EngineLaunch,
    PluginConfig,
    hookimpl,
)
from prime_rl_broadcast.group import TRANSPORTS
from prime_rl_vllm.arguments import (
    check_keys,
    check_policy,
    check_routes,
    check_split,
    coarse_parts,
    num_gpus,
)
from prime_rl_vllm.interpreter import check_interpreter, check_nixl


class VllmConfig(PluginConfig):
    """``[inference.vllm]``: any argument of vLLM's server, with underscores.

    ``gpu_memory_utilization = 0.8``, ``enforce_eager = true``, ``compilation_config = { level = 0
    }``. vLLM checks names and values when the server starts. Keys that prime-rl sets are refused.
    ``prefill_engines`` is a key of ours: further engines of each replica compute the prompts.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    dtype: str = "auto"
    """Dtype of weights and computation. ``auto`` is vLLM's choice. ``float32`` gives the smallest
    mismatch between engine and trainer, and is fast on CPUs without native bfloat16."""
    prefill_engines: NonNegativeInt = 0
    """Further engines of each replica, on GPUs of their own, that compute the prompts. The one that
    samples takes over their keys and values (needs ``nixl``)."""

    @model_validator(mode="after")
    def _check_keys(self) -> VllmConfig:
        check_keys(self.model_extra or {})
        check_split(self.arguments, self.prefill_engines)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments by name."""
        return self.model_dump(mode="json", exclude={"prefill_engines"})


class Vllm(Engine):
    """Starts ``prime_rl_vllm.server`` for a run."""

    name = "vllm"
    receives = TRANSPORTS
    config_class = VllmConfig

    def check(self, python: Path | None) -> None:
        """Check that the settings sample a policy at the weights that it is trained at, and that
        ``python`` has vLLM and this package. Raises ``ConfigError``; warns of settings by which the
        distributions of engine and trainer differ."""
        arguments = cast(VllmConfig, self.config).arguments
        check_policy(arguments)
        for note in coarse_parts(arguments):
            warnings.warn(f"inference.vllm.{note}", ConfigWarning, stacklevel=2)
        check_interpreter(python)
        if self._prefill_engines:
            check_nixl(python)

    @property
    def lacks(self) -> Mapping[str, str]:  # type: ignore[override]  # settings decide
        """With prefill engines, sleep: each engine has GPUs of its own."""
        why = "each engine has GPUs of its own (inference.vllm.prefill_engines)"
        return {"sleep": why} if self._prefill_engines else {}

    @property
    def _prefill_engines(self) -> int:
        return cast(VllmConfig, self.config).prefill_engines

    @property
    def num_gpus(self) -> int:
        """The product of tensor, pipeline and data parallelism, for each engine of the server."""
        return num_gpus(cast(VllmConfig, self.config).arguments) * (1 + self._prefill_engines)

    @property
    def capacity(self) -> int | None:
        """``max_num_seqs`` of each data-parallel engine. None: vLLM chooses it by the GPU."""
        arguments = cast(VllmConfig, self.config).arguments
        if arguments.get("max_num_seqs") is None:
            return None
        return int(arguments["max_num_seqs"]) * int(arguments.get("data_parallel_size", 1))

    @property
    def dtype(self) -> str | None:
        """The dtype under torch's name. None for ``auto``: it depends on model and device."""
        named = cast(VllmConfig, self.config).dtype
        return {"auto": None, "half": "float16", "float": "float32"}.get(named, named)

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """``python -m prime_rl_vllm.server ...``; the environment carries the admin key. Raises
        ``ConfigError`` for weights of a policy that cannot be replaced, and for routes that vLLM
        could not record."""
        if launch.weights_roots is not None:  # a run's engine: it gets new weights
            check_policy(cast(VllmConfig, self.config).arguments)
        arguments = cast(VllmConfig, self.config).arguments
        if launch.records_routes:
            check_routes(arguments)
            arguments["enable_return_routed_experts"] = True
            check_split(arguments, self._prefill_engines)
        if launch.can_sleep and self._prefill_engines:
            raise ConfigError(
                "inference.vllm.prefill_engines: the engines have GPUs of their own, and with "
                "deployment.colocated they would share those of the trainer. Leave one of them out."
            )
        options = {
            "model": launch.model_path,
            "served-model-name": launch.served_model_name,
            "host": launch.host,
            "port": launch.port,
            "max-model-len": launch.max_model_len,
            "seed": launch.seed % 2**32,  # vLLM seeds NumPy too, which takes no more
            "policy-version": launch.policy_version,
            "status-path": launch.status_path,
            "settings": json.dumps(arguments | {"prefill_engines": self._prefill_engines}),
        }
        argv = [str(launch.python or sys.executable), "-P", "-m", "prime_rl_vllm.server"]
        argv += [f"--weights-root={root}" for root in launch.weights_roots or ()]
        argv += ["--wait-for-model"] * launch.wait_for_model + ["--can-sleep"] * launch.can_sleep
        for option, value in options.items():
            if value is not None:
                argv += [f"--{option}", str(value)]

        return EngineCommand(argv=argv, env=_environment(launch))


def _environment(launch: EngineLaunch) -> dict[str, str]:
    return {
        "PRIME_RL_ADMIN_KEY": launch.admin_key,
        # Without byte code, each of vLLM's processes compiles its modules: a minute of start-up.
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


@hookimpl
def register_engines() -> list[type[Engine]]:
    return [Vllm]
