"""From ``[inference.vllm]`` to vLLM's command line, and the keys that prime-rl sets itself."""

from __future__ import annotations

import argparse
import difflib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from prime_rl import ConfigError

OWNED = {
    "model": "it is the run's model.name",
    "model_tag": "it is the run's model.name",
    "served_model_name": "it is the run's model.name",
    "host": "set inference.host",
    "port": "set inference.port",
    "max_model_len": "set inference.max_model_len",
    "seed": "set the run's seed",
    "api_key": "the key is the environment variable PRIME_RL_ENGINE_API_KEY",
    "logprobs_mode": "training needs processed_logprobs, those of the sampling distribution",
    "worker_extension_cls": "prime-rl sets an extension that loads new weights",
    "middleware": "prime-rl sets a middleware that answers its routes and checks its keys",
    "trust_request_chat_template": "the chat template of a request is a program that may not end",
    "lora_modules": "the trainer's adapter is served as it is published",
    "runner": "the engine samples tokens",
    "convert": "the engine samples tokens",
    "config": "write its keys into this table",
    "headless": "the process must serve HTTP",
    "uds": "the orchestrator connects over TCP",
    "ssl_keyfile": "the orchestrator uses plain HTTP",
    "ssl_certfile": "the orchestrator uses plain HTTP",
    "root_path": "the orchestrator expects the routes at the root",
    "api_server_count": "weight updates need a single API process",
    "tokens_only": "chat needs text",
}
"""Arguments of vLLM that the user cannot set, and why: prime-rl sets them, or they would break the
engine contract."""

DEFAULTS: dict[str, Any] = {
    # Otherwise OpenAI's routes default to the temperature and top_p in the model folder.
    "generation_config": "vllm",
    # ``top_logprobs`` may ask for the whole vocabulary; our routes have limits of their own.
    "max_logprobs": -1,
    "enable_prompt_tokens_details": True,
    "disable_uvicorn_access_log": True,
    "disable_fastapi_docs": True,
}
"""Our defaults for vLLM's arguments."""
HF_OVERRIDES = {
    # Otherwise a model in bfloat16 rounds its logits to bfloat16, but the trainer does not.
    "head_dtype": "float32",
}
"""Our defaults within vLLM's ``hf_overrides``."""

PARALLEL = ("tensor", "pipeline", "data")
"""The kinds of parallelism by which one engine uses several GPUs."""
NOT_SPLIT = {
    "kv_transfer_config": "prime-rl sets it for each engine",
    "kv_offloading_size": "vLLM has one way for keys and values to leave an engine",
    "enable_sleep_mode": "the engines have GPUs of their own",
    "device_ids": "prime-rl gives each engine its GPUs",
    "data_parallel_size": "each engine would need several ports; set inference.replicas",
    "pipeline_parallel_size": "NixlConnector hands no KV to the stages of a pipeline; set "
    "tensor_parallel_size",
    "distributed_executor_backend": "prime-rl gives each engine its GPUs, and vLLM hands them on "
    "to processes of its own only",
    "enable_return_routed_experts": "the engine that samples does not see a prompt's routes, which "
    "trainer.router_replay asks for",
}
"""Arguments of vLLM that an engine with ``prefill_engines`` cannot have, and why."""
UNSPLIT: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "distributed_executor_backend": ("mp", "uni"),
}
"""Their values that change nothing, beside those that are false."""

COARSE_CACHES = ("fp8", "int", "nvfp", "turboquant")
"""How the coarse formats of a KV cache begin."""
ROUTELESS = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Sizes that must be 1 where vLLM records routes (0.32, 0.33)."""
QUANTIZED = ("quantization", "quantization_config")
"""Arguments of vLLM that quantize weights."""
REQUANTIZED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Kinds of ``quantization`` that vLLM makes from weights in full precision, at each reload too."""
NOTED = {
    "kv_cache_dtype": "keys and values are rounded",
    "mamba_cache_dtype": "the states of recurrent layers are rounded",
    "mamba_ssm_cache_dtype": "the states of recurrent layers are rounded",
    "enable_mamba_cache_stochastic_rounding": "the states of recurrent layers are rounded",
    "lora_dtype": "the adapter is rounded",
    "logits_processors": "logits are changed before a token is sampled",
    "hf_overrides": "the engine's model is another one than the trainer's",
    **dict.fromkeys(QUANTIZED, "weights are rounded"),
}
"""Arguments of vLLM by which tokens are sampled from another distribution than the trainer's at
equal weights, and why."""


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The user's arguments over ours. Raises ``ConfigError`` for ``hf_overrides`` of another
    form than a table."""
    overrides = HF_OVERRIDES | _overrides(arguments)
    return DEFAULTS | dict(arguments) | {"hf_overrides": overrides}


def _overrides(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The user's ``hf_overrides``. Raises ``ConfigError`` if they are no table."""
    overrides = arguments.get("hf_overrides") or {}
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"inference.vllm.hf_overrides: is no JSON: {error}") from error

    if not isinstance(overrides, Mapping):
        raise ConfigError(f"inference.vllm.hf_overrides: is {overrides!r}, expected a table")
    return dict(overrides)


def coarse_parts(arguments: Mapping[str, Any]) -> list[str]:
    """What makes the engine sample from another distribution than the trainer's, and what that
    does."""
    notes = []
    for name, why in NOTED.items():
        value = arguments.get(name)
        if name == "hf_overrides":
            # Logits in float32 are the trainer's own.
            value = {k: v for k, v in _overrides(arguments).items() if HF_OVERRIDES.get(k) != v}
        if not value or value in ("auto", "float32"):
            continue
        if name == "kv_cache_dtype" and not str(value).startswith(COARSE_CACHES):
            continue

        notes.append(
            f"{name} is {value!r}, so {why}: tokens are sampled from a distribution that differs "
            "from the trainer's at equal weights. Their logprobs belong to it, so losses with an "
            "importance ratio correct for it; mismatch_kl shows how much it is"
        )

    return notes


