"""The policy's ``config.json``, without a network: a local folder, the model cache, the cache of
the hub, or a file of this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.config.trainer import EXPERT_KEYS
from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.rows import read_table
from prime_rl_app.models import model_path

SHIPPED = files("prime_rl_plan") / "models"
"""Architectures of the recipes' models, as their public repositories have them. Variants share one:
``Qwen3-4B-Instruct-2507`` differs in positions only."""


def architecture(config: RunConfig) -> Any:
    """The table of ``config.json``. Raises ``ConfigError`` if the model is not known here, and
    ``RunError`` if the file is damaged."""
    path, _ = model_path(config, load_plugins(disabled=config.plugins.disabled))
    folder = Path(path)
    if (folder / "config.json").is_file():
        return read_table(folder / "config.json")
    name = config.model.name
    cached = _of_hub_cache(name)
    if cached is not None:
        return read_table(cached)
    base = name.rpartition("/")[2]
    known = sorted((each.name.removesuffix(".json") for each in SHIPPED.iterdir()), key=len)
    for each in reversed(known):
        if base == each or base.startswith(f"{each}-"):
            shipped: dict[str, Any] = json.loads((SHIPPED / f"{each}.json").read_text("utf-8"))
            return shipped

    raise ConfigError(
        f"model.name: {name!r} is not on this machine, and its architecture is not one that plan "
        f"knows ({', '.join(known)}). Put its config.json into a folder, and set model.name to it."
    )


def _of_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if name.count("/") != 1:
        return None
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def kv_bytes(table: dict[str, Any], size: int) -> int:
    """Bytes of one token's keys and values in all layers, at ``size`` bytes a number."""
    if table.get("kv_lora_rank"):  # latent attention: vLLM keeps what keys and values are made of
        latent = table["kv_lora_rank"] + table["qk_rope_head_dim"]
        return int(table["num_hidden_layers"] * latent * size)
    heads = table["num_attention_heads"]
    width = table.get("head_dim") or table["hidden_size"] // heads
    return int(2 * table["num_hidden_layers"] * _kv_heads(table) * width * size)


def _kv_heads(table: dict[str, Any]) -> int:
    return int(table.get("num_key_value_heads") or table["num_attention_heads"])


def num_experts(table: Mapping[str, Any]) -> int:
    """Of a layer; 0 without experts."""
    return next((int(table[key]) for key in EXPERT_KEYS if table.get(key)), 0)


def active_share(table: dict[str, Any], weights: float) -> float:
    """The share of the weights that one token meets; 1 without experts."""
    experts = num_experts(table)
    if not experts:
        return 1.0
    width = table.get("moe_intermediate_size") or table["intermediate_size"]
    num_dense = table.get("first_k_dense_replace") or 0  # layers of DeepSeek and GLM before them
    one = 3 * table["hidden_size"] * width * (table["num_hidden_layers"] - num_dense)
    idle = one * (experts - table["num_experts_per_tok"])
    return float((weights - idle) / weights)
