"""Seconds that the page of ``prime-rl report`` takes, in Chromium.

    python -m bench page [--runs 5]

    load    a file with 10,000 rollouts of 20 tokens, until the first one is drawn
    switch  side by side, from one group of 16 replies of 4,096 tokens to another
    open    such a group, 65,536 tokens, side by side for the first time
    spans   the same with every token drawn as a span, which the page does near the window only

Wall-clock seconds from the action until the browser has painted the result, and CPU seconds of the
page's main thread. Medians. Needs Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import record
from prime_rl import Rollout, Sample
from prime_rl_app.config import build_config, read_toml
from prime_rl_app.saved_rollouts import write_rollouts
from prime_rl_tools.report import write_report

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "plugins/prime_rl_tools/tests/report")]
from report_browser import Page, browser_path, chromium  # type: ignore[import-not-found] # noqa: E402

GROUPS = 6
SIBLINGS = 16
TOKENS = 4096
VOCAB = 512
GOALS = {"load": 1.0, "switch": 0.2, "open": 1.0, "spans": None}
PAINTED = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"


def make_run(folder: Path, groups: int, siblings: int, tokens: int) -> Path:
    """A run directory with rollouts in steps of at most 512; credit is random, replies are words of
    a tokenizer of 512."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    config = build_config(read_toml(ROOT / "configs/reverse_text/grpo.toml"))
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "run.json").write_text(config.model_dump_json(), "utf-8")
    words = {f"word{n} ": n for n in range(VOCAB)}
    made = Tokenizer(WordLevel(words, unk_token="word0 "))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder / "weights")
    rng = np.random.default_rng(0)
    rollouts = [
        rollout(rng, group, member=member, tokens=tokens)
        for group in range(groups)
        for member in range(siblings)
    ]
    for step, first in enumerate(range(0, len(rollouts), 512), start=1):
        path = folder / "rollouts" / f"step_{step}.msgpack"
        write_rollouts(path, step, rollouts=rollouts[first : first + 512], dropped={})
    return folder


def rollout(rng: np.random.Generator, group: int, member: int, tokens: int) -> Rollout:
    """A prompt of eight tokens, and a reply."""
    mask = np.arange(tokens) >= 8
    sample = Sample(
        token_ids=rng.integers(0, VOCAB, tokens, dtype=np.int32), loss_mask=mask,
        inference_logprobs=np.where(mask, -rng.random(tokens), 0.0),
        advantages=np.where(mask, rng.normal(), 0.0), roles=np.where(mask, 2, 1),
    )  # fmt: skip
    return Rollout(
        env="words", example_id=group, group_id=group, episode_id=member, samples=[sample],
        reward=float(rng.random()),
    )  # fmt: skip


def timed(page: Page, action: str, condition: str) -> tuple[float, float]:
    """Wall-clock seconds until ``condition`` holds and is painted, and CPU seconds of the page."""
    before = cpu_seconds(page)
    milliseconds = page.eval(
        f"(async () => {{ const from = performance.now(); {action};"
        f"while (!({condition})) await {PAINTED}; await {PAINTED};"
        "return performance.now() - from; })()"
    )
    return milliseconds / 1000, cpu_seconds(page) - before


def cpu_seconds(page: Page) -> float:
    metrics = page.call("Performance.getMetrics")["metrics"]
    return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def shows(group: int) -> str:
    return (
        f"document.querySelectorAll('.one').length === {SIBLINGS} && document.querySelector"
        f"('.one .tok') && document.querySelector('.top .sub').innerText.includes('group {group}')"
    )


def measure_groups(page: Page, file: Path) -> dict[str, list[tuple[float, float]]]:
    page.call("Page.navigate", url="about:blank")  # the same file again would be no new document
    page.open(file)
    timings = {"open": [timed(page, "toggle('side')", shows(0))]}
    # Each group for the first time, so that its tokens are unpacked too; then all of them again.
    visits = [*range(1, GROUPS), *range(GROUPS)]
    timings["switch"] = [timed(page, f"select({g * SIBLINGS})", shows(g)) for g in visits]
    timings["spans"] = [timed(page, "allParts().forEach(fill)", "!allParts().some(p => p.range)")]
    drawn = page.eval("document.querySelectorAll('.one .tok').length")
    assert drawn == SIBLINGS * TOKENS, drawn
    return timings


def measure_load(page: Page, file: Path) -> dict[str, list[tuple[float, float]]]:
    page.call("Page.navigate", url="about:blank")
    before = cpu_seconds(page)
    wall = page.open(file)
    assert page.text("#count") == "10,000 rollouts"
    return {"load": [(wall, cpu_seconds(page) - before)]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args(arguments).runs
    if browser_path() is None:
        print("no Chromium here (Debian: apt-get install chromium): nothing measured")
        return 0
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in GOALS}
    with tempfile.TemporaryDirectory() as scratch, chromium(Path(scratch) / "profile") as page:
        page.size(1440, 900)
        page.call("Performance.enable", timeDomain="threadTicks")
        kinds: dict[str, tuple[tuple[int, int, int], Callable[..., Any]]] = {
            "many": ((2500, 4, 20), measure_load),
            "long": ((GROUPS, SIBLINGS, TOKENS), measure_groups),
        }
        for name, (shape, measure) in kinds.items():
            file = Path(scratch) / f"{name}.html"
            write_report(make_run(Path(scratch) / name, *shape), file)
            for _ in range(runs):
                for what, figures in measure(page, file).items():
                    timings[what] += figures
        assert page.errors == [], page.errors
    print(f"{'':8}{'wall s':>8}{'worst':>8}{'CPU s':>8}  goal (wall)")
    for name, figures in timings.items():
        walls, cpus = zip(*figures, strict=True)
        goal = GOALS[name]
        said = "" if goal is None else f"  {goal} s: {verdict(statistics.median(walls), goal)}"
        print(
            f"{name:8}{statistics.median(walls):8.3f}{max(walls):8.3f}"
            f"{statistics.median(cpus):8.3f}{said}"
        )
        record(f"page.{name}.wall", statistics.median(walls), "s")
        record(f"page.{name}.worst", max(walls), "s")
        record(f"page.{name}.cpu", statistics.median(cpus), "CPU s")
    return 0


def verdict(seconds: float, goal: float) -> str:
    return "reached" if seconds < goal else "missed"


if __name__ == "__main__":
    sys.exit(main())
