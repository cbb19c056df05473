"""Verdicts on recorded runs: healthy segments get none, and each planted pathology is found.

``first_runs.json.gz`` holds what the checks read of five runs of ``configs/reverse_text/grpo.toml``
(seeds 0 to 4), written by ``python -m bench.doctor --record``; rollouts are of seed 0.
"""

import gzip
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import LIMIT

from prime_rl import PluginConfig, Rollout, Sample
from prime_rl_app.cli.app import app
from prime_rl_app.rollouts import write_rollouts
from prime_rl_tools.doctor import History, diagnose, pace_line
from prime_rl_tools.doctor.history import OF_ALL
from prime_rl_tools.view import findings
from prime_rl_tools.view.findings import Findings
from prime_rl_tools.view.live import TerminalView

RECORD = json.loads(gzip.decompress(Path(__file__).with_name("first_runs.json.gz").read_bytes()))
ENV = "reverse-text"
STEPS, WINDOW = 64, 16


def rollout(row):
    example, group, reward, dropped_by, version, teaches, reply = row
    mask = np.array([False] + [True] * len(reply))
    sample = Sample(
        token_ids=np.array([1, *reply]),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -0.5, 0.0),
        advantages=np.where(mask, 0.1 if teaches else 0.0, 0.0),
    )
    made = Rollout(
        env=ENV, example_id=example, group_id=group, reward=reward, samples=[sample],
        rewards={"positions": reward}, policy_version=version,
    )  # fmt: skip
    return made, dropped_by


class Recorded:
    """A run directory as the run wrote it, ``seed``'s, which a test may change and then save."""

    def __init__(self, run_dir, seed=0, steps=120):
        self.run_dir, self.last = run_dir, steps
        columns = RECORD["metrics"][seed]
        self.rows = {
            step: {name: values[step - 1] for name, values in columns.items()}
            for step in range(1, steps + 1)
        }
        self.rollouts = {
            step: [rollout(row) for row in (RECORD["rollouts"][step - 1] if seed == 0 else ())]
            for step in self.rows
        }

    def scale(self, name, factor, start=STEPS - WINDOW + 1):
        """Multiply a metric from a step on; ``factor`` may be a function of the old value."""
        for step in range(start, self.last + 1):
            value = self.rows[step][name]
            self.rows[step][name] = factor(value) if callable(factor) else value * factor

    def change(self, function, start=STEPS - WINDOW + 1):
        """Replace each (rollout, dropped_by, step) from a step on."""
        for step in range(start, self.last + 1):
            changed = [function(each, reason, step) for each, reason in self.rollouts[step]]
            self.rollouts[step] = [each for each in changed if each is not None]

    def save(self):
        (self.run_dir / "configs").mkdir(parents=True)
        (self.run_dir / "configs/run.json").write_text(json.dumps({"max_steps": self.last}))
        lines = [json.dumps({"step": step, **row}) + "\n" for step, row in self.rows.items()]
        (self.run_dir / "metrics.jsonl").write_text("".join(lines))
        for step, pairs in self.rollouts.items():
            if pairs:
                dropped = {id(each): reason for each, reason in pairs if reason}
                path = self.run_dir / f"rollouts/step_{step}.msgpack"
                write_rollouts(path, step, [each for each, _ in pairs], dropped)
        return self.run_dir


def segments(num_steps):
    for parts in range(1, 7):
        size = num_steps // parts
        yield from ((1 + size * i, size * (i + 1)) for i in range(parts))


def test_at_most_one_of_a_hundred_healthy_segments_gets_a_verdict(tmp_path):
    found, count = [], 0
    for seed in range(5):
        run_dir = Recorded(tmp_path / str(seed), seed).save()
        for first, last in segments(120):
            history = History(run_dir, first, last)
            assert len(history.steps) == last - first + 1
            count += 1
            found += diagnose(history)[:1]
    assert count == 105 and len(found) <= 1, found


def test_a_long_run_costs_little(tmp_path, monkeypatch):
    """Of most steps a few metrics are kept, and the run is read after each tenth of its steps."""
    run = History(Recorded(tmp_path, 0).save())
    windows = {*run.early, *run.late}
    assert windows < {*run.steps}
    for step, row in run.rows.items():
        assert ("entropy/all/mean" in row) == (step in windows) and {*row} >= {*OF_ALL}
    with pytest.raises(AssertionError, match="entropy"):
        run.values("entropy/all/mean", run.steps)

    read = []
    monkeypatch.setattr(findings, "diagnose", lambda _: read.append(step) or [])
    found = Findings(tmp_path, 7)
    for step in range(8, 5001):
        found.update(step)
        if found._thread is not None:
            found._thread.join()
    assert read[:12] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 121]
    assert len(read) < 12 + 45 and sum(read) < 11 * 5000


