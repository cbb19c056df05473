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

from prime_rl.config.load import build_config, merge, parse_overrides, read_toml, set_at
from prime_rl.config.orchestrator import EvalConfig, EvalEnvConfig, EvalSamplingConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.episode import ModelEndpoint
from prime_rl.env.loading import check_taskset
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.build import build_renderer
from prime_rl.plugins.manager import load_plugins
from prime_rl.rundir.launch import Launch
from prime_rl_tools.serve.request import read_key

PROBE_SECONDS = 10.0

KEYLESS = {"model": {"name": "the endpoint's"}, "max_steps": 1}
"""What a run's TOML must have, and an evaluation has no use for."""

RUN_JSON = Path("configs", "run.json")
"""The resolved config in a run directory."""


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
    harness: dict[str, Any] | None = None
    """The harness of tasksets that bring none."""
    renderer: Any = None
    """A config object of the ``renderers`` package. None: the endpoint's chat template."""
    tokenizer_path: Path | None = None
    """Of the renderer."""

    def as_record(self) -> dict[str, Any]:
        """What a rollout depends on; how many there are, and how long one may take, may change."""
        free = {"num_examples", "group_size", "timeout", "interval"}
        rendered = {"renderer": self.renderer.model_dump(mode="json")} if self.renderer else {}
        return rendered | {
            "model": self.endpoint.name,
            "seed": self.seed,
            "sampling": self.sampling.model_dump(mode="json", exclude_unset=True),
            "env": {
                env.label: env.model_dump(mode="json", exclude_unset=True, exclude=free)
                for env in self.envs
            },
        }


def run_named(what: Sequence[str], output_dir: Path = Path("outputs")) -> Path | None:
    """The run that the only word is the path of, or the name of, unless a taskset is called so."""
    if len(what) != 1:
        return None
    for path in (Path(what[0]), output_dir / what[0]):
        if (path / RUN_JSON).is_file() and not (path != Path(what[0]) and _is_taskset(what[0])):
            return path
    return None


def _is_taskset(name: str) -> bool:
    try:
        check_taskset(name, "")
    except ConfigError:
        return False
    return True


def run_renderer(run_dir: Path) -> tuple[Any, Path]:
    """What a run renders with: its ``renderers`` config, and the folder of its tokenizer. Raises
    ``ConfigError``."""
    config = RunConfig.model_validate_json((run_dir / RUN_JSON).read_bytes())
    folders = [run_dir / "weights", Path(Launch.read(run_dir).model_path)]
    folder = next((each for each in folders if (each / "tokenizer_config.json").exists()), None)
    if folder is None:
        raise ConfigError(
            f"{run_dir}: no tokenizer in {' nor in '.join(map(str, folders))}. Evaluate an ENV, "
            "which the endpoint's chat template renders"
        )
    return build_renderer(config, load_plugins(disabled=config.plugins.disabled)), folder


def read_envs(
    what: Sequence[str],
    overrides: Sequence[str],
    env: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> EvalConfig:
    """``[orchestrator.eval]`` of TOML files, of a run, or of one environment's id; ``env`` and
    ``sampling`` (None: not given) are laid over every env.

    Raises ``ConfigError``.
    """
    table: dict[str, Any] = dict(KEYLESS)
    run_dir = run_named(what)
    if run_dir is not None or (what and all(word.endswith(".toml") for word in what)):
        for word in what if run_dir is None else ():
            table = merge(table, read_toml(Path(word)))
        if run_dir is not None:
            table = merge(table, json.loads((run_dir / RUN_JSON).read_text()))
        for path, value in parse_overrides(overrides):
            set_at(table, path, value)
    elif len(what) == 1 and not overrides:
        table["orchestrator"] = {"eval": {"env": [{"id": what[0]}]}}
    else:
        raise ConfigError(
            f"{' '.join([*what, *overrides])!r}: expected one ENV, one RUN or TOML files, "
            "then options; prime-rl eval --help lists them"
        )
    config = build_config(table)
    if not config.orchestrator.eval.env:
        raise ConfigError(f"{', '.join(what)}: there is no table [[orchestrator.eval.env]]")
    evaluation = config.orchestrator.eval.model_dump(exclude_unset=True)
    evaluation["env"] = [_laid_over(each, env, sampling) for each in evaluation["env"]]
    return build_config(KEYLESS | {"orchestrator": {"eval": evaluation}}).orchestrator.eval


def _laid_over(
    table: Mapping[str, Any], env: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    given = {key: value for key, value in env.items() if value is not None}
    sampled = {key: value for key, value in sampling.items() if value is not None}
    if sampled:
        given["sampling"] = sampled
    return merge(table, given)


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
    base_url: str,
    model: str | None,
    api_key_var: str | None,
    timeout: float | None = None,
    client: str = "chat",
) -> ModelEndpoint:
    """Ask the endpoint which models it has. Raises ``ConfigError`` if it does not answer, wants a
    key, has another model, or takes no tokens where ``client`` sends them."""
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
    if client == "tokens":
        _check_tokens(url.removesuffix("/v1"), headers)
    return ModelEndpoint(name, url, api_key_var or "", client=client, timeout=timeout)


def _check_tokens(root: str, headers: Mapping[str, str]) -> None:
    route = f"{root}/inference/v1/generate"
    status = httpx.post(route, headers=headers, json={}, timeout=PROBE_SECONDS).status_code
    if status in (404, 405):
        raise ConfigError(
            f"--base-url: POST {route} answers {status}, expected 400: a run's renderer sends "
            "tokens, and this endpoint takes none. Serve the model with prime-rl serve RUN/weights "
            "(vLLM: --enable-scale-out), or evaluate an ENV, which the endpoint's chat template "
            "renders"
        )


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
