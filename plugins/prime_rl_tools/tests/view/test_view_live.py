"""The live view, drawn from files at every stage of a run, with and without a terminal."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from disks import SharedDisk
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from prime_rl import PluginConfig, Rollout, Sample
from prime_rl.rundir.status import Status
from prime_rl_app.saved_rollouts import write_rollouts
from prime_rl_tools.view.findings import Findings
from prime_rl_tools.view.live import MetricsTail, TerminalView, clock, sparkline
from prime_rl_tools.view.sampled import SampledRollouts

REWARD = "train/agg/all/reward/mean"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a-run--1"
    (folder / "status").mkdir(parents=True)
    return folder


def log(run_dir, step, reward=0.5, seconds=1.0, tokens=100.0, **more):
    row = {
        "step": step,
        REWARD: reward,
        "progress/seconds": seconds,
        "progress/total_tokens": tokens,
    }
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | more) + "\n")


def status(run_dir, name, *args, **kwargs):
    Status(run_dir / "status" / f"{name}.json").report(*args, **kwargs)


def terminal(width=100):
    return Console(
        record=True, force_terminal=True, width=width, file=io.StringIO(), color_system=None
    )


def view_of(run_dir, max_steps, console):
    return TerminalView(PluginConfig(), run_dir, max_steps, console)


def drawn(run_dir, width=100, max_steps=10):
    console = terminal(width)
    view = view_of(run_dir, max_steps, console)
    view.metrics.read_new()
    console.print(view.render())
    return console.export_text()


# -- pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([0, 1], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0, 3.5], "█▁▅"),
        ([0.5], "▁"),
        ([2, 2, 2], "▁▁▁"),
        ([-1, 0, 1], "▁▅█"),
    ],
)
def test_sparklines_worked_out_manually(values, bars):
    assert sparkline(values) == bars


def test_a_long_sparkline_averages():
    assert sparkline([0, 0, 1, 1], width=2) == "▁█"
    assert sparkline([0, 1, 1, 2, 2, 3], width=3) == "▁▅█"  # means 0.5 1.5 2.5
    assert len(sparkline(list(range(1000)))) == 48


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (83.9, "1:23"), (3600, "60:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


# -- following the metrics --------------------------------------------------------------------


def test_whole_lines_only_and_each_once(run_dir):
    tail = MetricsTail(run_dir / "metrics.jsonl")
    tail.read_new()
    log(run_dir, 1, 0.25)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tr')
    tail.read_new()
    tail.read_new()
    assert (tail.rewards, tail.step) == ([0.25], 1)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('ainer": 1}\n')
    log(run_dir, 2, 0.75)
    tail.read_new()
    assert (tail.rewards, tail.step, tail.latest["trainer"]) == ([0.25, 0.75], 2, 1)


def test_tokens_per_second_over_the_last_twenty_steps(run_dir):
    tail = MetricsTail(run_dir / "metrics.jsonl")
    assert tail.tokens_per_second == 0.0
    for step in range(1, 31):  # the first ten steps are slow, the rest give 50 tokens in 0.5 s
        seconds = step * 10.0 if step <= 10 else 100 + (step - 10) * 0.5
        log(run_dir, step, seconds=seconds, tokens=50.0 * step)
    tail.read_new()
    assert tail.tokens_per_second == pytest.approx(100.0)


def test_tokens_per_second_of_this_attempt_only(run_dir):
    tail = MetricsTail(run_dir / "metrics.jsonl")
    for step, (seconds, tokens) in enumerate([(50, 1000), (60, 1100), (2, 40), (4, 100)], start=1):
        log(run_dir, step, seconds=seconds, tokens=tokens)
    tail.read_new()
    assert tail.tokens_per_second == pytest.approx(30.0)  # 60 tokens in 2 s


# -- on a terminal ----------------------------------------------------------------------------


def test_before_anything_has_happened(run_dir):
    text = drawn(run_dir)
    assert "a-run--1" in text and "0/10" in text and "reward" not in text


def test_while_processes_start(run_dir):
    status(run_dir, "model", "warming up", progress=0.42)
    status(run_dir, "orchestrator", "waiting", waiting_for="model (being made)")
    text = drawn(run_dir)
    assert "warming up" in text and "42%" in text and "model (being made)" in text


def test_while_training(run_dir):
    for step in (1, 2):
        more = {"off_policy/mean": 1.0, "off_policy/max": 2.0, "mismatch_kl/all/mean": 3.2e-7}
        log(run_dir, step, step / 4, seconds=step, tokens=1000.0 * step, **more)
    status(run_dir, "orchestrator", "sampling batch 3", inflight=64, buffered="8/64")
    text = drawn(run_dir)
    for shown in ("2/10", "0.500 ▁█", "1,000", "1.00 steps (max 2)", "3.2e-07", "sampling batch 3",
                  "inflight 64", "buffered 8/64"):  # fmt: skip
        assert shown in text, shown


def test_the_shares_of_a_batch_by_versions_behind(run_dir):
    ages = {"off_policy/mean": 1.5, "off_policy/max": 2.0}
    first = {"off_policy/behind/0": 0.5, "off_policy/behind/4": 0.5}
    log(run_dir, 1, seconds=1, tokens=1000.0, **ages, **first)
    shares = {"off_policy/behind/0": 0.25, "off_policy/behind/2": 0.75}
    log(run_dir, 2, seconds=2, tokens=2000.0, **ages, **shares)
    assert "1.50 steps (max 2: 25% 0% 75%)" in drawn(run_dir)


def test_the_time_left_the_trainers_numbers_and_the_waits(run_dir):
    for step in (1, 2, 3):  # 30 s a step
        log(run_dir, step, seconds=30.0 * step, tokens=300.0 * step)
    trained = {"loss/mean": -0.0123, "entropy/all/mean": 1.5, "optim/grad_norm": 0.25}
    waits = {"wait/trainer/orchestrator": 4.0, "wait/orchestrator/inference": 0.5, "time/step": 6.0}
    paused = {"time/engines_paused": 0.25}
    log(run_dir, 4, seconds=120.0, tokens=1200.0, **trained, **waits, **paused)
    text = drawn(run_dir, width=120)
    for shown in ("about 3:00 left", "loss -0.0123   entropy 1.500   grad norm 0.25",
                  "orchestrator for inference 0.50 s, trainer for orchestrator 4.00 s of 6.00 s",
                  "engines paused 0.25 s per step", "10 of batches, prompts included"):  # fmt: skip
        assert shown in text, shown


def test_waits_are_those_of_one_step_although_two_processes_write_them(run_dir):
    log(run_dir, 1, **{"wait/orchestrator/inference": 0.5, "time/step": 2.0})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "wait/trainer/orchestrator": 1.5}) + "\n")
    both = "orchestrator for inference 0.50 s, trainer for orchestrator 1.50 s of 2.00 s"
    assert both in drawn(run_dir, width=120)
    log(run_dir, 2, **{"wait/orchestrator/inference": 0.25, "time/step": 1.0})
    assert "waiting  orchestrator for inference 0.25 s of 1.00 s" in drawn(run_dir, width=120)


def test_rollouts_of_the_newest_batch_take_turns(tmp_path):
    """By a real tokenizer of two words, from the lowest reward to the highest."""
    tokenizer = Tokenizer(WordLevel({"say": 0, "no": 1, "yes": 2}, unk_token="no"))
    (tmp_path / "weights").mkdir()
    tokenizer.save(str(tmp_path / "weights" / "tokenizer.json"))
    rollouts = [
        Rollout(
            env="e", example_id=5, group_id=0, reward=reward,
            samples=[Sample(token_ids=[0, word], loss_mask=[0, 1], inference_logprobs=[0, -1])],
        )
        for reward, word in ((1.0, 2), (0.25, 1))
    ]  # fmt: skip
    now = [0.0]
    sampled = SampledRollouts(tmp_path, lambda: now[0])
    assert sampled.render(80) is None
    write_rollouts(tmp_path / "rollouts" / "step_1.msgpack", 1, rollouts, {})
    seen = []
    for seconds in (0, 1, 5, 10):
        now[0] = seconds
        console = terminal()
        console.print(sampled.render(80))
        seen.append(console.export_text().split())
    rewards = [words[words.index("reward") + 1] for words in seen]
    assert rewards[0] == rewards[1] and rewards[1] != rewards[2] != rewards[3]
    assert {(r, *words[-2:]) for r, words in zip(rewards, seen, strict=True)} == {
        ("1", "say", "yes"),
        ("0.25", "say", "no"),
    }


def test_the_alternate_screen_is_redrawn_whole_at_each_size_and_its_last_picture_stays(run_dir):
    console = terminal(100)
    with view_of(run_dir, 3, console) as view:
        log(run_dir, 1)
        view.refresh()
        view.print("trainer: restarted")
        for width, height in ((60, 20), (80, 30)):
            console.size = (width, height)
            console.file.seek(0)
            console.file.truncate()
            view.refresh()
            drawn = console.file.getvalue()
            lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", drawn).split("\n")
            assert len(lines) == height and {len(line) for line in lines} == {width}
            assert "trainer: restarted" in drawn and "\x1b[H" in drawn
    after = console.file.getvalue().rpartition("\x1b[?1049l")[2]
    assert "1/3" in after and after.rstrip().endswith("trainer: restarted")


def test_engines_are_shown_together_then_separately(run_dir):
    for name in ("trainer", "engines", "inference", *(f"inference_{n}" for n in range(1, 11))):
        status(run_dir, name, f"is {name}")
    names = [line.split()[1] for line in drawn(run_dir).splitlines() if " is " in line]
    each = ["inference", *(f"inference_{n}" for n in range(1, 11))]
    assert names == ["engines", *each, "trainer"]


def test_metrics_that_are_null_do_not_break_it(run_dir):
    log(
        run_dir,
        1,
        **{"off_policy/mean": None, "off_policy/max": None, "mismatch_kl/all/mean": None},
    )
    log(run_dir, 2, reward=None)
    assert "2/10" in drawn(run_dir)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width(run_dir, width):
    log(run_dir, 1)
    status(run_dir, "trainer", "training " * 20, waiting_for="[bold]odd[/bold] " * 20)
    assert drawn(run_dir, width)


def test_a_broken_status_file_is_left_out(run_dir):
    (run_dir / "status" / "trainer.json").write_text("{")
    assert "trainer" not in drawn(run_dir)


def test_live_from_start_to_end(run_dir):
    console = terminal()
    with view_of(run_dir, 3, console) as view:
        for step in (1, 2, 3):
            log(run_dir, step)
            view.refresh()
    assert "3/3" in console.export_text()


# -- off a terminal -----------------------------------------------------------------------------


def plain(run_dir, max_steps=25):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    return console, view_of(run_dir, max_steps, console)


def test_lines_when_there_is_news(run_dir):
    console, view = plain(run_dir)
    with view:
        status(run_dir, "inference", "loading weights")
        view.refresh()
        view.refresh()
        status(run_dir, "inference", "serving")
        status(run_dir, "trainer", "waiting", waiting_for="batch [1]")
        view.refresh()
        for step in range(1, 26):
            log(run_dir, step, reward=step / 100, seconds=step, tokens=2000.0 * step,
                **{"off_policy/mean": 0.5, "off_policy/max": 1})  # fmt: skip
            view.refresh()
    tail = "2,000 tokens/s | off-policy 0.50 steps (max 1)"
    assert console.file.getvalue().splitlines() == [
        "inference: loading weights",
        "inference: serving",
        "trainer: waiting (waits for batch [1])",
        f"step 10/25 | reward 0.100 | {tail}",
        f"step 20/25 | reward 0.200 | {tail}",
        f"step 25/25 | reward 0.250 | {tail}",
    ]


def test_a_resumed_run_prints_what_starts(run_dir):
    for step in range(1, 11):
        log(run_dir, step, reward=step / 100, seconds=step, tokens=2000.0 * step)
    console, view = plain(run_dir)
    with view:
        status(run_dir, "inference", "loading weights")
        view.refresh()
    assert console.file.getvalue().splitlines() == ["inference: loading weights"]


def test_without_changes_no_line_is_printed(run_dir):
    console, view = plain(run_dir)
    with view:
        view.refresh()
    assert console.file.getvalue() == ""


def test_a_run_without_rewards_shows_its_loss(run_dir):
    log(run_dir, 1, reward=None, **{"loss/mean": 0.75})
    text = drawn(run_dir)
    assert "1/10" in text and "0.750" in text


# -- small terminals ------------------------------------------------------------------------------


def busy_run(run_dir):
    """A run whose view has every part."""
    write_rollouts(run_dir / "rollouts" / "step_3.msgpack", 3, [one_rollout()], {})
    for step in range(1, 4):
        log(
            run_dir, step, 0.25 * step, step, 900.0 * step,
            **{"loss/mean": 0.1, "entropy/all/mean": 1.0, "optim/grad_norm": 0.2},
            **{"off_policy/mean": 1.0, "off_policy/max": 2.0, "mismatch_kl/all/mean": 0.01},
            **{"time/step": 1.0, "wait/trainer/batch": 0.5},
        )  # fmt: skip
    status(run_dir, "model", "done")
    status(run_dir, "inference", "generating", requests=12)
    status(run_dir, "trainer", "waiting", waiting_for="orchestrator (batch 4 of 16 groups)")
    status(run_dir, "orchestrator", "sampling batch 4", progress=0.5)


def one_rollout():
    mask = np.arange(8) >= 2
    sample = Sample(
        token_ids=np.arange(8), loss_mask=mask, inference_logprobs=np.where(mask, -1, 0)
    )
    return Rollout(env="a", example_id=0, group_id=0, reward=0.5, samples=[sample])


def screen(run_dir, width, height):
    """The lines of the alternate screen."""
    console = Console(force_terminal=True, width=width, height=height, file=io.StringIO())
    with view_of(run_dir, 10, console) as view:
        view.print("one thing that has happened")
        view.metrics.read_new()
        shown = console.render_lines(view.render(), console.options.update(height=None), pad=False)
    return ["".join(segment.text for segment in line) for line in shown]


@pytest.mark.parametrize(
    ("width", "height"), [(40, 20), (40, 12), (60, 16), (80, 24), (100, 20), (120, 40), (200, 60)]
)
def test_every_process_fits_the_terminal(run_dir, width, height):
    busy_run(run_dir)
    lines = screen(run_dir, width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    for name in ("model", "inference", "trainer", "orchestrator"):
        assert re.search(rf"│ {name} ", text), text
    assert "3/10" in text
    assert "0.750" in text


def labels(text):
    """Of the rows of a picture, the words left of the values."""
    return [*re.findall(r"^│ *((?:[a-z/-]+ )*[a-z/-]+)  \S", text, re.MULTILINE)]


def test_the_picture_in_the_docs_has_the_rows_of_the_view(run_dir, monkeypatch):
    busy_run(run_dir)
    shares = {"has_error": 0.0, "is_truncated": 0.0, "is_dropped": 0.125}
    more = {f"train/agg/all/{name}/mean": share for name, share in shares.items()}
    more |= {"time/engines_paused": 0.01, "off_policy/behind/1": 1.0, "off_policy/mean": 1.0}
    more |= {"off_policy/max": 1.0, "mismatch_kl/all/mean": 0.01, "loss/mean": 0.1}
    more |= {"wait/trainer/batch": 0.5, "time/step": 1.0}
    log(run_dir, 4, 0.5, 4, 5000.0, **more)
    monkeypatch.setattr(Findings, "render", lambda self: "a finding")
    lines = "\n".join(screen(run_dir, 80, 60))
    page = (Path(__file__).parents[4] / "docs/observability.md").read_text()
    (picture,) = re.findall(r"╭─+ prime-rl.*?╯", page, re.DOTALL)
    shown = [each for each in labels(lines) if each != "model"]
    assert shown == labels(picture)
    assert {"new weights", "doctor"} <= {*shown}
    for form in (r"of rollouts failed [\d.]+%", r"engines paused", r"steps \(max \d: [\d% ]+\)"):
        assert re.search(form, lines)
        assert re.search(form, picture)


def test_a_large_terminal_has_all_and_a_small_one_the_least_needed_goes_first(run_dir):
    busy_run(run_dir)
    whole = "\n".join(screen(run_dir, 100, 60))
    assert all(each in whole for each in ("tokens/s", "off-policy", "batch 4 of 16 groups"))
    assert "one thing that has happened" in whole
    small = "\n".join(screen(run_dir, 40, 20))
    assert "waits for" in small


def test_a_view_outlives_a_look_that_the_disk_refuses(run_dir, monkeypatch):
    busy_run(run_dir)
    console, view = plain(run_dir)
    disk = SharedDisk(monkeypatch, run_dir)
    with disk.refusing():
        view.refresh()
        assert "trainer" not in console.file.getvalue()
    view.refresh()
    assert "trainer: waiting" in console.file.getvalue()
