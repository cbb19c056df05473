"""``prime-rl eval``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_rl_tools.commands.options import with_options
from prime_rl_tools.eval.settings import EvalSettings

if TYPE_CHECKING:
    from prime_rl_tools.eval.request import EvalRequest


@with_options(EvalSettings)
def evaluate(
    context: typer.Context,
    options: dict[str, Any],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV | RUN | CONFIG.toml... [--orchestrator.eval.KEY VALUE]...",
            help="A taskset's id; a run (its name or path, or latest), whose orchestrator.eval.env "
            "tables are evaluated with its renderer; or TOML files with such tables, then "
            "overrides.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """As ``later.evaluate`` says."""
    from prime_rl_app.cli.run import split_arguments
    from prime_rl_tools.eval.request import read_request

    files = map(str, options.get("config", ()))
    words, overrides = split_arguments([*files, *(what or []), *context.args])
    _run(read_request(words, overrides, options), as_json)


def _run(request: EvalRequest, as_json: bool) -> None:
    import json
    import logging

    from prime_rl_tools.eval.run import as_record, evaluate
    from prime_rl_tools.eval.view import Bars, print_results
    from prime_rl_tools.terminal import Console

    bars = Bars(Console(stderr=True))
    log = logging.getLogger("prime_rl_evals.figures")
    log.disabled = True  # failures are in the table
    try:
        with bars:
            results = evaluate(request, bars)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; finished rollouts are in {request.output}. To continue, add --output "
            f"{request.output} --resume to the same command",
            err=True,
        )
        raise typer.Exit(130) from None
    finally:
        log.disabled = False

    if as_json:
        envs = {each.env: as_record(each) for each in results}
        record = {"model": request.endpoint.name, "output": str(request.output), "envs": envs}
        typer.echo(json.dumps(record, indent=2))
    else:
        print_results(Console(), results)
        typer.echo(f"\n{request.output}")

    if any(result.all_failed for result in results):
        raise typer.Exit(1)