def entropy_spent(run):
    run.scale("entropy/all/mean", 0.02)
    for name in ("train/agg/all/reward/mean", "train/reverse-text/all/reward/mean"):
        for step in range(20, run.last + 1):
            run.rows[step][name] = run.rows[20 + step % 4][name]


def mismatch_grows(run):
    for number, step in enumerate(range(33, run.last + 1)):
        run.rows[step]["mismatch_kl/all/mean"] *= 1.2**number


def replies_grow(run):
    for name in ("mean", "max"):
        run.scale(f"train/{ENV}/all/num_output_tokens/{name}", 1.8)
    for name in ("train/agg/all/reward/mean", f"train/{ENV}/all/reward/mean"):
        for step in range(1, run.last + 1):
            run.rows[step][name] = run.rows[1 + step % 4][name]


def one_term(run):
    def split(each, reason, step):
        form = float(each.example_id % 2 == each.samples[0].token_ids[-2] % 2)
        return (
            replace(
                each,
                rewards={"positions": each.reward, "form": form},
                reward=each.reward + 0.01 * form,
            ),
            reason,
        )

    run.change(split)


def silent(each):
    columns = replace(each.samples[0], advantages=np.zeros(len(each.samples[0])))
    return replace(each, samples=[columns])


def env_is_silent(run):
    run.change(
        lambda each, reason, step: (
            (replace(silent(each), reward=0.0), "post_batch_filters")
            if each.example_id % 20
            else (each, reason)
        )
    )
    run.scale(f"train/{ENV}/all/reward/mean", 0.0)
    run.scale("train/agg/all/reward/mean", 0.0)


def groups_die(run):
    run.change(
        lambda each, reason, step: (
            (silent(each), "post_batch_filters") if each.group_id % 3 else (each, reason)
        )
    )


def replies_are_cut(run):
    run.scale(f"train/{ENV}/all/is_truncated/mean", lambda value: 0.4)


def tokens_are_clipped(run):
    run.scale("is_masked", lambda value: 0.15 + value)


def long_rollouts_age(run):
    """A fifth of the examples has replies of twice the length, which arrive too late."""

    def age(each, reason, step):
        if each.example_id % 5:
            return each, reason
        old = each.samples[0]
        tokens = np.concatenate([old.token_ids, old.token_ids[1:]])
        mask = np.arange(len(tokens)) > 0
        long = Sample(token_ids=tokens, loss_mask=mask, inference_logprobs=-0.5 * mask)
        return replace(each, samples=[long]), "stale"

    run.change(age)


def one_reply_pays(run):
    def hack(each, reason, step):
        if each.example_id % 2:
            return each, reason
        tokens = np.array([1, 50, 50, 50, 50, 2])
        mask = np.array([False] + [True] * 5)
        sample = replace(
            each.samples[0], token_ids=tokens, loss_mask=mask,
            inference_logprobs=np.where(mask, -0.1, 0.0), advantages=np.where(mask, 0.2, 0.0),
        )  # fmt: skip
        return replace(each, samples=[sample], reward=1.0, rewards={"positions": 1.0}), reason

    run.change(hack)


def run_falls_apart(run):
    for name in ("train/agg/all/reward/mean", f"train/{ENV}/all/reward/mean"):
        run.scale(name, 0.5)
    run.scale("optim/grad_norm", 5.0)


def policy_stands_still(run):
    run.scale("mismatch_kl/all/mean", 1e-5, start=1)
    for name in ("train/agg/all/reward/mean", f"train/{ENV}/all/reward/mean"):
        for step in range(1, run.last + 1):
            run.rows[step][name] = run.rows[1 + step % 4][name]


def trainer_waits(run):
    for row in run.rows.values():
        row["perf/mfu"] = 2.0
        row["wait/trainer/orchestrator"] = 0.96 * row["time/trainer/step"]
        row["wait/orchestrator/trainer"] = 0.0


def engines_wait(run):
    for row in run.rows.values():
        row["perf/mfu"] = 40.0
        row["wait/trainer/orchestrator"] = 0.0
        row["wait/orchestrator/trainer"] = 0.6 * row["time/step"]
        row["wait/orchestrator/trainer_room"] = 0.35 * row["time/step"]


def batch_is_held(run):
    for row in run.rows.values():
        row["pace/training"] = 6.0
        row["pace/held"] = 3.0
        row["pace/starved"] = 1.0


