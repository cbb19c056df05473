"""What ``prime-rl eval`` was asked for, checked as far as that goes without sampling anything."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from prime_rl.config.explain import explain
from prime_rl.config.load import merge, parse_overrides, read_toml, set_at
from prime_rl.config.orchestrator import EvalConfig, EvalEnvConfig, EvalSamplingConfig
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.env import check_taskset
from prime_rl.orchestrator.episode import ModelEndpoint
from prime_rl.plugins.errors import ConfigError
from prime_rl.run.serve_request import read_key

PROBE_SECONDS = 10.0

KEYLESS = {"model": {"name": "the endpoint's"}, "max_steps": 1}
"""What a run's TOML must have, and an evaluation has no use for."""


@dataclass(frozen=True)
class EvalRequest:
    """One evaluation: environments against an endpoint."""

    envs: tuple[EvalEnvConfig, ...]
    sampling: EvalSamplingConfig
    """What each env's own is laid over."""
    endpoint: ModelEndpoint
    output: Path
    max_concurrency: int = 32
    """Rollouts in flight at once."""
    seed: int | None = None
    """Rollout m of example e is sampled with seed + e * group_size + m. None: the server's."""
    resume: bool = False

    def as_record(self) -> dict[str, Any]:
        """What a rollout depends on; how many there are, and how long one may take, may change."""
        free = {"num_examples", "group_size", "timeout", "interval"}
        return {
            "model": self.endpoint.name,
            "seed": self.seed,
            "sampling": self.sampling.model_dump(mode="json", exclude_unset=True),
            "env": {
                env.label: env.model_dump(mode="json", exclude_unset=True, exclude=free)
                for env in self.envs
            },
        }


def read_envs(
    what: Sequence[str],
    overrides: Sequence[str],
    env: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> EvalConfig:
    """``[orchestrator.eval]`` of TOML files, or of one environment's id; ``env`` and ``sampling``
    (None: not given) are laid over every env.

    Raises ``ConfigError``.
    """
    table: dict[str, Any] = dict(KEYLESS)
    if what and all(word.endswith(".toml") for word in what):
        for word in what:
            table = merge(table, read_toml(Path(word)))
        for path, value in parse_overrides(overrides):
            set_at(table, path, value)
    elif len(what) == 1 and not overrides:
        table["orchestrator"] = {"eval": {"env": [{"id": what[0]}]}}
    else:
        raise ConfigError(
            f"{' '.join([*what, *overrides])!r}: expected one ENV or TOML files, then options; "
            "prime-rl eval --help lists them"
        )
    config = _validated(table)
    if not config.orchestrator.eval.env:
        raise ConfigError(f"{', '.join(what)}: there is no table [[orchestrator.eval.env]]")
    evaluation = config.orchestrator.eval.model_dump(exclude_unset=True)
    evaluation["env"] = [_laid_over(each, env, sampling) for each in evaluation["env"]]
    return _validated(KEYLESS | {"orchestrator": {"eval": evaluation}}).orchestrator.eval


def _laid_over(
    table: Mapping[str, Any], env: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    given = {key: value for key, value in env.items() if value is not None}
    sampled = {key: value for key, value in sampling.items() if value is not None}
    if sampled:
        given["sampling"] = sampled
    return merge(table, given)


def _validated(table: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from error


def check_envs(config: EvalConfig) -> None:
    """Raises ``ConfigError`` for a taskset that is not installed, or two envs of one name."""
    for env in config.env:
        check_taskset(env.id, f"env {env.label!r}")
    for label, number in Counter(folder_of(env.label) for env in config.env).items():
        if number > 1:
            raise ConfigError(f"{number} envs are called {label!r}. Give each a name of its own.")


def folder_of(label: str) -> str:
    """An env's name as a folder's."""
    return re.sub(r"[^\w.+=@-]", "_", label)


def read_args(text: str | None) -> dict[str, Any] | None:
    """``--env-args``: a JSON object. Raises ``ConfigError``."""
    if text is None:
        return None
    try:
        args = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--env-args: not JSON: {error}: {text!r}") from error
    if not isinstance(args, dict):
        raise ConfigError(f"--env-args: expected a JSON object like '{{\"key\": 1}}', got {text!r}")
    return args


def find_endpoint(
    base_url: str, model: str | None, api_key_var: str | None, timeout: float | None = None
) -> ModelEndpoint:
    """Ask the endpoint which models it has. Raises ``ConfigError`` if it does not answer, wants a
    key, or has another model."""
    url = base_url.rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise ConfigError(f"--base-url: expected http(s)://HOST[:PORT]/v1, got {base_url!r}")
    key = read_key(api_key_var)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=PROBE_SECONDS)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"--base-url: {url} does not answer ({type(error).__name__}: {error}). Start the model "
            "(prime-rl serve MODEL) or mend the URL."
        ) from error
    if answer.status_code in (401, 403):
        wants = "wants a key. Name the environment variable that holds it"
        refuses = f"does not accept the key in {api_key_var}"
        raise ConfigError(
            f"--api-key-var: {url} answers {answer.status_code}: it {refuses if key else wants}"
        )
    name = _model(url, model, answer)
    return ModelEndpoint(name, url, api_key_var or "", client="chat", timeout=timeout)


def _model(url: str, model: str | None, answer: httpx.Response) -> str:
    """The model to ask for; an endpoint that lists none is believed."""
    try:
        listed = [str(each["id"]) for each in answer.json()["data"]] if answer.is_success else []
    except (ValueError, KeyError, TypeError):
        listed = []
    if not listed:
        if model is not None and answer.status_code in (200, 404, 405):
            return model
        raise ConfigError(
            f"--base-url: {url}/models answers {answer.status_code}, expected a list of models. "
            "An OpenAI-compatible URL mostly ends in /v1" + ("." if model else "; or give --model.")
        )
    if model is None and len(listed) == 1:
        return listed[0]
    if model in listed:
        return str(model)
    close = get_close_matches(model or "", listed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    said = "which model" if model is None else f"no model {model!r}"
    raise ConfigError(
        f"--model: {said} at {url}: there are {', '.join(sorted(listed)[:20])}.{hint}"
    )
