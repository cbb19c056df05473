"""Verdicts on recorded runs: healthy segments get none, and each planted pathology is found.

``first_runs.json.gz`` holds what the checks read of five runs of ``configs/reverse_text/grpo.toml``
(seeds 0 to 4), written by ``python -m bench.doctor --record``; rollouts are of seed 0.
The other files hold the same of runs that really went wrong (``--record-sick``), and of some that
did not, each of 24 to 120 steps, with the rollouts of the first and of the last window.
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
from prime_rl.rundir.status import Status
from prime_rl_app.cli.app import app
from prime_rl_app.saved_rollouts import write_rollouts
from prime_rl_tools.doctor import History, diagnose, pace_line
from prime_rl_tools.doctor.history import OF_ALL
from prime_rl_tools.view import findings
from prime_rl_tools.view.findings import Findings
from prime_rl_tools.view.live import TerminalView


def recorded(name):
    return json.loads(gzip.decompress(Path(__file__).with_name(name).read_bytes()))


RECORD = recorded("first_runs.json.gz")
SICK = {
    name: run
    for file in ("sick_runs.json.gz", "more_sick_runs.json.gz", "hacked_runs.json.gz")
    for name, run in recorded(file).items()
}
ENV = "reverse-text"
STEPS, WINDOW = 64, 16


def rollout(row, env=ENV):
    example, group, reward, dropped_by, version, teaches, reply = row
    mask = np.array([False] + [True] * len(reply))
    sample = Sample(
        token_ids=np.array([1, *reply]),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -0.5, 0.0),
        advantages=np.where(mask, 0.1 if teaches else 0.0, 0.0),
    )
    made = Rollout(
        env=env, example_id=example, group_id=group, reward=reward, samples=[sample],
        rewards={"positions": reward}, policy_version=version,
    )  # fmt: skip
    return made, dropped_by


class Recorded:
    """A run directory as the run wrote it, ``seed``'s, which a test may change and then save."""

    def __init__(self, run_dir, seed=0, steps=120):
        self.run_dir, self.last = run_dir, steps
        self.train = {"env": [{"id": "text-reversal", "name": ENV}]}
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
        (self.run_dir / "configs/run.json").write_text(
            json.dumps({"max_steps": self.last, "orchestrator": {"train": self.train}})
        )
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


def trainer_computes_otherwise(run):
    run.scale("mismatch_kl/all/mean", lambda value: 0.6 + value, start=1)


def gradients_explode(run):
    run.scale("optim/grad_norm", 1e4, start=1)


def data_is_old(run):
    run.scale("off_policy/mean", lambda value: 30.0 + value, start=1)


def rollouts_fail(run):
    for row in run.rows.values():
        row[f"train/{ENV}/all/has_error/mean"] = 0.6


def numbers_become_null(run):
    for step in range(STEPS - 2, run.last + 1):
        run.rows[step]["loss/mean"] = None


def policy_becomes_random(run):
    for step in range(1, run.last + 1):
        run.rows[step]["entropy/all/mean"] = 0.4 + 0.03 * step
    for name in ("train/agg/all/reward/mean", f"train/{ENV}/all/reward/mean"):
        for step in range(1, run.last + 1):
            run.rows[step][name] = run.rows[1 + step % 4][name]


def examples_are_memorized(run):
    rewards = {0: 0.4, 12: 0.6, 24: 0.62, 36: 0.55, 48: 0.5, 60: 0.48}
    for step, reward in rewards.items():
        run.rows.setdefault(step, {})["eval/held/all/reward/mean"] = reward


def reward_is_noise(run):
    for name in ("train/agg/all/reward/mean", f"train/{ENV}/all/reward/mean"):
        for step in range(1, run.last + 1):
            run.rows[step][name] = run.rows[1 + step % 4][name]


def length_is_paid(run):
    def grow(each, reason, step):
        old = each.samples[0]
        times = 2 + each.example_id % 2 + int(each.reward * 8)
        tokens = np.concatenate([old.token_ids[:1], np.tile(old.token_ids[1:], times)])
        mask = np.arange(len(tokens)) > 0
        long = Sample(
            token_ids=tokens,
            loss_mask=mask,
            inference_logprobs=-0.5 * mask,
            advantages=0.1 * mask,
        )
        return replace(each, samples=[long], reward=float(mask.sum()), rewards={}), reason

    run.change(grow)
    for name in ("mean", "max"):
        run.scale(f"train/{ENV}/all/num_output_tokens/{name}", 2.5)


