"""The files of versions, results and the learning curve, and the summary on the console."""

import io
import json

import pytest
from rich.console import Console

from prime_rl.orchestrator.summary import (
    read_curve,
    read_evals,
    running_mean,
    write_summary,
    write_versions,
)
from prime_rl.plugins.manager import load_plugins
from prime_rl.run.report import print_summary

REWARD = "train/agg/all/reward/mean"


def result(reward, version=0):
    talk = [["user", "say  it\nbackwards"], ["assistant", "ti yas"]]
    shown = [{"reward": reward, "messages": talk, "error": None}]
    sizes = {"num_rollouts": 8, "num_failed": 1}
    return {"env": "held", "policy_version": version, "reward": reward, "shown": shown, **sizes}


def run_with(tmp_path, rewards):
    rows = [{"step": i + 1, REWARD: value} for i, value in enumerate(rewards)]
    rows.insert(1, {"step": 0, "eval/held/all/reward/mean": 0.3})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(tmp_path, {"before": [result(0.25)], "after": [result(0.75, 12)]})
    return json.loads((tmp_path / "summary.json").read_text())


def test_the_summary_in_numbers(tmp_path):
    summary = run_with(tmp_path, [0.0] * 18 + [0.5, 1.0])
    assert summary["steps"] == 20
    first, last = summary["sampled_reward"]["first"], summary["sampled_reward"]["last"]
    assert (first, last, summary["sampled_reward"]["window"]) == (0.0, pytest.approx(0.15), 10)
    assert summary["eval"]["before"][0]["reward"] == 0.25
    assert summary["eval"]["after"][0]["policy_version"] == 12


def test_the_summary_names_the_plugins(tmp_path):
    assert run_with(tmp_path, [0.5])["plugins"] == {}
    rows = [{"plugin": "a", "distribution": "prime-rl-a", "version": "1.2", "group": "prime_rl"}]
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": rows}))
    assert run_with(tmp_path, [0.5])["plugins"] == {"prime-rl-a": "1.2"}


def test_the_window_of_a_short_run(tmp_path):
    sampled = run_with(tmp_path, [0.25, 0.75])["sampled_reward"]
    assert sampled == {"first": 0.25, "last": 0.75, "window": 1}
    sampled = run_with(tmp_path, [0.0, 0.5, 1.0])["sampled_reward"]
    assert sampled == {"first": 0.25, "last": 0.75, "window": 2}


def test_the_plot_is_a_png(tmp_path):
    run_with(tmp_path, [0.1, 0.2, 0.3])
    data = (tmp_path / "learning_curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5_000


def test_a_run_without_metrics_still_has_a_summary(tmp_path):
    write_summary(tmp_path, {"before": [], "after": []})
    assert (tmp_path / "learning_curve.png").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["sampled_reward"] == {"first": None, "last": None, "window": 0}


def test_the_curve_skips_lines_without_the_metric(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"step": 1, "x": 0.5}\n{"step": 1}\n{"step": 2, "x": null}\n{"step": 3, "x": 0}\n'
    )
    assert read_curve(path, "x") == [(1, 0.5), (3, 0)]
    assert read_curve(tmp_path / "none", "x") == []


def test_the_running_mean_in_numbers():
    assert running_mean([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]


def printed(run_dir):
    console = Console(record=True, width=100, file=io.StringIO())
    print_summary(console, run_dir)
    return console.export_text()


def test_the_summary_on_the_console(tmp_path):
    run_with(tmp_path, [0.25, 0.75])
    text = printed(tmp_path)
    assert "Sampled reward  0.250 → 0.750   first and last step" in text
    assert "0.250 → 0.750" in text and "held, 8 rollouts" in text
    assert "say it backwards" in text and text.count("ti yas") == 2
    assert str(tmp_path / "learning_curve.png") in text.replace("\n", "")


def test_without_an_evaluation_before_training_the_first_one_counts(tmp_path):
    results = {"before": [], "during": [result(0.375, 4), result(0.5, 8)], "after": [result(0.75)]}
    write_summary(tmp_path, results)
    assert "0.375 → 0.750" in printed(tmp_path)


def test_a_single_evaluation_is_not_compared_with_itself(tmp_path):
    write_summary(tmp_path, {"before": [], "during": [], "after": [result(0.75)]})
    assert "Held-out reward 0.750   held, 8 rollouts; not measured before" in printed(tmp_path)
    assert "→" not in printed(tmp_path)


def test_evaluations_are_read_by_when_they_were_made(tmp_path):
    rows = [("before", 0), ("during", 2), ("after", 4), ("during", 6), ("after", 8)]
    lines = [json.dumps({"step": at, "when": when, **result(0.1, at)}) for when, at in rows]
    (tmp_path / "evals.jsonl").write_text("".join(f"{line}\n" for line in lines))
    found = read_evals(tmp_path, last=8)  # what ended at step 4 was resumed
    assert found["before"] == [result(0.1, 0)] and found["after"] == [result(0.1, 8)]
    assert [each["policy_version"] for each in found["during"]] == [2, 4, 6]
    assert read_evals(tmp_path / "none", last=8) == {"before": [], "during": [], "after": []}


def test_markup_in_a_reply_is_shown_unchanged(tmp_path):
    shown = [{"reward": 1.0, "messages": [["user", "[bold]hi[/]"], ["assistant", "[/red]"]]}]
    odd = result(0.5) | {"shown": shown}
    write_summary(tmp_path, {"before": [odd], "after": [odd]})
    assert "[bold]hi[/]" in printed(tmp_path) and "[/red]" in printed(tmp_path)


def test_without_a_summary_nothing_is_printed(tmp_path):
    assert printed(tmp_path) == ""


def test_the_versions_of_both_sides(tmp_path):
    hooks = load_plugins(disabled=["wandb"])
    write_versions(tmp_path, hooks, disabled=["losses"])
    found = json.loads((tmp_path / "plugins.json").read_text())
    rows = {(row["group"], row["plugin"]): row for row in found["plugins"]}
    assert rows["prime_rl", "core"]["distribution"] == "prime-rl-core"
    assert rows["prime_rl", "core"]["version"] == found["packages"]["prime-rl-core"]
    assert ("prime_rl", "wandb") not in rows and ("prime_rl.trainer", "losses") not in rows
    assert any(group == "prime_rl.trainer" for group, _ in rows)
