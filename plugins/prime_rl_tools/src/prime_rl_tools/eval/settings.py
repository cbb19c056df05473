"""The options of ``prime-rl eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from prime_rl.config.base import Settings
from prime_rl.rundir.rows import unique_keys


def _json_object(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error

    if not isinstance(value, dict):
        raise ValueError("expected a JSON object like '{\"key\": 1}'")
    return value


class EvalSettings(Settings):
    """What is measured, and at which endpoint. A setting of the rollouts applies to every env."""

    config: tuple[Path, ...] = ()
    """A TOML file; the same as naming it first."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """The endpoint, OpenAI-compatible."""
    model: str | None = None
    """The model's name at the endpoint. Not needed if the endpoint has one model."""
    api_key_var: str | None = None
    """Environment variable with the endpoint's key."""
    num_examples: PositiveInt | None = None
    """Examples, from the first. 64 unless the TOML sets it."""
    group_size: PositiveInt | None = None
    """Rollouts per example, k of avg@k. 1 unless the TOML sets it."""
    env_args: Annotated[dict[str, Any], BeforeValidator(_json_object)] | None = None
    """The taskset's settings, as a JSON object."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """Longest reply, per turn."""
    max_turns: PositiveInt | None = None
    """Turns before a rollout is stopped."""
    timeout: PositiveFloat | None = None
    """Seconds per rollout. 600 unless the TOML sets it."""
    max_concurrency: PositiveInt = 32
    """Rollouts in flight at once."""
    seed: Annotated[int, Field(gt=-(2**62), lt=2**62)] | None = None
    """Rollout m of example e is sampled with seed + e * group_size + m. Left out: the endpoint's
    own seeds."""
    output: Path | None = None
    """Folder of the results. Left out: a new folder in outputs/evals."""
    resume: bool = False
    """Sample the rollouts that --output lacks, and those that failed."""

    def laid_over(self) -> dict[str, Any]:
        """The keys of an ``[[orchestrator.eval.env]]`` table that were given."""
        env = {
            "num_examples": self.num_examples,
            "group_size": self.group_size,
            "args": self.env_args,
            "max_turns": self.max_turns,
            "timeout": self.timeout,
        }
        sampling = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_tokens,
        }
        keys = {key: value for key, value in env.items() if value is not None}
        sampled = {key: value for key, value in sampling.items() if value is not None}
        return keys | ({"sampling": sampled} if sampled else {})