def sampling_is_hot(run):
    run.train["sampling"] = {"temperature": 1.8}
    for step in (0, 30, 60):
        run.rows.setdefault(step, {})[f"eval/{ENV}/all/reward/mean"] = 2.5


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
    "mismatch_high": trainer_computes_otherwise,
    "gradient_norm": gradients_explode,
    "stale_data": data_is_old,
    "failures": rollouts_fail,
    "not_finite": numbers_become_null,
    "entropy_rise": policy_becomes_random,
    "held_out_falls": examples_are_memorized,
    "length_pays": length_is_paid,
    "temperature": sampling_is_hot,
    "flat_reward": reward_is_noise,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pathology_is_found_and_nothing_else(name, tmp_path):
    run = Recorded(tmp_path / "run", steps=STEPS)
    PLANTED[name](run)
    found = diagnose(run.save())
    assert [verdict.name for verdict in found] == [name], found
    (verdict,) = found
    assert all((verdict.finding, verdict.evidence, verdict.threshold, verdict.advice))
    commands = {command.name for command in app.registered_commands}
    assert {*re.findall(r"prime-rl ([a-z-]+)", verdict.advice)} <= commands


SICK_FINDINGS = {
    "rate-1e-2": {"rate_too_high", "length_drift", "held_out_falls"},
    "reward-has-a-hole": {"held_out_falls"},
    "reward-is-noise": {"length_drift", "truncation", "held_out_falls"},
    "reward-is-length": {"truncation", "held_out_falls", "length_pays"},
    "reward-raises": {"failures"},
    "length-adds": {"truncation", "held_out_falls", "length_pays"},
    "reward-is-a-coin": {"length_drift", "entropy_rise", "held_out_falls"},
    "six-examples": {"held_out_falls"},
    "entropy-bonus-0.5": {"length_drift", "truncation", "entropy_rise", "held_out_falls"},
    "temperature-2": {"temperature"},
    "temperature-0.02": {"silent_env", "mismatch_high", "temperature"},
    "time-outs": {"failures"},
    "reward-is-one-letter": {"truncation"},
    "reward-is-one-reply": {"dead_groups", "duplicates"},
    "healthy-echo": set(),
    "healthy-grpo": set(),
    "healthy-max-rl": set(),
    "healthy-rloo": set(),
    "healthy-thinking": set(),
}
"""Runs that went wrong, and what is said of each. With a learning rate of 1e-2; with a reward that
also pays for any reply of two distinct letters, that is random, that is the length, or that raises
for six of ten rollouts. With 0.1 more for each character, at a rate of 1.5e-3; with a reward of 0
or 1 by chance in groups of four; with six examples; with an entropy bonus of 0.5; at two wrong
temperatures; with an env whose judge often takes longer than its ``timeout``; with a reward that
is the share of one letter, and one that a single reply earns. The others are healthy: echo with a
tool, grpo, max_rl, rloo, and a template with thoughts."""


@pytest.mark.parametrize("name", SICK)
def test_a_run_that_went_wrong_is_found_out(name, tmp_path):
    run = Recorded(tmp_path / "run", steps=0)
    of_run = SICK[name]
    run.last = of_run["steps"][-1]
    run.rows = {
        step: {
            metric: values[number]
            for metric, values in of_run["metrics"].items()
            if values[number] is not None  # the run did not write it
        }
        for number, step in enumerate(of_run["steps"])
    }
    (env,) = of_run["envs"]
    run.train = of_run.get("train", run.train)
    run.rollouts = {
        int(step): [rollout(row, env) for row in rows] for step, rows in of_run["rollouts"].items()
    }
    found = diagnose(run.save())
    assert {verdict.name for verdict in found} == SICK_FINDINGS[name], found


@pytest.mark.parametrize("label", ["judge", "team/judge"])
def test_an_env_whose_every_rollout_is_lost_is_found_beside_another(label, tmp_path):
    run = Recorded(tmp_path / "failed", steps=STEPS)
    for row in run.rows.values():
        row[f"train/{label}/all/has_error/mean"] = 1.0
        row[f"train/{label}/all/error/TimeoutError"] = 8.0
    (verdict,) = diagnose(run.save())
    assert (verdict.name, verdict.env) == ("failures", label)
    assert "TimeoutError" in verdict.evidence

    run = Recorded(tmp_path / "cancelled", steps=STEPS)
    for step, row in run.rows.items():
        row[f"train/{label}/all/has_error/mean"] = 0.0
        row[f"dispatcher/cancelled/{label}"] = 64.0 * step
        row |= {"pace/training": 1.0, "pace/held": 3.0, "pace/starved": 0.0}
        row[f"pace/held/{label}"] = 3.0
    folder = run.save()
    found = {verdict.name: verdict for verdict in diagnose(folder)}
    assert {name: verdict.env for name, verdict in found.items()} == {
        "staleness_bias": label,
        "held_by_tail": label,
    }
    assert "partial_groups" not in found["staleness_bias"].advice

    path = folder / "configs/run.json"
    config = json.loads(path.read_text())
    config["orchestrator"]["partial_groups"] = {"at_least": 3, "rest": "cancel"}
    path.write_text(json.dumps(config))
    found = {verdict.name: verdict for verdict in diagnose(folder)}
    assert "partial_groups.rest" in found["staleness_bias"].advice


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
    assert "always" not in text, text  # it waits for some batches in all of these runs


