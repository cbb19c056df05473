"""Which adapters vLLM serves beside the base (``enable_lora``), instead of merged into it."""

from __future__ import annotations

import json
from pathlib import Path

from prime_rl import WeightsError
from prime_rl_engine_kit.adapter import is_adapter


def check_native(directory: Path, max_rank: int) -> None:
    """Raises ``WeightsError`` for weights that are no adapter, for one that trains whole modules or
    experts, and for one of a higher rank than ``max_rank`` (``max_lora_rank``). All else is checked
    as for any engine (``prime_rl_engine_kit.adapter``)."""
    if not is_adapter(directory):
        raise WeightsError(
            f"{directory} is no adapter, and inference.vllm.enable_lora is set: the engine serves "
            "its model with adapters only. Leave enable_lora out."
        )

    path = directory / "adapter_config.json"
    try:
        config = dict(json.loads(path.read_text("utf-8-sig")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path}: expected a JSON object: {error}") from error

    whole = config.get("modules_to_save")
    if whole:
        raise WeightsError(
            f"{directory} trains {', '.join(whole)} whole, which vLLM's adapters cannot. Leave "
            "inference.vllm.enable_lora out: the adapter is merged then."
        )

    stacked = config.get("target_parameters")
    if stacked:
        raise WeightsError(
            f"{directory} has adapters of experts ({', '.join(stacked)}) under PEFT's names for "
            "stacked parameters, which vLLM reads for some models only. Leave "
            "inference.vllm.enable_lora out: the adapter is merged then."
        )

    if config.get("r", 0) > max_rank:
        raise WeightsError(
            f"{directory} has rank {config['r']}, and the engine takes {max_rank} at most. Set "
            f"inference.vllm.max_lora_rank = {config['r']} or more."
        )