PLANTED = {
    "entropy_collapse": entropy_spent,
    "mismatch_growth": mismatch_grows,
    "length_drift": replies_grow,
    "dominant_term": one_term,
    "silent_env": env_is_silent,
    "truncation": replies_are_cut,
    "dead_groups": groups_die,
    "clip_share": tokens_are_clipped,
    "staleness_bias": long_rollouts_age,
    "duplicates": one_reply_pays,
    "rate_too_high": run_falls_apart,
    "rate_too_low": policy_stands_still,
    "trainer_starved": trainer_waits,
    "engines_starved": engines_wait,
    "held_by_tail": batch_is_held,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pathology_is_found_and_nothing_else(name, tmp_path):
    run = Recorded(tmp_path / "run", steps=STEPS)
    PLANTED[name](run)
    found = diagnose(run.save())
    assert [verdict.name for verdict in found] == [name], found
    (verdict,) = found
    assert all((verdict.finding, verdict.evidence, verdict.threshold, verdict.advice))


@pytest.mark.parametrize(
    ("seconds", "bound", "key"),
    [
        ((6.0, 1.0, 3.0), "training-bound", "trainer.num_ranks"),
        ((3.0, 1.0, 6.0), "sampling-bound", "inference.replicas"),
        ((3.0, 6.0, 1.0), "held by a tail", "orchestrator.max_off_policy_steps"),
    ],
)
def test_the_command_says_what_sets_the_pace(seconds, bound, key, tmp_path):
    run = Recorded(tmp_path / "outputs/run", steps=STEPS)
    for row in run.rows.values():
        names = ("pace/training", "pace/held", "pace/starved")
        row.update(zip(names, seconds, strict=True))
    run.save()
    said = CliRunner().invoke(app, ["doctor", "run", "--output-dir", str(tmp_path / "outputs")])
    (paragraph,) = re.findall(r"^The run is .*?\.$", said.output, re.DOTALL | re.MULTILINE)
    text = " ".join(paragraph.split())
    shares = "pace/training {:.0%}, pace/held {:.0%}, pace/starved {:.0%}".format(
        *(each / 10 for each in seconds)
    )
    assert bound in text and shares in text and key in text, text


def test_a_run_that_does_not_say_what_sets_its_pace_gets_no_line(tmp_path):
    assert pace_line(History(Recorded(tmp_path / "run", steps=STEPS).save())) is None


def test_the_command_says_what_was_found_and_what_to_change(tmp_path):
    run = Recorded(tmp_path / "outputs/run", steps=STEPS)
    replies_are_cut(run)
    run.save()
    command = ["doctor", "run", "--output-dir", str(tmp_path / "outputs")]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert "1 findings" in said.output and "orchestrator.train.sampling." in said.output
    assert "truncation in reverse-text: Many replies are cut off" in said.output
    assert "An early warning is an indication" in said.output
    (verdict,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert verdict["name"] == "truncation" and "40.0% (steps 49 to 64)" in verdict["evidence"]


def test_a_short_run_gets_no_verdict(tmp_path):
    run = Recorded(tmp_path / "outputs/run", steps=8)
    replies_are_cut(run)
    assert diagnose(run.save()) == []
    said = CliRunner().invoke(app, ["doctor", "run", "--output-dir", str(tmp_path / "outputs")])
    assert "8 steps; a verdict needs 12" in said.output


def test_the_page_lists_every_verdict():
    page = (Path(__file__).parents[4] / "docs/learning-problems.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PLANTED)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_live_view_shows_a_finding_of_a_run_in_progress_once_it_is_there(tmp_path, on_terminal):
    console = Console(file=io.StringIO(), width=100, force_terminal=on_terminal)
    run_dir = tmp_path / "run"
    (run_dir / "status").mkdir(parents=True)
    with TerminalView(PluginConfig(), run_dir, 999, console) as view:
        view.refresh()
        assert "doctor" not in console.file.getvalue()
        run = Recorded(run_dir, steps=STEPS)
        policy_stands_still(run)
        for step, row in run.rows.items():
            row.update({"progress/seconds": 1.0 * step, "progress/total_tokens": 100 * step})
        run.save()
        deadline = time.monotonic() + LIMIT
        while "rate_too_low" not in console.file.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.02)
            view.refresh()
        said = console.file.getvalue()
        view.refresh()
        assert on_terminal or console.file.getvalue() == said  # no line twice
    view.ended()
    ending = console.file.getvalue().partition("Run directory")[2]
    assert "Doctor          rate_too_low: The learning rate looks too low" in ending
    assert f"prime-rl doctor {run_dir} says more" in ending