@pytest.mark.parametrize(("allowed", "is_named"), [(0, True), (1, True), (2, False), (8, False)])
def test_a_starved_run_that_may_not_request_ahead_is_advised_to(allowed, is_named, tmp_path):
    run = Recorded(tmp_path / "run", steps=STEPS)
    for row in run.rows.values():
        row |= {"pace/training": 1.0, "pace/held": 0.0, "pace/starved": 3.0}
    folder = run.save()
    path = folder / "configs/run.json"
    config = json.loads(path.read_text())
    config["orchestrator"]["max_off_policy_steps"] = allowed
    path.write_text(json.dumps(config))
    line = pace_line(History(folder))
    assert line is not None and "sampling-bound" in line
    assert ("max_off_policy_steps" in line) == is_named


def test_a_run_that_does_not_say_what_sets_its_pace_gets_no_line(tmp_path):
    assert pace_line(History(Recorded(tmp_path / "run", steps=STEPS).save())) is None


def test_the_command_says_what_was_found_and_what_to_change(tmp_path):
    run = Recorded(tmp_path / "outputs/run", steps=STEPS)
    replies_are_cut(run)
    run.save()
    command = ["doctor", "run", "--output-dir", str(tmp_path / "outputs")]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert "1 finding\n" in said.output and "orchestrator.train.sampling." in said.output
    assert "truncation in reverse-text: Many replies are cut off" in said.output
    assert "An early warning is an indication" in said.output
    (verdict,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert verdict["name"] == "truncation" and "40.0% (steps 49 to 64)" in verdict["evidence"]


def test_the_page_shows_what_the_command_says(tmp_path):
    """The same lines, up to numbers and what follows from them."""
    run = Recorded(tmp_path / "outputs/run", steps=STEPS)
    policy_stands_still(run)
    for row in run.rows.values():
        row.update({"pace/training": 8.0, "pace/held": 0.0, "pace/starved": 2.0})
    run.save()
    command = ["doctor", "run", "--output-dir", str(tmp_path / "outputs")]
    said = CliRunner().invoke(app, command, env={"COLUMNS": "100"}).output
    narrow = CliRunner().invoke(app, command, env={"COLUMNS": "40"}).output
    assert max(len(line) for line in narrow.splitlines()[1:]) <= 40  # the first one has a path
    assert "".join(narrow.split()) == "".join(said.split())
    page = (Path(__file__).parents[4] / "docs/learning-problems.md").read_text()
    (shown,) = re.findall(r"^```text\n(outputs/.*?)```", page, re.DOTALL | re.MULTILINE)
    words = re.compile(r"^(?:  )?[A-Za-z_]+:?(?: [A-Za-z-]+)*", re.MULTILINE)
    beginnings = [
        [each for each in words.findall(text) if not each.startswith("outputs")]
        for text in (shown, said.partition("\n")[2])
    ]
    assert beginnings[0] == beginnings[1]
    assert "1 finding\n" in shown and "1 finding\n" in said
    assert shown.strip().splitlines()[-1] == said.strip().splitlines()[-1]


def test_a_short_run_gets_no_verdict(tmp_path):
    run = Recorded(tmp_path / "outputs/run", steps=8)
    replies_are_cut(run)
    assert diagnose(run.save()) == []
    said = CliRunner().invoke(app, ["doctor", "run", "--output-dir", str(tmp_path / "outputs")])
    assert "8 steps; a verdict needs 12" in said.output


@pytest.mark.parametrize("steps", [8, STEPS])
def test_beside_json_stands_what_its_list_of_verdicts_does_not_say(tmp_path, steps):
    """An empty list alone would read as a run without a fault."""
    run_dir = Recorded(tmp_path / "outputs/run", steps=steps).save()
    (run_dir / "status").mkdir(exist_ok=True)
    Status(run_dir / "status/trainer.json").report("failed", error="out of memory")
    supervisor = {"pid": 1, "host": "elsewhere", "started": 1.0, "state": "failed"}
    (run_dir / "status/supervisor.json").write_text(json.dumps(supervisor))
    command = ["doctor", "run", "--json", "--output-dir", str(tmp_path / "outputs")]
    said = CliRunner().invoke(app, command)
    assert json.loads(said.stdout) == []
    assert "failed  trainer: out of memory\n" in said.stderr
    assert ("8 steps; a verdict needs 12" in said.stderr) == (steps == 8)


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
