"""Changes of credit as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_rl.config.orchestrator import AlgoConfig, EnvConfig
from prime_rl.rollout import Rollout
from prime_rl_tools.replay.compare import StepChange, credit
from prime_rl_tools.replay.score import Scored

FRAMES = {
    True: Text("identical", "green"),
    False: Text("differ", "yellow"),
    None: Text("no digest", "dim"),
}


def print_algorithms(
    console: Console,
    before: Mapping[str, AlgoConfig],
    after: Mapping[str, AlgoConfig],
    envs: Sequence[EnvConfig],
) -> None:
    """Print the algorithm of each env, in the run and in the replay. ``envs``: of the run, whose
    agents may have algorithms of their own."""
    agents = {env.label: env.agents for env in envs}
    for env, table in before.items():
        now = after[env]
        of_agents = [
            f"{name} by {_described(agent.algo)}"
            for name, agent in agents.get(env, {}).items()
            if isinstance(agent.algo, AlgoConfig)
        ]
        others = f"any other agent by {_described(table)}" if of_agents else _described(table)
        same = "the same algorithm" if now == table else f"now {_described(now)}"
        text = ", ".join([*of_agents, others, same])
        console.print(f"{env}: {text}", markup=False, highlight=False)


def _described(table: AlgoConfig) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in table.settings.items())
    return f"{table.type}({settings})" if settings else table.type


def print_changes(console: Console, changes: Sequence[StepChange]) -> None:
    """One line a step: rollouts seen, kept, and changed in any bit; mean |advantage| of their
    trainable tokens; tokens whose credit changed sides; rollouts without any credit."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("step", "seen", "kept", "changed", "|credit|", "", "flipped", "zero", "frames"):
        table.add_column(title, justify="left" if title == "frames" else "right", no_wrap=True)
    for change in changes:
        table.add_row(
            str(change.step),
            str(change.num_rollouts),
            str(change.num_kept),
            str(change.num_changed),
            f"{change.mean_abs_before:.4f}",
            f"→ {change.mean_abs_after:.4f}",
            str(change.sign_flips),
            f"{change.zero_before} → {change.zero_after}",
            FRAMES[change.frames_equal],
        )

    console.print(table)


def print_most_changed(console: Console, pairs: Sequence[Scored]) -> None:
    """Print the rollouts whose credit changed most."""
    if not pairs:
        return
    console.print("\n[dim]Credit moved furthest (mean over trainable tokens)[/]")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("env", "group", "example", "agent", "reward", "credit", ""):
        table.add_column(title, justify="left" if title in ("env", "agent") else "right")
    for pair in pairs:
        rollout = pair.again
        table.add_row(
            Text(rollout.env),
            str(rollout.group_id),
            str(rollout.example_id),
            Text(rollout.agent),
            f"{rollout.reward:.3f}",
            f"{_mean(pair.stored.rollout):+.4f}",
            f"→ {_mean(rollout):+.4f}",
        )

    console.print(table)


def _mean(rollout: Rollout) -> float:
    values = credit(rollout)
    return float(values.mean()) if len(values) else 0.0
