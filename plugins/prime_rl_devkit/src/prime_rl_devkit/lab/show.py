"""A proof on a terminal of 80 columns and up, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prime_rl_devkit.lab.fit import Fit
from prime_rl_devkit.lab.proof import Estimate, Proof

COLORS = {
    "unbiased": "green",
    "scaled": "yellow",
    "difficulty": "yellow",
    "length": "yellow",
    "turns": "yellow",
    "rewards": "yellow",
    "cut_off": "yellow",
    "place": "yellow",
    "likelihood": "yellow",
    "entropy": "yellow",
    "failed": "yellow",
    "batch": "yellow",
    "envs": "yellow",
    "order": "yellow",
    "other": "yellow",
    "stale": "yellow",
    "divisor": "dim",
    "beside": "dim",
    "undeclared": "dim",
}
CAUSES = {
    "difficulty": "#d9822b",
    "turns": "#8f5fb3",
    "rewards": "#3f8f5f",
    "length": "#2b7bba",
    "cut_off": "#2bb0ba",
    "place": "#b33f5f",
    "likelihood": "#b3943f",
    "entropy": "#7f5f2b",
    "other": "#7f7f7f",
}
LEGEND = (
    "cosine, scale, bias: of a step of one group, whose divisor varies with its replies. many: the "
    "bias in a step of many groups. noise: the variance relative to RLOO's. lag: versions between "
    "the policy that samples and the one that trains. G: rollouts of a group."
)
CLIPS = ("is_masked", "clip_frac")
"""How losses name the shares of tokens that they clip or drop."""


def print_proof(proof: Proof) -> None:
    """The verdict, then a table of all estimates, its legend, and what each clip removes."""
    console = Console()
    console.print(
        Text.assemble(
            (f"algorithm {proof.algorithm}", "bold"),
            f"  objective: {proof.objective}; loss {proof.loss}, divided by {proof.normalize_by}",
        )
    )
    codes = {(f.text, f.when): f.code for f in proof.findings}
    for line in proof.verdict.splitlines():
        code = next((code for (text, _), code in codes.items() if line.endswith(text)), "")
        console.print(Padding(Text(line, COLORS.get(code, "bold red")), (0, 2)))

    console.print(_table(proof))
    console.print(Padding(Text(LEGEND, "dim"), (0, 2)))
    for said in clips(proof):
        console.print(Padding(Text(said, "dim"), (0, 2)))


def _table(proof: Proof) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="dim")
    table.add_column("problem", no_wrap=True)
    for title in ("G", "lag", "cosine", "scale", "bias", "", "many", "noise"):
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    for each in proof.estimates:
        name = each.problem if each.loss == "own" else f"  {each.loss}"
        cells = [name, str(each.group_size), str(each.staleness)]
        if each.one is None or each.many is None:
            table.add_row(*cells, *["-"] * 3, "", "-", "-", style="dim")
            continue
        bar = "█" * round(6 * each.one.residual) or ("▏" if each.one.residual > 1e-3 else "")
        cells += [f"{each.one.cosine:.4f}", f"{each.one.scale:.3f}", f"{each.one.residual:.0e}"]
        cells += [bar, f"{each.many.residual:.0e}", _number(each.against.get("rloo"))]
        table.add_row(*cells)

    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if math.isfinite(value) else "∞"


def clips(proof: Proof) -> list[str]:
    """At each staleness, what the loss takes off the plain importance ratio."""
    lines = []
    for estimate in proof.estimates:
        key = (estimate.problem, estimate.group_size, estimate.staleness)
        plain = [
            each.many
            for each in proof.estimates
            if (each.problem, each.group_size, each.staleness, each.loss) == (*key, "ratio")
        ]
        if estimate.loss != "own" or estimate.many is None or not plain or plain[0] is None:
            continue

        kept = estimate.many.scale / plain[0].scale if plain[0].scale else math.nan
        shares = ", ".join(
            f"{name} {share:.1%}"
            for name, share in estimate.metrics.items()
            if name.rpartition("/")[2].startswith(CLIPS)
        )
        clipped = f"; of the tokens, {shares}" if shares else ""
        lines.append(
            f"lag {estimate.staleness}: the loss keeps {kept:.0%} of the pull along the gradient "
            f"that the unclipped ratio has{clipped}"
        )

    return lines


def picture(proof: Proof, path: Path) -> None:
    """Write a PNG: weights of questions, causes of the residual, noise, staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels: Any = figure.subplots(2, 2)
    figure.suptitle(
        f"{proof.algorithm}: {proof.objective}\nloss {proof.loss}, divided by {proof.normalize_by}"
    )
    _weights(panels[0, 0], _own(proof, "plain"))
    _causes(panels[0, 1], _own(proof, None))
    _noise(panels[1, 0], _own(proof, "plain"))
    _staleness(panels[1, 1], proof)
    figure.savefig(path, dpi=120)


