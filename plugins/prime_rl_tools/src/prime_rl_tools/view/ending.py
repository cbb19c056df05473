"""What is printed when a run has ended: the summary, and how to resume."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_rl.rundir.chat_template import read_chat_template
from prime_rl.rundir.checkpoints import durable, whole_steps
from prime_rl_app.output import as_reward, counted
from prime_rl_tools.doctor import Verdict
from prime_rl_tools.view.outcomes import outcomes_style, outcomes_text
from prime_rl_tools.view.summary import read_curve, restarts_text

COLLAPSED = 0.25
"""Share of the first reward below which the last one is a collapse; of positive rewards."""

MAX_ERRORS = 3
"""Logged errors that the summary shows."""

ROLLOUT_FAILED = r"\S+ \S+ WARNING prime_rl\S*: .*: rollout failed and will not train: (.+)"
"""A line of the orchestrator's log; the group is the reason."""

LONGEST_REASON = 300
"""Characters of a reason that the summary shows."""


def print_summary(console: Console, run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Print rewards and sample rollouts before and after training, and the paths of the results.
    ``summary``: what ``summary.json`` holds."""
    sampled = summary["sampled_reward"]
    measured = summary["eval"]
    console.print()
    if summary.get("stopped_at") is not None:
        console.print(f"[bold]Stopped at step {summary['stopped_at']}[/]")
    if sampled["first"] is not None:
        steps = f"mean of the first and last {sampled['window']} steps"
        at_first = as_reward(sampled["first"])
        at_last = as_reward(sampled["last"])
        console.print(
            f"Sampled reward  [bold]{at_first} → {at_last}[/]   "
            f"[dim]{'first and last step' if sampled['window'] == 1 else steps}[/]"
        )
        shares = sampled.get("outcomes")
        if shares:
            text = f"of rollouts {outcomes_text(shares)}   mean of all steps"
            console.print(Text(f"{'':16}{text}", outcomes_style(shares)), soft_wrap=True)

        failure = most_frequent_failure(run_dir)
        if failure:
            console.print(Text(f"{'':16}{failure}", "red"), soft_wrap=True)

        if sampled["first"] > 0 and sampled["last"] < COLLAPSED * sampled["first"]:
            console.print(
                Text(
                    f"WARNING  the sampled reward has collapsed: {sampled['first']:.3g} → "
                    f"{sampled['last']:.3g}. Lower trainer.optim.lr, and look at the loss and at "
                    "mismatch_kl: prime-rl report.",
                    "bold red",
                )
            )

    skips = [bool(share) for _, share in read_curve(run_dir / "metrics.jsonl", "optim/skipped")]
    if any(skips):
        said = (
            f"WARNING  {sum(skips)} of {len(skips)} steps left out optimizer steps: a loss or a "
            f"gradient was not finite, or nothing was left to train. {run_dir / 'logs'} says why."
        )
        console.print(Text(said, "bold red"))

    errors = logged_errors(run_dir)
    for error in errors[:MAX_ERRORS]:
        console.print(Text(f"ERROR  {error}", "red"))
    if len(errors) > MAX_ERRORS:
        console.print(Text(f"{len(errors) - MAX_ERRORS} more: {run_dir / 'logs'}", "red"))
    # Of each env the first evaluation and the last: a run that ended early (by the user, or by
    # [stop]) has none after training.
    before, during, after = (measured.get(when, []) for when in ("before", "during", "after"))
    for env, last in {each["env"]: each for each in (*during, *after)}.items():
        first = next(each for each in (*before, *during, *after) if each["env"] == env)
        _print_eval(console, None if first is last else first, last)

    template = read_chat_template(run_dir)
    if template is not None and template.warning is not None:
        console.print(Text.assemble(("WARNING  ", "bold red"), (template.warning, "red")))
    restarts = summary.get("restarts")
    if restarts:
        _print_line(console, f"Restarts        {restarts_text(restarts)}")
    _print_line(console, f"Run directory   {run_dir}")
    _print_line(console, f"Learning curve  {run_dir / summary['plot']}")


def logged_errors(run_dir: Path) -> list[str]:
    """What the processes of the last attempt logged as errors, each sort once, by its first words:
    a monitor that fails, a loss that is not finite. The run went on."""
    errors: dict[str, str] = {}
    for path in sorted((run_dir / "logs" / "latest").glob("*.log")):
        with path.open(errors="replace", encoding="utf-8") as file:
            for line in file:
                error = re.fullmatch(r"\S+ \S+ ERROR prime_rl\S*: (.+)", line.rstrip("\n"))
                if error:
                    sort = " ".join(re.sub(r"\d+", "0", error[1]).split()[:4])
                    errors.setdefault(sort, f"{path.stem}: {error[1]}")

    return [*errors.values()]


def most_frequent_failure(run_dir: Path) -> str:
    """Why rollouts failed most often, as the orchestrator of the last attempt logged it: a reward
    that raises, a time-out. Empty if none failed."""
    path = run_dir / "logs" / "latest" / "orchestrator.log"
    if not path.exists():
        return ""

    failures: dict[str, list[str]] = {}
    with path.open(errors="replace", encoding="utf-8") as file:
        for line in file:
            failed = re.fullmatch(ROLLOUT_FAILED, line.rstrip("\n"))
            if failed:
                # Rows and replies differ; the first words are those of the failure's sort.
                sort = " ".join(re.sub(r"\d+", "0", failed[1]).split()[:10])
                failures.setdefault(sort, []).append(failed[1])

    if not failures:
        return ""
    most = max(failures.values(), key=len)
    total = sum(map(len, failures.values()))
    reason = most[0] if len(most[0]) <= LONGEST_REASON else f"{most[0][:LONGEST_REASON]} ..."
    return f"{len(most)} of {counted(total, 'failure')}: {reason}"


def print_findings(console: Console, run_dir: Path, found: Sequence[Verdict]) -> None:
    """Print what the doctor says of the run; nothing without findings."""
    for number, verdict in enumerate(found):
        _print_line(console, f"{'' if number else 'Doctor':16}{verdict.line}")
    if found:
        _print_line(console, f"{'':16}prime-rl doctor {shlex.quote(str(run_dir))} says more")


def print_next(console: Console, run_dir: Path, max_steps: int) -> None:
    """Print the commands that look at a finished run, use it and continue it."""
    run = shlex.quote(str(run_dir))
    _print_line(console, f"Look at it      prime-rl report {run}")
    _print_line(console, f"Serve it        prime-rl serve {run} --port 8000")
    is_from_script = rewards_are_of_a_script(run_dir)
    if (run_dir / "evals.jsonl").exists() and not is_from_script:
        _print_line(
            console, f"Evaluate it     prime-rl eval {run} --base-url http://127.0.0.1:8000/v1"
        )

    if whole_steps(run_dir) and is_from_script:
        more = f"resume='latest', max_steps={2 * max_steps}"
        _print_line(console, f"Train on        prime_rl.train(..., {more})")
    elif whole_steps(run_dir):
        file, name = (
            shlex.quote(str(each)) for each in (run_dir / "configs" / "run.json", run_dir.name)
        )
        more = f"--run.name {name} --resume --max-steps {2 * max_steps}"
        _print_line(console, f"Train on        prime-rl run {file} {more}")


def print_stop(
    console: Console, run_dir: Path, max_steps: int, step: int | None, saved: bool, command: str
) -> None:
    """Print where the results of a stopped run are, and how to resume it. The arguments are those
    of ``RunView.stopped``."""
    if saved:
        _print_line(console, f"Weights         {run_dir / 'weights'}")
    elif step is None:
        _print_line(console, f"stopped at once; {durable(run_dir)}")
        _print_line(console, f"Run directory   {run_dir}")
    else:
        _print_line(console, f"stopped before a step was trained: no weights in {run_dir}")

    steps = whole_steps(run_dir)
    if steps and steps[-1] < max_steps:
        by_script = "prime_rl.train(..., resume='latest')"
        again = by_script if rewards_are_of_a_script(run_dir) else f"{command} --resume"
        _print_line(console, f"Resume with     {again}")
    elif saved and not steps:
        _print_line(console, "No checkpoint to resume from was written (ckpt.enabled = false)")


def rewards_are_of_a_script(run_dir: Path) -> bool:
    """Whether rewards are functions of a script or a notebook: no command can bring them again,
    because the key that they were sealed with has ended with it."""
    try:
        orchestrator = json.loads((run_dir / "configs" / "run.json").read_bytes())["orchestrator"]
        envs = [*orchestrator["train"]["env"], *orchestrator["eval"]["env"]]
        return any(env["id"] == "function" and "functions" in env["args"] for env in envs)
    except (OSError, ValueError, LookupError, TypeError):  # a summary is printed all the same
        return False


def _print_line(console: Console, text: str) -> None:
    """Print without wrapping or markup, so that the text can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_eval(console: Console, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
    if before is None:
        failed = f"   [red]failed: {after['num_failed']}[/]" if after["num_failed"] else ""
        rollouts = counted(after["num_rollouts"], "rollout")
        console.print(
            f"Held-out reward [bold]{as_reward(after['reward'])}[/]   "
            f"[dim]{after['env']}, {rollouts}; not measured before[/]{failed}"
        )
        return

    numbers = before["num_failed"], after["num_failed"]  # they count as reward 0
    failures = f"   [red]failed: {numbers[0]} before, {numbers[1]} after[/]" if any(numbers) else ""
    console.print(
        f"Held-out reward [bold]{as_reward(before['reward'])} → {as_reward(after['reward'])}[/]   "
        f"[dim]{before['env']}, {counted(before['num_rollouts'], 'rollout')}[/]{failures}"
    )
    table = Table(box=None, header_style="dim", padding=(0, 2))
    for title in ("prompt", "before", "", "after", ""):
        table.add_column(title, overflow="fold")
    for first, second in zip(before["shown"], after["shown"], strict=False):
        table.add_row(
            Text(_last(first["messages"], "user"), "bold"),
            Text(_last(first["messages"], "assistant")),
            Text(f"{first['reward']:.2f}", "magenta"),
            Text(_last(second["messages"], "assistant")),
            Text(f"{second['reward']:.2f}", "green"),
        )

    console.print(table)


def _last(messages: list[list[str]], role: str) -> str:
    """The last message of a role, on one line of at most 60 characters."""
    texts = [text for spoken_by, text in messages if spoken_by == role]
    line = " ".join(texts[-1].split()) if texts else ""
    return line if len(line) <= 60 else line[:57] + "..."
