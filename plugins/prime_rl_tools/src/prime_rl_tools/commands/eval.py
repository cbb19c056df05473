"""``prime-rl eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from prime_rl_tools.eval.request import EvalRequest

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def evaluate(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV | RUN | CONFIG.toml... [--dotted.key VALUE]...",
            help="A taskset's id; a run's name or folder, whose orchestrator.eval.env tables are "
            "evaluated with its renderer; or TOML files with such tables. Then overrides.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="A TOML file; the same as naming it first.")
    ] = None,
    base_url: Annotated[
        str, typer.Option(help="The endpoint, OpenAI-compatible.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="The model's name there; its only one if left out.")
    ] = None,
    api_key_var: Annotated[
        str | None, typer.Option(help="Environment variable with the endpoint's key.")
    ] = None,
    num_examples: Annotated[
        int | None, typer.Option(help="Examples, from the first; 64 if nothing says.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Rollouts an example, k of avg@k; 1 if nothing says.")
    ] = None,
    env_args: Annotated[
        str | None, typer.Option(help="The taskset's settings, as a JSON object.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply, per turn.")] = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Turns before a rollout is stopped.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds a rollout may take; 600 if nothing says.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 32,
    seed: Annotated[
        int | None, typer.Option(help="Sent with every rollout, each its own; none if left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results; outputs/evals/... if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Sample what --output lacks, or what failed there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on environments: any OpenAI-compatible endpoint, no training.

    Prints avg@k, and pass@k and pass^k where rewards are 0 or 1; every rollout is saved. The exit
    code is 1 if every rollout of an environment failed.
    """
    from prime_rl_tools.eval.request import (
        EvalRequest,
        check_envs,
        find_endpoint,
        read_args,
        read_envs,
        run_named,
        run_renderer,
    )

    env = {"num_examples": num_examples, "group_size": group_size, "args": read_args(env_args),
           "max_turns": max_turns, "timeout": timeout}  # fmt: skip
    sampling = {"temperature": temperature, "top_p": top_p, "max_completion_tokens": max_tokens}
    words = [*map(str, config or []), *(what or []), *context.args]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    settings = read_envs(words[:first], words[first:], env, sampling)
    check_envs(settings)
    run_dir = run_named(words[:first])
    renderer, tokenizer_path = (None, None) if run_dir is None else run_renderer(run_dir)
    client = "chat" if run_dir is None else "tokens"
    endpoint = find_endpoint(base_url, model, api_key_var, client=client)
    folder = output or default_output([each.label for each in settings.env], endpoint.name, resume)
    _run(
        EvalRequest(
            settings.env,
            settings.sampling,
            endpoint,
            folder,
            max_concurrency,
            seed,
            resume,
            settings.harness,
            renderer,
            tokenizer_path,
        ),
        as_json,
    )


def default_output(labels: list[str], model: str, resume: bool) -> Path:
    """``outputs/evals/ENVS--MODEL``, with a number where that is taken and nobody goes on with
    it."""
    from prime_rl_tools.eval.request import folder_of

    name = folder_of(f"{'+'.join(labels)}--{model.rstrip('/').rpartition('/')[2]}")
    base = Path("outputs/evals") / name
    number, path = 1, base
    while path.exists() and not resume:
        number += 1
        path = base.with_name(f"{name}-{number}")
    return path


def _run(request: EvalRequest, as_json: bool) -> None:
    import json
    import logging

    from rich.console import Console

    from prime_rl_tools.eval.run import as_record, evaluate
    from prime_rl_tools.eval.view import Bars, print_results

    bars, log = Bars(Console(stderr=True)), logging.getLogger("prime_rl.orchestrator.evals")
    log.disabled = True  # failures are in the table
    try:
        with bars:
            results = evaluate(request, bars)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; what is done is in {request.output}. The same command with --output "
            f"{request.output} --resume goes on",
            err=True,
        )
        raise typer.Exit(130) from None
    finally:
        log.disabled = False
    if as_json:
        record: dict[str, Any] = {each.env: as_record(each) for each in results}
        told = {"model": request.endpoint.name, "output": str(request.output), "envs": record}
        typer.echo(json.dumps(told, indent=2))
    else:
        print_results(Console(), results)
        typer.echo(f"\n{request.output}")
    if any(result.all_failed for result in results):
        raise typer.Exit(1)