def check_policy(arguments: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for an engine that would sample the policy of a run from weights that
    are not rounded from those it is trained at, with keys and values of other weights, or not at
    random."""
    quantized = {name: arguments.get(name) for name in QUANTIZED}
    if quantized["quantization"] in REQUANTIZED:
        del quantized["quantization"]
    overrides = _overrides(arguments)
    quantized["hf_overrides.quantization_config"] = overrides.get("quantization_config")
    for name, value in quantized.items():
        if value is not None:
            raise ConfigError(
                f"inference.vllm.{name}: is {value!r}; a run publishes weights in full precision, "
                "and vLLM rounds such weights anew only for quantization = "
                f"{', '.join(REQUANTIZED)}: else the policy would be sampled from other weights "
                "than it is trained at. Leave it out; a frozen model (prime-rl serve) may be "
                "quantized."
            )

    if arguments.get("load_format") == "dummy":
        raise ConfigError(
            "inference.vllm.load_format: is 'dummy'; the first rollouts would be sampled from "
            "random weights. Leave it out."
        )
    shared = ["kv_transfer_config"] if arguments.get("kv_transfer_config") else []
    if arguments.get("kv_offloading_backend") not in (None, "native"):
        shared.append("kv_offloading_backend")
    for name in shared:
        # Our salt counts the pauses of one process: another process, or the next one, repeats it.
        raise ConfigError(
            f"inference.vllm.{name}: keys and values would come from another server or a store, "
            "which keeps those of earlier weights, so the logprobs would be of no version of the "
            "policy. Leave it out. inference.vllm.prefill_engines computes prompts on other GPUs, "
            "with the same weights; kv_offloading_size alone keeps keys and values in this "
            "engine's host memory; a frozen model (prime-rl serve) may have it."
        )
    if arguments.get("watermark_config"):
        raise ConfigError(
            "inference.vllm.watermark_config: tokens would be chosen by a key and the tokens "
            "before them, so the rollouts of a group would repeat each other. Leave it out."
        )


def num_gpus(arguments: Mapping[str, Any]) -> int:
    """GPUs of one engine: the product of tensor, pipeline and data parallelism."""
    return math.prod(int(arguments.get(f"{kind}_parallel_size", 1)) for kind in PARALLEL)


def check_split(arguments: Mapping[str, Any], prefill_engines: int) -> None:
    """Raises ``ConfigError`` for arguments that do not go together with ``prefill_engines``."""
    if not prefill_engines:
        return

    for name, why in NOT_SPLIT.items():
        value = arguments.get(name)
        if value and value not in UNSPLIT.get(name, ()):
            raise ConfigError(
                f"inference.vllm.{name}: is {value!r}, and prefill_engines is {prefill_engines}: "
                f"{why}. Leave one of them out."
            )


def check_routes(arguments: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for an engine that could not record the choices of its routers."""
    reason = (
        "and vLLM records the experts of a token (trainer.router_replay) only without. Leave it "
        "out, or train without router_replay."
    )
    for name in ROUTELESS:
        number = arguments.get(name)
        if number not in (None, 1):
            raise ConfigError(f"inference.vllm.{name}: is {number!r}, {reason}")
    if arguments.get("enable_prefix_caching") is False:
        # It keeps the routes of a prefix beside its keys and values.
        raise ConfigError(
            "inference.vllm.enable_prefix_caching: is false, and vLLM records the experts of a "
            "token (trainer.router_replay) only with the cache. Leave it out, or train without "
            "router_replay."
        )


def check_keys(arguments: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for a key that the user cannot set, or that is misspelled."""
    for key in arguments:
        name = key.replace("-", "_")
        if name != key:
            raise ConfigError(f"inference.vllm.{key}: write it with underscores: {name}")
        if name in OWNED:
            raise ConfigError(f"inference.vllm.{key}: cannot be set here: {OWNED[name]}")
        if name.startswith("no_"):
            raise ConfigError(f"inference.vllm.{key}: write {name[3:]} = false")


def to_flags(arguments: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """The command line for a table, in the form that ``parser`` (vLLM's own) expects.

    Raises ``ConfigError`` for an argument that this version of vLLM does not have.
    """
    flags = _flags(parser)
    return [
        word for key, value in arguments.items() for word in _words(key, value, _flag(key, flags))
    ]


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        option[2:].replace("-", "_"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _flag(key: str, flags: Mapping[str, argparse.Action]) -> argparse.Action:
    if key in flags:
        return flags[key]
    near = difflib.get_close_matches(key, flags, n=1)
    hint = f"Did you mean {near[0]}?" if near else "See `vllm serve --help=all`."
    raise ConfigError(f"inference.vllm.{key}: this vLLM has no such argument. {hint}")


def _words(key: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """``--key=value``. A switch has no value; a list may become several words."""
    option = f"--{key.replace('_', '-')}"
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        yield from _switch(key, option, value=value, action=action)
    elif isinstance(value, list) and action.nargs in ("+", "*"):
        yield option
        yield from (_text(each) for each in value)
    else:
        yield f"{option}={_text(value)}"


def _switch(key: str, option: str, value: Any, action: argparse.Action) -> Iterator[str]:
    if not isinstance(value, bool):
        raise ConfigError(f"inference.vllm.{key}: is {value!r}, expected true or false")
    if value:
        yield option
    elif isinstance(action, argparse.BooleanOptionalAction):
        yield f"--no-{option[2:]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
