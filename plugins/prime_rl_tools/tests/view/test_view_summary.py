"""The results of a run: ``summary.json``, the learning curve, and what is printed at the end."""

import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from prime_rl import ChatTemplate, PluginConfig
from prime_rl.rundir.chat_template import write_chat_template
from prime_rl.rundir.checkpoints import CHECKSUMS, finished
from prime_rl_tools.view.ending import print_summary
from prime_rl_tools.view.live import TerminalView
from prime_rl_tools.view.summary import read_curve, running_mean, summarize

REWARD = "train/agg/all/reward/mean"
LAST = 12
TALK = [["user", "say  it\nbackwards"], ["assistant", "ti yas"]]


def measured(run_dir, when, reward, version=0, talk=TALK, env="held"):
    """Add a line to ``evals.jsonl``. Returns the result in it."""
    shown = [{"reward": reward, "messages": talk, "error": None}]
    result = {
        "env": env,
        "policy_version": version,
        "reward": reward,
        "num_rollouts": 8,
        "num_failed": 0,
        "metrics": {"lcs": 0.5},
        "shown": shown,
        "measures": {"eval/held/pass@1": reward},
    }
    with (run_dir / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": version, "when": when, **result}) + "\n")
    return result


def rewarded(run_dir, rewards):
    rows = [{"step": i + 1, REWARD: value} for i, value in enumerate(rewards)]
    rows.insert(1, {"step": 0, "eval/held/all/reward/mean": 0.3})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def view_of(run_dir):
    console = Console(record=True, width=100, file=io.StringIO())
    return TerminalView(PluginConfig(), run_dir, LAST, console)


def printed(run_dir):
    """What a run prints that has trained every step."""
    view = view_of(run_dir)
    view.ended()
    return view.console.export_text()


def printed_at_stop(run_dir, *, step=None, saved=False):
    view = view_of(run_dir)
    view.stopped(step, saved, "prime-rl run a.toml")
    return view.console.export_text()


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def run_with(run_dir, rewards):
    rewarded(run_dir, rewards)
    measured(run_dir, "before", 0.25)
    measured(run_dir, "after", 0.75, LAST)
    printed(run_dir)
    return summary_of(run_dir)


# -- the files --------------------------------------------------------------------------------


def test_the_summary_in_numbers(tmp_path):
    summary = run_with(tmp_path, [0.0] * 18 + [0.5, 1.0])
    assert list(summary) == [
        *("steps", "stopped_at", "sampled_reward", "plugins", "eval", "restarts", "plot")
    ]
    assert summary["restarts"] == []
    assert (summary["steps"], summary["stopped_at"]) == (20, None)
    first, last = summary["sampled_reward"]["first"], summary["sampled_reward"]["last"]
    assert (first, last, summary["sampled_reward"]["window"]) == (0.0, pytest.approx(0.15), 10)
    assert summary["eval"]["before"][0]["reward"] == 0.25
    assert summary["eval"]["after"][0]["policy_version"] == LAST


def test_the_summary_has_every_field_of_each_evaluation(tmp_path):
    before, during = measured(tmp_path, "before", 0.25), measured(tmp_path, "during", 0.5, 4)
    after = measured(tmp_path, "after", 0.75, LAST)
    printed(tmp_path)
    found = summary_of(tmp_path)["eval"]
    assert found == {"before": [before], "during": [during], "after": [after]}
    assert list(found["before"][0]) == list(before)


def test_a_result_after_an_earlier_attempt_is_one_during_the_run(tmp_path):
    """The earlier attempt ended with step 4, and this one continued from there."""
    rewarded(tmp_path, [0.5])
    earlier, after = measured(tmp_path, "after", 0.5, 4), measured(tmp_path, "after", 0.75, LAST)
    printed(tmp_path)
    assert summary_of(tmp_path)["eval"] == {"before": [], "during": [earlier], "after": [after]}


def test_a_stopped_run_that_was_continued_has_no_result_after_training(tmp_path):
    earlier = measured(tmp_path, "after", 0.5, 4)
    printed_at_stop(tmp_path, step=6, saved=True)
    summary = summary_of(tmp_path)
    assert summary["stopped_at"] == 6
    assert summary["eval"] == {"before": [], "during": [earlier], "after": []}


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


@pytest.mark.parametrize(
    ("reward", "text"),
    [(3e-5, "3e-05"), (-1e17, "-1e+17"), (0.0, "0.000"), (0.0005, "0.001"), (2.5, "2.500")],
)
def test_a_small_reward_does_not_read_as_zero_nor_a_large_one_as_a_row_of_digits(
    tmp_path, reward, text
):
    measured(tmp_path, "before", reward)
    measured(tmp_path, "after", reward, LAST)
    rewarded(tmp_path, [reward, reward])
    said = printed(tmp_path)
    assert f"Sampled reward  {text} → {text}" in said
    assert f"Held-out reward {text} → {text}" in said


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the newest learning curve, as lines by their names."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a: (figures.append(f), save(f, *a)))

    def lines():
        (axes,) = figures[-1].axes
        return {line.get_label(): line for line in axes.lines}, axes

    return lines


def test_held_out_envs_are_told_apart_in_the_plot(tmp_path, drawn):
    for number in range(8):
        for step in (0, 12):
            measured(tmp_path, "before" if not step else "after", 0.5, step, env=f"env{number}")
    rewarded(tmp_path, [0.1, 0.2])
    printed(tmp_path)
    lines, _ = drawn()
    held = [line for name, line in lines.items() if name.startswith("held out: ")]
    assert len(held) == len({(line.get_color(), line.get_marker()) for line in held}) == 8


def test_of_many_held_out_envs_the_legend_counts_those_that_it_does_not_name(tmp_path, drawn):
    for number in range(60):
        measured(tmp_path, "before", 0.5, env=f"env{number:02}")
    rewarded(tmp_path, [0.1, 0.2])
    printed(tmp_path)
    lines, axes = drawn()
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    held = [f"held out: env0{number}" for number in range(8)]
    assert named == ["sampled reward (each step)", "running mean", *held, "held out: 52 others"]
    assert len(axes.lines) == 62 and axes.get_position().height > 0.5
    assert len(lines["held out: 52 others"].get_xdata()) == 1


def test_a_long_name_leaves_the_curves_their_room(tmp_path, drawn):
    measured(tmp_path, "before", 0.5, env="long " * 80)
    rewarded(tmp_path, [0.1, 0.2])
    printed(tmp_path)
    _, axes = drawn()
    assert axes.get_position().width > 0.8


def test_the_reward_of_one_step_is_seen_in_the_plot(tmp_path, drawn):
    run_with(tmp_path, [0.25])
    lines, _ = drawn()
    for name in ("sampled reward (each step)", "running mean"):
        assert lines[name].get_marker() == "o"


def test_the_plot_of_a_run_without_rewards_shows_its_loss(tmp_path, drawn):
    rows = [{"step": n, "loss/mean": 1 / n} for n in (1, 2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed(tmp_path)
    lines, axes = drawn()
    assert list(lines["loss (each step)"].get_ydata()) == [1.0, 0.5, 0.25]
    assert axes.get_ylabel() == "loss"


def test_a_run_without_metrics_still_has_a_summary(tmp_path):
    printed(tmp_path)
    assert (tmp_path / "learning_curve.png").exists()
    assert summary_of(tmp_path)["sampled_reward"] == {"first": None, "last": None, "window": 0}


def test_a_summary_that_cannot_be_written_is_still_printed(tmp_path):
    (tmp_path / "summary.json").mkdir()
    rewarded(tmp_path, [0.25, 0.75])
    text = printed(tmp_path)
    assert "cannot write the summary: " in text and "Sampled reward  0.250 → 0.750" in text


def test_the_curve_skips_lines_without_the_metric(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"step": 1, "x": 0.5}\n{"step": 1}\n{"step": 2, "x": null}\n{"step": 3, "x": 0}\n'
    )
    assert read_curve(path, "x") == [(1, 0.5), (3, 0)]
    assert read_curve(tmp_path / "none", "x") == []


def test_the_running_mean_in_numbers():
    assert running_mean([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]


# -- on the console ---------------------------------------------------------------------------


def test_the_summary_on_the_console(tmp_path):
    run_with(tmp_path, [0.25, 0.75])
    text = printed(tmp_path)
    assert "Sampled reward  0.250 → 0.750   first and last step" in text
    assert "0.250 → 0.750" in text and "held, 8 rollouts" in text
    assert "say it backwards" in text and text.count("ti yas") == 2
    assert str(tmp_path / "learning_curve.png") in text.replace("\n", "")


def test_without_an_evaluation_before_training_the_first_one_counts(tmp_path):
    measured(tmp_path, "during", 0.375, 4)
    measured(tmp_path, "during", 0.5, 8)
    measured(tmp_path, "after", 0.75, LAST)
    assert "0.375 → 0.750" in printed(tmp_path)


def test_a_run_that_ended_early_is_measured_by_its_last_evaluation(tmp_path):
    """By [stop], as here, or by the user: there is none after training."""
    measured(tmp_path, "before", 0.25)
    assert "Held-out" not in printed(tmp_path)
    measured(tmp_path, "during", 0.5, 2)
    measured(tmp_path, "during", 0.375, 4)
    assert "Held-out reward 0.250 → 0.375   held, 8 rollouts" in printed(tmp_path)


def test_a_single_evaluation_is_not_compared_with_itself(tmp_path):
    measured(tmp_path, "after", 0.75, LAST)
    assert "Held-out reward 0.750   held, 8 rollouts; not measured before" in printed(tmp_path)
    assert "→" not in printed(tmp_path)


def test_markup_in_a_reply_is_shown_unchanged(tmp_path):
    talk = [["user", "[bold]hi[/]"], ["assistant", "[/red]"]]
    measured(tmp_path, "before", 0.5, talk=talk)
    measured(tmp_path, "after", 0.5, LAST, talk=talk)
    assert "[bold]hi[/]" in printed(tmp_path) and "[/red]" in printed(tmp_path)


def test_a_warning_about_the_chat_template_is_printed(tmp_path):
    (tmp_path / "configs").mkdir()
    chosen = ChatTemplate("x", "First difference, 'one turn': from token 3")
    write_chat_template(tmp_path, chosen)
    text = " ".join(printed(tmp_path).split())
    assert f"WARNING {chosen.warning}" in text


def test_a_finished_run_prints_the_commands_that_use_it(tmp_path):
    whole(tmp_path, LAST)
    measured(tmp_path, "after", 0.75, LAST)
    assert printed(tmp_path).splitlines()[-4:] == [
        f"Look at it      prime-rl report {tmp_path}",
        f"Serve it        prime-rl serve {tmp_path} --port 8000",
        f"Evaluate it     prime-rl eval {tmp_path} --base-url http://127.0.0.1:8000/v1",
        f"Train on        prime-rl run {tmp_path}/configs/run.json --run.name {tmp_path.name} "
        f"--resume --max-steps {2 * LAST}",
    ]


def of_a_script(run_dir):
    """The config of a run whose reward is a function of a script."""
    (run_dir / "configs").mkdir()
    env = {"id": "function", "args": {"functions": "outputs/.functions/1.functions"}}
    config = {"orchestrator": {"train": {"env": [env]}, "eval": {"env": []}}}
    (run_dir / "configs" / "run.json").write_text(json.dumps(config))


def test_a_run_with_functions_of_a_script_names_no_command_that_needs_them(tmp_path):
    of_a_script(tmp_path)
    whole(tmp_path, LAST)
    measured(tmp_path, "after", 0.75, LAST)
    assert printed(tmp_path).splitlines()[-3:] == [
        f"Look at it      prime-rl report {tmp_path}",
        f"Serve it        prime-rl serve {tmp_path} --port 8000",
        f"Train on        prime_rl.train(..., resume='latest', max_steps={2 * LAST})",
    ]


def test_an_argument_of_that_name_of_another_taskset_is_none_of_a_script(tmp_path):
    of_a_script(tmp_path)
    path = tmp_path / "configs" / "run.json"
    path.write_text(path.read_text().replace('"id": "function"', '"id": "tool-use"'))
    whole(tmp_path, LAST)
    assert "Train on        prime-rl run" in printed(tmp_path)


# -- a stop -----------------------------------------------------------------------------------


def whole(run_dir, step):
    folder = finished(run_dir, step).directory
    folder.mkdir(parents=True)
    (folder / CHECKSUMS).touch()


def test_a_stopped_run_prints_its_results_and_how_to_resume(tmp_path):
    rewarded(tmp_path, [0.25, 0.75])
    whole(tmp_path, 2)
    lines = printed_at_stop(tmp_path, step=2, saved=True).splitlines()
    assert lines[1:3] == [
        "Stopped at step 2",
        "Sampled reward  0.250 → 0.750   first and last step",
    ]
    assert lines[-2:] == [
        f"Weights         {tmp_path / 'weights'}",
        "Resume with     prime-rl run a.toml --resume",
    ]
    assert (tmp_path / "learning_curve.png").exists()


def test_a_stopped_run_with_functions_of_a_script_is_resumed_by_it(tmp_path):
    of_a_script(tmp_path)
    whole(tmp_path, 2)
    last = printed_at_stop(tmp_path, step=2, saved=True).splitlines()[-1]
    assert last == "Resume with     prime_rl.train(..., resume='latest')"


def test_a_stop_without_a_trained_step_writes_no_summary(tmp_path):
    text = printed_at_stop(tmp_path, step=0)
    assert text == f"stopped before a step was trained: no weights in {tmp_path}\n"
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_was_ended_at_once_names_its_last_checkpoint(tmp_path):
    whole(tmp_path, 2)
    assert printed_at_stop(tmp_path).splitlines() == [
        "stopped at once; newest checkpoint: step 2",
        f"Run directory   {tmp_path}",
        "Resume with     prime-rl run a.toml --resume",
    ]


def test_a_stopped_run_without_checkpoints_says_so(tmp_path):
    last = printed_at_stop(tmp_path, step=2, saved=True).splitlines()[-1]
    assert last == "No checkpoint to resume from was written (ckpt.enabled = false)"


def test_after_the_last_step_nothing_is_left_to_resume(tmp_path):
    whole(tmp_path, LAST)
    assert "Resume" not in printed_at_stop(tmp_path, step=LAST, saved=True)


@pytest.mark.parametrize(
    ("first", "last", "warned"),
    [
        (0.4, 0.001, True),
        (0.4, -1.0, True),
        (0.4, 0.11, False),
        (0.0, -1.0, False),
        (-1, -2, False),
    ],
)
def test_a_reward_that_collapses_is_said(tmp_path, first, last, warned):
    console = Console(record=True, width=200, file=io.StringIO())
    summary = summarize(tmp_path, 1)
    summary["sampled_reward"] = {"first": first, "last": last, "window": 1}
    print_summary(console, tmp_path, summary)
    assert ("WARNING  the sampled reward has collapsed: 0.4" in console.export_text()) == warned


def test_the_most_frequent_failure_of_rollouts_is_said_with_its_reason(tmp_path):
    logs = tmp_path / "logs" / "latest"
    logs.mkdir(parents=True)
    head = "2026-11-23 07:13:01,119 WARNING prime_rl.orchestrator.sampling: env 'e', example 1"
    failed = f"{head}, group 1: rollout failed and will not train"
    lines = [
        f"{failed}: TimeoutError: after 600 s",
        f"{failed}: RewardFault: row 2: reward exact raised KeyError: 'a' (line 3 of r.py)",
        f"{failed}: RewardFault: row 7: reward exact raised KeyError: 'a' (line 3 of r.py)",
        "2026-11-23 07:13:01,119 WARNING prime_rl: step 3 is slow",
    ]
    (logs / "orchestrator.log").write_text("\n".join(lines))
    rewarded(tmp_path, [0.25, 0.75])
    (said,) = [line for line in printed(tmp_path).splitlines() if " failures: " in line]
    reason = "RewardFault: row 2: reward exact raised KeyError: 'a' (line 3 of r.py)"
    assert said.strip() == f"2 of 3 failures: {reason}"


def test_what_the_processes_logged_as_errors_is_said_once_for_each_sort(tmp_path):
    logs = tmp_path / "logs" / "latest"
    logs.mkdir(parents=True)
    head = "2026-11-23 07:13:01,119"
    monitor = f"{head} ERROR prime_rl.orchestrator.reporter: monitor 'mine' failed at step 1; on"
    nan = f"{head} ERROR prime_rl.trainer.update: step %d: the gradient norm is nan"
    (logs / "orchestrator.log").write_text(f"{monitor}\nTraceback ERROR\n{head} INFO prime_rl: x\n")
    (logs / "trainer.log").write_text(f"{nan % 1}\n{nan % 2}\n")
    console = Console(record=True, width=300, file=io.StringIO())
    print_summary(console, tmp_path, summarize(tmp_path, 1))
    said = [line.strip() for line in console.export_text().splitlines() if "ERROR" in line]
    assert said == [
        "ERROR  orchestrator: monitor 'mine' failed at step 1; on",
        "ERROR  trainer: step 1: the gradient norm is nan",
    ]


@pytest.mark.parametrize(("skipped", "warned"), [((1.0, 0.5, 0.0), True), ((0.0, 0.0, 0.0), False)])
def test_optimizer_steps_that_were_left_out_are_said(tmp_path, skipped, warned):
    """A loss that is NaN at every step would end a run with exit code 0, and no word."""
    rows = [{"step": n, "optim/skipped": share} for n, share in enumerate(skipped, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(record=True, width=300, file=io.StringIO())
    print_summary(console, tmp_path, summarize(tmp_path, 1))
    assert ("WARNING  2 of 3 steps left out optimizer steps" in console.export_text()) == warned
