"""``prime-rl run``."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prime_rl.config.run import RunConfig
    from prime_rl.plugins.view import RunView
    from prime_rl.rundir.checkpoints import Checkpoint
    from prime_rl_app.resolve import Resolved

NAME = "prime-rl"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml... [--resume [latest|auto|STEP|DIR]] [--dotted.key VALUE]...",
            help="TOML files, composed left to right, then overrides: --trainer.optim.lr 1e-4. "
            "--resume continues from a checkpoint: the run's newest one, that of a step, or (in a "
            "new run) that in a folder; auto starts the run where there is none.",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Build everything, show what would run, start nothing."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --dry-run: build no environment; saves seconds.")
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(help="The launcher that starts the processes; short for --launcher.type."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it in a browser too; short for --view.watch true.")
    ] = False,
) -> None:
    """Train: start every process of a run, show what they do, and print a summary. Ctrl-C,
    SIGTERM and SIGHUP save and stop the run; a second Ctrl-C ends it at once.

    ```
    prime-rl run my.toml --max-steps 20 --trainer.optim.lr 1e-4
    ```
    """
    from prime_rl.entries import leaving_out
    from prime_rl.rundir.directory import held, make_run_dir
    from prime_rl_app.libraries import weight_notes
    from prime_rl_app.models import check_made
    from prime_rl_app.output import say
    from prime_rl_app.resolve import check

    arguments, checkpoint = split_resume([*files, *context.args])
    paths, overrides = split_arguments(arguments)
    overrides += [] if launcher is None else [f"--launcher.type={launcher}"]
    overrides += ["--view.watch=true"] if watch else []
    config = _load(paths, overrides)
    resolved = check(config, checkpoint)
    check_made(config, resolved.hooks)
    for note in weight_notes(config, resolved.hooks):
        typer.echo(note, err=True)
    by_path = Path(sys.argv[0]).name == NAME and shutil.which(NAME) is None
    again = shlex.join([sys.argv[0] if by_path else NAME, "run", *paths, *overrides])
    chosen = resolved.earlier_run
    if chosen is not None:
        from prime_rl_app.resume import begin

        for note in chosen.notes:
            say(note, sys.stdout)
        if not (dry_run or chosen.is_over):
            with begin(config, chosen) as (run_dir, resumed):
                _train(resolved, run_dir, again, resumed)
    elif dry_run:
        with leaving_out(config.plugins.disabled):
            view = _view(resolved, Path(config.output_dir))
            lines = view.dry_run(config, resolved.hooks, quick)
        run_dir = make_run_dir(config, dry=True)
        typer.echo("\n".join(lines), err=True)  # stdout has one line, for scripts
        typer.echo(f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}")
    else:
        with held(run_dir := make_run_dir(config)):
            _train(resolved, run_dir, again, None)


def sft(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml... [--resume [latest|auto|STEP|DIR]] [--dotted.key VALUE]...",
            help="TOML files with a table [sft], then overrides, as of `prime-rl run`: "
            "--sft.epochs 3.",
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Build everything, show what would run, start nothing."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it in a browser too; short for --view.watch true.")
    ] = False,
) -> None:
    """Supervised fine-tuning on a data set of messages. Without evaluations, no engine is started.

    ```
    prime-rl sft my.toml --sft.data chats.jsonl
    ```
    """
    from prime_rl.errors import ConfigError
    from prime_rl_app.config import override, read_toml
    from prime_rl_app.sft import TABLE

    arguments, _ = split_resume([*files, *context.args])
    paths, overrides = split_arguments(arguments)
    tables = [read_toml(Path(path)) for path in paths]
    tables.append({})
    override(tables[-1], overrides)
    # The config of a run that goes on has the tables already that [sft] stands for.
    if not any(TABLE in table or "run" in table for table in tables):
        raise ConfigError(
            "the config has no table [sft]. Name the data: --sft.data FILE, or in the TOML: "
            '[sft] data = "chats.jsonl"'
        )
    run(context, files, dry_run=dry_run, watch=watch)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split into files, which come first, and overrides, which start at the first ``--key``. A file
    may follow an ``@``."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("--")), len(arguments))
    files = [word.removeprefix("@") for word in arguments[:first]]
    return [file for file in files if file], arguments[first:]


def split_resume(arguments: list[str]) -> tuple[list[str], str | None]:
    """Extract ``--resume [WHAT]`` or ``--resume=WHAT``; ``latest`` if it has no value. Typer has no
    options with an optional value. ``--resume.step`` and ``--resume.dir`` are the same."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name not in ("--resume", "--resume.step", "--resume.dir"):
            continue
        before = arguments[:index]
        after = arguments[index + 1 :]
        if equals:
            return before + after, value
        if after and not after[0].startswith("--") and not after[0].endswith(".toml"):
            return before + after[1:], after[0]
        return before + after, "latest"

    return arguments, None


def _load(paths: list[str], overrides: list[str]) -> RunConfig:
    """The config, with what ``--without`` disables: remote processes need to know it too."""
    from prime_rl.registry.manager import disabled_names
    from prime_rl_app.config import fitted, load_config
    from prime_rl_app.output import say

    config = load_config([Path(path) for path in paths], overrides)
    named = {"disabled": (*config.plugins.disabled, *disabled_names())}
    plugins = config.plugins.model_copy(update=named)
    config, notices = fitted(config.model_copy(update={"plugins": plugins}))
    for notice in notices:
        say(notice, sys.stderr)
    return config


def _view(resolved: Resolved, run_dir: Path) -> RunView:
    from prime_rl.registry.offers import VIEW, make

    config = resolved.config
    return make(
        VIEW,
        config.view.type,
        table=config.view.settings,
        hooks=resolved.hooks,
        where="view",
        arguments=(run_dir, config.max_steps),
    )


def _train(resolved: Resolved, run_dir: Path, again: str, checkpoint: Checkpoint | None) -> None:
    from prime_rl.errors import RunError
    from prime_rl_app.output import say

    try:
        train(resolved, run_dir, again, checkpoint)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except RunError as error:
        say(f"error: {error}", sys.stderr)
        raise typer.Exit(1) from None


def train(
    resolved: Resolved,
    run_dir: Path,
    again: str,
    checkpoint: Checkpoint | None,
    on_step: Sequence[Callable[[int], object]] = (),
) -> None:
    """Train in a run directory and show it; ``again``: the command line that ``--resume``
    continues; ``on_step``: called with each step after it. Raises ``RunError`` if a process dies,
    ``KeyboardInterrupt`` after a stop, and what ``on_step`` raises."""
    from prime_rl.entries import leaving_out
    from prime_rl.registry.manager import wrappers
    from prime_rl.rundir.control import Stopped, supervised
    from prime_rl_app import supervisor
    from prime_rl_app.output import CallingView, SafeView

    config = resolved.config
    view: RunView = SafeView(_view(resolved, run_dir))
    if on_step:
        view = CallingView(view, on_step, checkpoint.step if checkpoint else 0)
    try:
        with leaving_out(config.plugins.disabled), supervised(run_dir):
            for line in wrappers(resolved.hooks):
                view.print(line)
            with view:
                supervisor.run(resolved, view, checkpoint)
            view.ended()
    except KeyboardInterrupt as interrupt:
        stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(None, trained=False)
        named = "" if config.run.name else shlex.join(["--run.name", run_dir.name])
        view.stopped(stopped.step, stopped.trained, f"{again} {named}".strip())
        raise
