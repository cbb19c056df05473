"""From a command line of ``prime-rl eval`` to a checked request. Nothing is sampled here."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from prime_rl.config.explain import explain
from prime_rl.config.orchestrator import EvalConfig, OrchestratorConfig
from prime_rl.config.removed import without_removed
from prime_rl.env.episode import ModelEndpoint
from prime_rl.env.loading import check_taskset
from prime_rl.env.rendering import read_renderer
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.build import build_renderer
from prime_rl.proxies import is_loopback, settle
from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.launch import Launch
from prime_rl_app.config import (
    installed_defaults,
    keep_texts,
    merge,
    parse_overrides,
    read_toml,
    set_at,
)
from prime_rl_app.run_states import LATEST, find_run
from prime_rl_tools.commands.options import AnySettings, validated
from prime_rl_tools.eval.settings import EvalSettings
from prime_rl_tools.replay.score import read_run_config
from prime_rl_tools.serve.request import read_key

PROBE_SECONDS = 10.0

RUN_JSON = Path("configs", "run.json")
"""The resolved config in a run directory."""


@dataclass(frozen=True)
class RunRenderer:
    """How a run turns messages into tokens."""

    config: Any
    """A config object of the ``renderers`` package."""
    tokenizer_path: Path


@dataclass(frozen=True)
class EvalRequest:
    """One evaluation: environments against an endpoint."""

    settings: EvalSettings
    evaluation: EvalConfig
    """The environments, with the settings laid over each."""
    endpoint: ModelEndpoint
    output: Path
    renderer: RunRenderer | None = None
    """None: the endpoint's chat template."""

    def as_record(self) -> dict[str, Any]:
        """What a rollout depends on. Their number and their time limit may change on resume."""
        free = {"num_examples", "group_size", "timeout", "interval"}
        renderer = self.renderer
        return {
            **({"renderer": renderer.config.model_dump(mode="json")} if renderer else {}),
            "model": self.endpoint.name,
            "seed": self.settings.seed,
            "sampling": self.evaluation.sampling.model_dump(mode="json", exclude_unset=True),
            "env": {
                env.label: env.model_dump(mode="json", exclude_unset=True, exclude=free)
                for env in self.evaluation.env
            },
        }


def read_request(
    what: Sequence[str], overrides: Sequence[str], options: Mapping[str, Any]
) -> EvalRequest:
    """Check a command line and ask the endpoint for its models. Raises ``ConfigError``."""
    settings = validated(EvalSettings, options)
    evaluation = read_envs(what, overrides, settings)
    try:
        check_envs(evaluation)
    except ConfigError as error:
        is_a_name = len(what) == 1 and not what[0].endswith(".toml")
        if not is_a_name or "no taskset" not in str(error):
            raise
        raise ConfigError(f"{error} No run of that name is in outputs either.") from error
    run_dir = run_named(what)
    renderer = None if run_dir is None else run_renderer(run_dir)
    endpoint = find_endpoint(
        settings.base_url,
        settings.model,
        settings.api_key_var,
        client="chat" if renderer is None else "tokens",
    )
    output = settings.output or _default_output(
        [env.label for env in evaluation.env], endpoint.name, settings.resume
    )
    return EvalRequest(settings, evaluation, endpoint, output, renderer)


def _default_output(labels: list[str], model: str, resume: bool) -> Path:
    """``outputs/evals/ENVS--MODEL``, numbered if that is taken and is not to be resumed."""
    name = folder_of(f"{'+'.join(labels)}--{model.rstrip('/').rpartition('/')[2]}")
    base = Path("outputs/evals") / name
    number = 1
    path = base
    while path.exists() and not resume:
        number += 1
        path = base.with_name(f"{name}-{number}")
    return path


def run_named(what: Sequence[str], output_dir: Path = Path("outputs")) -> Path | None:
    """The run whose path or name is the only word, or ``latest``. A taskset of the same name comes
    first."""
    if len(what) != 1:
        return None
    if what[0] == LATEST:
        return find_run(LATEST, output_dir)
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


def run_renderer(run_dir: Path) -> RunRenderer:
    """The renderer of a run, and the folder of its tokenizer. Raises ``ConfigError``."""
    config = read_run_config(run_dir)
    folders = [run_dir / "weights"]
    with suppress(RunError):  # a run that never started has no such file
        folders.append(Path(Launch.read(run_dir).model_path))
    folder = next((each for each in folders if (each / "tokenizer_config.json").exists()), None)
    if folder is None:
        raise ConfigError(
            f"{run_dir}: no tokenizer in {' nor in '.join(map(str, folders))}. Evaluate an ENV, "
            "which the endpoint's chat template renders"
        )

    hooks = load_plugins(disabled=config.plugins.disabled)
    chosen = read_renderer(run_dir)
    return RunRenderer(chosen or build_renderer(config, hooks, folder), folder)


