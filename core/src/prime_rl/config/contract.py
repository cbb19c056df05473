"""Settings that the contract names: how rollouts are sampled, and models that do not train."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from prime_rl.config.base import Settings

SHAPING_KEYS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("n", "best_of", "min_tokens", "bad_words", "allowed_token_ids", "typical_p"),
    *("stop", "stop_token_ids", "logits_processors", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "use_beam_search", "logprobs"),
}
"""Sampling parameters that training sets itself or must not allow."""


class SamplingConfig(Settings):
    """How rollouts are sampled. Training needs the whole distribution: no top_p, top_k or min_p."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the logits, in the engine and in the trainer."""
    max_completion_tokens: PositiveInt | None = None
    """None: up to the end of the context."""
    extra_body: dict[str, Any] = {}
    """More sampling parameters of the engine, except those that change the distribution."""

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_distribution_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        shaping = sorted(set(value) & SHAPING_KEYS)
        if shaping:
            raise ValueError(
                f"{', '.join(shaping)} would shape or replace the distribution that the trainer "
                "has to reproduce; set temperature and max_completion_tokens by their own keys"
            )
        return value


class FrozenModel(Settings):
    """A hosted model that the run neither starts nor updates: a teacher, a judge. ``prime-rl
    serve`` starts one; any server with the routes of ``docs/engines.md`` will do."""

    name: str
    """The model's name at the endpoint (``served_model_name``)."""
    base_url: tuple[str, ...]
    """One URL or a list of replicas, each ending in ``/v1``; a group's requests go to one."""
    api_key_var: str | None = None
    """Environment variable with the bearer key. None: no key."""
    max_concurrency: PositiveInt = 32
    """Scoring requests in flight, over all replicas."""
    timeout: PositiveFloat = 600.0
    """Seconds one request may take."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_whole_table(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("base_url"):
            raise ValueError(
                "a frozen model needs a base_url, and there is none: prime-rl hosts the policy "
                "only. Start the model (prime-rl serve MODEL) and give its URL, e.g. "
                'base_url = ["http://127.0.0.1:8000/v1"]'
            )
        if isinstance(value, str):
            raise ValueError(
                f"expected a frozen model, a table with name and base_url, got {value!r}"
            )
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
