"""References to frozen models, which run somewhere else."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from prime_rl.config.base import Settings


class FrozenModel(Settings):
    """A hosted model that the run neither starts nor updates: a teacher, a judge. ``prime-rl
    serve`` starts one; any server with the routes of ``docs/engines.md`` will do."""

    name: str
    """The model's name at the endpoint (``served_model_name``)."""
    base_url: tuple[str, ...]
    """One URL or a list of replicas, each ending in ``/v1``; a group's requests go to one replica.
    """
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
