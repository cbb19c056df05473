"""Settings that the contract names: how rollouts are sampled, and models that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from prime_rl.config.base import HeaderName, Headers, Settings, VariableName, check_variable

_SET_ELSEWHERE = {
    "temperature": "set sampling.temperature",
    "max_tokens": "set sampling.max_completion_tokens",
    "max_completion_tokens": "set sampling.max_completion_tokens",
    "max_new_tokens": "set sampling.max_completion_tokens",
    "seed": "set the run's seed",
    "n": "set group_size",
    "best_of": "set group_size, and choose by a filter",
    "logprobs": "training always asks for them",
    "top_logprobs": "an algorithm asks for them",
    "prompt_logprobs": "an algorithm asks for them",
    "response_format": "ask for the format in the prompt, and reward it",
    "tools": "the environment gives them",
    "functions": "the environment gives them",
    "tool_choice": "the environment gives the tools, and the model decides",
    "function_call": "the environment gives the tools, and the model decides",
    "stop": "end the turn in the environment",
    "stop_token_ids": "end the turn in the environment",
    "messages": "the environment gives them",
    "prompt": "the environment gives it",
    "model": "set model.name",
    "cache_salt": "the run sets it, by the version of the weights",
}
"""Where to set what ``extra_body`` may not: by the key."""
_NESTED = {
    "extra_body",
    "sampling_params",
    "sampling",
    "extra_args",
    "vllm_xargs",
    "generation_config",
}
"""Tables of further parameters, which nothing would look through."""
_SHAPING_PARTS = (
    *(
        "temperature",
        "dynatemp",
        "top_",
        "topk",
        "topp",
        "min_p",
        "typical",
        "tfs",
        "cutoff",
        "mirostat",
        "xtc",
        "dry_",
    ),
    *("penalty", "logit", "bias", "beam", "min_tokens", "min_new_tokens", "bad_words", "banned"),
    *("allowed", "forced", "suppress", "no_repeat", "repetition_", "do_sample", "greedy"),
    *(
        "guided",
        "structured",
        "structural",
        "lora",
        "stop_",
        "grammar",
        "regex",
        "schema",
        "ebnf",
        "constrain",
    ),
    *("budget", "truncate", "continue_final", "add_generation_prompt", "prefill"),
)
"""A key with such a part shapes the distribution, or its condition, in some engine."""


def shaping_keys(extra_body: Mapping[str, Any]) -> dict[str, str]:
    """The keys that would shape or replace the sampling distribution, and what to do instead."""
    advice = {}
    for key in sorted(extra_body):
        name = key.lower().replace("-", "_")
        if name in _SET_ELSEWHERE:
            advice[key] = _SET_ELSEWHERE[name]
        elif name in _NESTED:
            advice[key] = "write its keys into extra_body itself"
        elif any(part in name for part in _SHAPING_PARTS):
            advice[key] = "leave it out; an evaluation may set it ([orchestrator.eval.sampling])"

    return advice


class SamplingConfig(Settings):
    """How rollouts are sampled. Training needs the whole distribution: no top_p, top_k or min_p."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the logits, in the engine and in the trainer."""
    max_completion_tokens: PositiveInt | None = None
    """None: up to the end of the context."""
    extra_body: dict[str, Any] = {}
    """More parameters of the engine's requests. Those that shape the distribution are refused, with
    the place to set them: the trainer has to reproduce it."""

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_distribution_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        advice = shaping_keys(value)
        if advice:
            raise ValueError(
                f"{', '.join(advice)} would shape or replace the distribution that the trainer "
                "has to reproduce. "
                + "; ".join(f"Instead of {key}: {text}" for key, text in advice.items())
            )
        return value


class FrozenModel(Settings):
    """A hosted model that the run neither starts nor updates: a teacher, a judge. ``prime-rl
    serve`` starts one; any server with the routes of ``docs/engines.md`` will do."""

    how_to_give: ClassVar[str] = (
        "Start the model (prime-rl serve MODEL --served-model-name NAME --port 8000) and give a "
        'table: { name = "NAME", base_url = ["http://127.0.0.1:8000/v1"] }'
    )
    """The way out of an error about such a table."""

    name: str
    """The model's name at the endpoint (``served_model_name``)."""
    base_url: tuple[str, ...]
    """One URL or a list of replicas, each ending in ``/v1``; a group's requests go to one."""
    api_key_var: str | tuple[str, ...] | None = None
    """Environment variable with the bearer key, or a list of several, which take turns: each
    request has the next key. None: no key."""
    headers: Headers = {}
    """HTTP headers of every request. No secrets: this is written to the run directory."""
    headers_from_env: dict[HeaderName, VariableName] = {}
    """HTTP headers of every request, from environment variables."""
    max_concurrency: PositiveInt = 32
    """Scoring requests in flight, over all replicas."""
    timeout: PositiveFloat = 600.0
    """Seconds one request may take."""

    @field_validator("api_key_var", mode="before")
    @classmethod
    def _names_variables(cls, value: Any) -> Any:
        names = [value] if value is None or isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names:
            raise ValueError("expected the name of an environment variable, or a list of names")
        for name in names:
            if not isinstance(name, str) and value is not None:
                raise ValueError(f"expected names of environment variables, got {name!r}")
            if name is not None:
                check_variable(name)
        return value

    @property
    def key_vars(self) -> tuple[str, ...]:
        """The environment variables with its keys."""
        names = self.api_key_var
        return (names,) if isinstance(names, str) else names or ()

    @model_validator(mode="before")
    @classmethod
    def _is_a_whole_table(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("base_url"):
            raise ValueError(
                "a frozen model needs a base_url, and there is none: a run hosts the policy only. "
                f"{cls.how_to_give}"
            )

        if isinstance(value, str):
            raise ValueError(f"expected a frozen model, got {value!r}. {cls.how_to_give}")

        return value

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith("/v1"):
                raise ValueError(f"expected http(s)://HOST[:PORT]/v1, got {url!r}")
        return tuple(url.rstrip("/") for url in urls)