def _own(proof: Proof, problem: str | None) -> list[tuple[Estimate, Fit, Fit]]:
    """Without staleness: each estimate, its fits in steps of one group and of many."""
    return [
        (each, each.one, each.many)
        for each in proof.estimates
        if not each.staleness and problem in (None, each.problem)
        if each.one is not None and each.many is not None
    ]


def _weights(panel: Any, found: Sequence[tuple[Estimate, Fit, Fit]]) -> None:
    panel.set(title="weight of a question", xlabel="mean reward", ylabel="scale of its gradient")
    for estimate, one, many in found:
        for label, fit, line in (("one group", one, "-o"), ("many groups", many, "--s")):
            if fit.by_question:
                scales = [scale for scale, _ in fit.by_question]
                points = sorted(zip(estimate.rewards.values(), scales, strict=True))
                means = [mean for mean, _ in points]
                scales = [scale for _, scale in points]
                panel.plot(means, scales, line, label=f"G = {estimate.group_size}, {label} a step")

    panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]), top=1.1 * max(0.1, panel.get_ylim()[1]))
    _legend(panel)


def _causes(panel: Any, found: Sequence[tuple[Estimate, Fit, Fit]]) -> None:
    panel.set(title="bias by cause (share of the update, squared)", ylim=(0, 1))
    names: list[str] = []
    used: set[str] = set()
    for estimate, one, many in found:
        for label, fit in (("one", one), ("many", many)):
            bottom = 0.0
            for cause, share in fit.shares.items():
                panel.bar(
                    len(names),
                    share**2,
                    bottom=bottom,
                    color=CAUSES[cause],
                    label=None if cause in used else cause,
                )
                used.add(cause)
                bottom += share**2
            names.append(f"{estimate.problem}\nG{estimate.group_size} {label}")

    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    highest = max((sum(s**2 for s in f.shares.values()) for _, *fs in found for f in fs), default=0)
    panel.set_ylim(0, min(1.0, max(1.2 * highest, 1e-3)))
    _legend(panel)


def _noise(panel: Any, found: Sequence[tuple[Estimate, Fit, Fit]]) -> None:
    panel.set(title="noise at equal budget, plain problem", xlabel="G", ylabel="relative variance")
    for name in ("reinforce", "rloo"):
        values: Mapping[int, float] = {
            e.group_size: e.against[name] for e, _, _ in found if name in e.against
        }
        panel.plot([*values], [*values.values()], "-o", label=f"over that of {name}")

    panel.axhline(1, color="grey", linewidth=0.8)
    panel.set_ylim(bottom=0)
    panel.set_xticks([e.group_size for e, _, _ in found])
    _legend(panel)


def _staleness(panel: Any, proof: Proof) -> None:
    panel.set(title="staleness, plain problem", xlabel="versions behind", ylabel="cosine")
    stale = [each for each in proof.estimates if each.problem == "plain" and each.many is not None]
    if not any(each.staleness for each in stale):
        panel.text(0.5, 0.5, "not asked for", ha="center", transform=panel.transAxes)
    size = stale[0].group_size if stale else 0
    start = [e for e in stale if e.group_size == size and not e.staleness]
    for kind, label in (("own", "its loss"), ("ratio", "ratio, no clip"), ("no_ratio", "no ratio")):
        points = start + [e for e in stale if e.staleness and e.loss == kind]
        if len(points) > len(start):
            cosines = [e.many.cosine for e in points if e.many is not None]
            panel.plot([e.staleness for e in points], cosines, "-o", label=label)
            panel.set_xticks([e.staleness for e in points])

    panel.set_ylim(top=1.02)
    _legend(panel)


def _legend(panel: Any) -> None:
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
