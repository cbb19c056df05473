"""What a run came to: the summary, the plot, and how both are told; and the sampler."""

import io
import json

import pytest
from rich.console import Console

from prime_rl import PluginConfig, SampledEnv
from prime_rl.orchestrator.evals import EvalResult
from prime_rl.orchestrator.evaluation import EvalLog
from prime_rl.orchestrator.sampler import StandardSampler
from prime_rl.orchestrator.summary import read_curve, running_mean, write_summary
from prime_rl.run.report import print_summary
from prime_rl.run.resume import rewind

REWARD = "train/agg/all/reward/mean"


def result(reward, version=0):
    talk = [["user", "say  it\nbackwards"], ["assistant", "ti yas"]]
    shown = [{"reward": reward, "messages": talk, "error": None}]
    return EvalResult("held", version, reward, 8, 1, {"lcs": 0.5}, shown)


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


def test_which_plugins_ran(tmp_path):
    assert run_with(tmp_path, [0.5])["plugins"] == {}
    rows = [{"plugin": "a", "distribution": "prime-rl-a", "version": "1.2", "group": "prime_rl"}]
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": rows}))
    assert run_with(tmp_path, [0.5])["plugins"] == {"prime-rl-a": "1.2"}


def test_a_short_run_says_how_short(tmp_path):
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


def testrunning_mean_by_hand():
    assert running_mean([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]


def told(run_dir):
    console = Console(record=True, width=100, file=io.StringIO())
    print_summary(console, run_dir)
    return console.export_text()


def test_the_end_of_a_run_is_told(tmp_path):
    run_with(tmp_path, [0.25, 0.75])
    text = told(tmp_path)
    assert "Sampled reward  0.250 → 0.750   first and last step" in text
    assert "0.250 → 0.750" in text and "held, 8 rollouts" in text
    assert "say it backwards" in text and text.count("ti yas") == 2
    assert str(tmp_path / "learning_curve.png") in text.replace("\n", "")


def test_without_a_measurement_before_the_first_there_is_stands_for_it(tmp_path):
    results = {"before": [], "during": [result(0.375, 4), result(0.5, 8)], "after": [result(0.75)]}
    write_summary(tmp_path, results)
    assert "0.375 → 0.750" in told(tmp_path)


def test_what_was_measured_once_is_not_set_against_itself(tmp_path):
    write_summary(tmp_path, {"before": [], "during": [], "after": [result(0.75)]})
    assert "Held-out reward 0.750   held, 8 rollouts; not measured before" in told(tmp_path)
    assert "→" not in told(tmp_path)


def test_a_run_that_goes_on_knows_what_was_measured_before_its_first_step(tmp_path):
    for when, step in (("before", 0), ("during", 2), ("after", 4)):
        EvalLog(tmp_path).append(when, result(0.1 * step, step))
    rewind(tmp_path, 2)
    found = EvalLog(tmp_path).results
    assert [(r.policy_version, r.reward) for r in found["before"]] == [(0, 0.0)]
    assert [(r.policy_version, r.reward) for r in found["during"]] == [(2, 0.2)]
    assert found["before"] == [result(0.0, 0)] and found["after"] == []
    write_summary(tmp_path, found | {"after": [result(0.75, 6)]})
    assert "0.000 → 0.750" in told(tmp_path)


def test_the_end_of_an_attempt_is_in_the_midst_of_a_longer_run(tmp_path):
    EvalLog(tmp_path).append("after", result(0.5, 4))
    rewind(tmp_path, 4)
    found = {"before": [], "during": [result(0.5, 4)], "after": []}
    assert EvalLog(tmp_path).results == found
    assert EvalLog(tmp_path / "none").results == {"before": [], "during": [], "after": []}


def test_markup_in_what_the_model_said_is_shown_as_it_is(tmp_path):
    shown = [{"reward": 1.0, "messages": [["user", "[bold]hi[/]"], ["assistant", "[/red]"]]}]
    odd = EvalResult("held", 0, 0.5, 1, 0, {}, shown)
    write_summary(tmp_path, {"before": [odd], "after": [odd]})
    assert "[bold]hi[/]" in told(tmp_path) and "[/red]" in told(tmp_path)


def test_no_summary_no_words(tmp_path):
    assert told(tmp_path) == ""


# -- the standard sampler -----------------------------------------------------------------------


def sampler(*envs, seed=0):
    return StandardSampler(PluginConfig(), [SampledEnv(*env) for env in envs], seed)


def test_examples_in_order_starting_over():
    one = sampler(("a", 3, None))
    assert [one.next_example() for _ in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]


def test_an_endless_env_never_starts_over():
    one = sampler(("a", None, None))
    assert [one.next_example()[1] for _ in range(100)] == list(range(100))


def test_envs_by_their_ratio():
    one = sampler(("a", 5, 3.0), ("b", 5, 1.0))
    picks = [one.next_example()[0] for _ in range(4000)]
    assert picks.count(0) / 4000 == pytest.approx(0.75, abs=0.03)
    even = sampler(("a", 5, None), ("b", 5, None))
    assert [even.next_example()[0] for _ in range(4000)].count(0) / 4000 == pytest.approx(
        0.5, abs=0.03
    )


def test_one_seed_one_order():
    envs = (("a", 5, None), ("b", 5, None))
    drawn = {
        seed: [sampler_.next_example() for _ in range(50)]
        for seed, sampler_ in ((s, sampler(*envs, seed=s)) for s in (0, 1))
    }
    again = sampler(*envs, seed=0)
    assert [again.next_example() for _ in range(50)] == drawn[0] != drawn[1]