def read_envs(what: Sequence[str], overrides: Sequence[str], settings: EvalSettings) -> EvalConfig:
    """``[orchestrator.eval]`` of TOML files, of a run, or of one environment's id, with the
    settings laid over every env. Raises ``ConfigError``."""
    pairs = parse_overrides(overrides)
    for path, _ in pairs:
        if path[:2] != ["orchestrator", "eval"]:
            raise ConfigError(_unknown_option(path))

    run_dir = run_named(what)
    table: dict[str, Any] = {}
    if run_dir is not None:
        table = read_run_config(run_dir).model_dump(mode="json")
    elif what and all(word.endswith(".toml") for word in what):
        for word in what:
            table = merge(table, read_toml(Path(word)))
    elif len(what) == 1 and not pairs:
        table["orchestrator"] = {"eval": {"env": [{"id": what[0]}]}}
    else:
        raise ConfigError(
            f"{' '.join([*what, *overrides])!r}: expected one ENV, one RUN or TOML files, "
            "then options; prime-rl eval --help lists them"
        )

    for path, value in pairs:
        set_at(table, path, value)
    keep_texts(table, overrides)
    whole = without_removed(merge(installed_defaults(), table)).get("orchestrator")
    evaluation = _validated(OrchestratorConfig, whole, "orchestrator").eval
    if not evaluation.env:
        raise ConfigError(f"{', '.join(what)}: there is no table [[orchestrator.eval.env]]")
    laid = evaluation.model_dump(exclude_unset=True)
    laid["env"] = [merge(env, settings.laid_over()) for env in laid["env"]]
    return _validated(EvalConfig, laid, "orchestrator.eval")


def _unknown_option(path: Sequence[str]) -> str:
    close = get_close_matches(".".join(path), EvalSettings.model_fields, n=1)
    hint = f"; did you mean --{close[0].replace('_', '-')}?" if close else "."
    return (
        f"--{'.'.join(path)}: unknown option{hint} prime-rl eval takes --orchestrator.eval.KEY and "
        "what --help lists"
    )


def _validated(model: type[AnySettings], table: object, where: str) -> AnySettings:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, model, where)) from error


def check_envs(config: EvalConfig) -> None:
    """Raises ``ConfigError`` for a taskset that is not installed, or two envs of one name."""
    for env in config.env:
        check_taskset(env.id, f"env {env.label!r}")
    for label, number in Counter(folder_of(env.label) for env in config.env).items():
        if number > 1:
            raise ConfigError(f"{number} envs are called {label!r}. Give each a name of its own.")


def folder_of(label: str) -> str:
    """The name of an env's folder."""
    return re.sub(r"[^\w.+=@-]", "_", label)


def find_endpoint(
    base_url: str,
    model: str | None,
    api_key_var: str | None,
    client: str = "chat",
) -> ModelEndpoint:
    """Ask the endpoint which models it has. Raises ``ConfigError`` if it does not answer, requires
    a key, lacks the model, or has no token route and ``client`` is ``"tokens"``."""
    url = base_url.rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise ConfigError(f"--base-url: expected http(s)://HOST[:PORT]/v1, got {base_url!r}")
    settle(os.environ, [url])
    key = read_key(api_key_var)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(
            f"{url}/models", headers=headers, timeout=PROBE_SECONDS, trust_env=not is_loopback(url)
        )
    except httpx.HTTPError as error:
        raise ConfigError(
            f"--base-url: {url} does not answer ({type(error).__name__}: {error}). Start the model "
            "(prime-rl serve MODEL) or fix the URL."
        ) from error

    if answer.status_code in (401, 403):
        missing = "it requires a key. Name the environment variable that holds it"
        wrong = f"it does not accept the key in {api_key_var}"
        raise ConfigError(
            f"--api-key-var: {url} answers {answer.status_code}: {wrong if key else missing}"
        )

    name = _model(url, model, answer)
    if client == "tokens":
        _check_tokens(url.removesuffix("/v1"), headers)
    return ModelEndpoint(name, url, api_key_var or "", client=client)


def _check_tokens(root: str, headers: Mapping[str, str]) -> None:
    route = f"{root}/inference/v1/generate"
    remote = not is_loopback(root)
    answer = httpx.post(route, headers=headers, json={}, timeout=PROBE_SECONDS, trust_env=remote)
    status = answer.status_code
    if status in (404, 405):
        raise ConfigError(
            f"--base-url: POST {route} answers {status}, expected 400: a run's renderer sends "
            "tokens, and this endpoint does not accept them. Serve the model with prime-rl serve "
            "RUN/weights (vLLM: --enable-scale-out), or evaluate an ENV, which the endpoint's chat "
            "template renders"
        )


def _model(url: str, model: str | None, answer: httpx.Response) -> str:
    """The model's name. If the endpoint lists no models, ``model`` is taken unchecked."""
    try:
        listed = [str(each["id"]) for each in answer.json()["data"]] if answer.is_success else []
    except (ValueError, KeyError, TypeError):
        listed = []

    if not listed:
        if model is not None and answer.status_code in (200, 404, 405):
            return model
        raise ConfigError(
            f"--base-url: {url}/models answers {answer.status_code}, expected a list of models. "
            "An OpenAI-compatible URL usually ends in /v1" + ("." if model else "; or set --model.")
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
