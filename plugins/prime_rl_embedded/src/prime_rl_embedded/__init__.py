"""The embedded engine: continuous batching over a Hugging Face model, in a server process of its
own.

This module only builds the command line of ``prime_rl_embedded.server``. It imports nothing heavy.
"""

from __future__ import annotations

import sys
from typing import Literal, cast

from pydantic import NonNegativeInt, PositiveInt

from prime_rl import Engine, EngineCommand, EngineLaunch, PluginConfig, Removed, hookimpl
from prime_rl.rundir.machine import visible_gpus
from prime_rl_broadcast.group import TRANSPORTS


class EmbeddedConfig(PluginConfig):
    """``[inference.embedded]``."""

    removed = {
        "share_prefixes": Removed(
            default=True, instead="Identical prompts (those of a group) are always read once."
        )
    }

    num_slots: PositiveInt = 128
    """Requests that generate at the same time; the rest wait in a queue."""
    max_waiting: PositiveInt = 16384
    """Length of that queue; more requests get the status 429."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. ``auto`` is the model's own on a GPU, and float32 on a CPU:
    bfloat16 is ten times slower on CPUs without native support."""
    device: str = "auto"
    """``auto`` (CUDA if available, else CPU), ``cpu``, ``cuda`` or ``cuda:1``."""
    num_threads: PositiveInt = 1
    """Torch threads on CPU. 1 is fastest if the trainer shares the machine."""
    max_prefill_tokens: PositiveInt | None = None
    """Prompt tokens admitted per step. None: 1,024 on CPU (fits its caches), else 8,192."""
    prefix_cache_mib: NonNegativeInt = 0
    """Memory for keys and values of ended requests, so that the next turn of a conversation, or a
    question with the same solved examples, computes only what is new. Two runs of one seed then
    differ in the last bits: what is kept depends on when requests arrive. 0: nothing is kept."""
    fused: bool = True
    """Use the fused forward for Llama-shaped models, if it reproduces the model's own logits."""


class Embedded(Engine):
    """Starts ``prime_rl_embedded.server`` for a run."""

    name = "embedded"
    receives = TRANSPORTS
    config_class = EmbeddedConfig

    @property
    def capacity(self) -> int:
        """``num_slots``."""
        return cast(EmbeddedConfig, self.config).num_slots

    @property
    def dtype(self) -> str | None:
        """None: the model's own."""
        config = cast(EmbeddedConfig, self.config)
        if config.dtype != "auto":
            return config.dtype
        on_gpu = bool(visible_gpus()) if config.device == "auto" else config.device != "cpu"
        return None if on_gpu else "float32"

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """``python -m prime_rl_embedded.server ...``; the environment carries the admin key."""
        config = cast(EmbeddedConfig, self.config)
        options = {
            "model": launch.model_path,
            "served-model-name": launch.served_model_name,
            "host": launch.host,
            "port": launch.port,
            "max-model-len": launch.max_model_len,
            "seed": launch.seed,
            "policy-version": launch.policy_version,
            "status-path": launch.status_path,
            "settings": config.model_dump_json(),
        }
        roots = [f"--weights-root={root}" for root in launch.weights_roots or ()]
        argv = [sys.executable, "-P", "-m", "prime_rl_embedded.server", *roots]
        if launch.wait_for_model:
            argv.append("--wait-for-model")
        if launch.records_routes:
            argv.append("--record-routes")
        for option, value in options.items():
            if value is not None:
                argv += [f"--{option}", str(value)]

        threads = str(config.num_threads)
        return EngineCommand(
            argv=argv,
            env={
                "PRIME_RL_ADMIN_KEY": launch.admin_key,
                # Set before torch starts: spinning OpenMP threads would starve the trainer.
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "OMP_WAIT_POLICY": "PASSIVE",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )


@hookimpl
def register_engines() -> list[type[Engine]]:
    return [Embedded]
