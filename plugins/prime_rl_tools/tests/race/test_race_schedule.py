"""What a race refuses before it starts, and the measures of a run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from disks import SharedDisk

from prime_rl.errors import ConfigError
from prime_rl_tools.race import schedule
from prime_rl_tools.race.schedule import Budget, Point, cpu_seconds, read_entries

HELD_OUT = '[[orchestrator.eval.env]]\nid = "reverse-text"\n'
CONFIG = (
    'max_steps = 100\n[model]\nname = "tiny-reverse"\n'
    f'[[orchestrator.train.env]]\nid = "reverse-text"\n{HELD_OUT}'
)


@pytest.fixture
def file(tmp_path):
    def write(name, text=CONFIG):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_budget_of_steps_is_the_last_step_of_every_config(file):
    entries = read_entries([file("a.toml"), file("b.toml")], ["--trainer.optim.lr=1e-3"], Budget(7))
    assert [entry.name for entry in entries] == ["a", "b"]
    assert [entry.config.max_steps for entry in entries] == [7, 7]
    assert entries[1].config.trainer.optim.lr == 1e-3


def test_a_config_is_laid_over_the_base(file):
    base = file("base.toml")
    other = file("other.toml", '[orchestrator.algo]\ntype = "max_rl"\n')
    entries = read_entries([base, other], ["--max_steps=3"], Budget(), base)
    assert [entry.config.orchestrator.algo.type for entry in entries] == ["grpo", "max_rl"]
    assert [entry.config.max_steps for entry in entries] == [3, 3]
    assert entries[1].files == (base, other)
    alone = read_entries([base, file("third.toml")], ["--max_steps=3"], Budget())
    assert entries[0].digest == alone[0].digest  # a race with a base knows the runs of one without


def test_equal_file_names_are_told_apart_by_their_folders(file):
    entries = read_entries([file("x/grpo.toml"), file("y/grpo.toml")], [], Budget())
    assert [entry.name for entry in entries] == ["x.grpo", "y.grpo"]


@pytest.mark.parametrize(
    ("other", "budget", "said"),
    [
        (CONFIG.replace(HELD_OUT, ""), Budget(), "no held-out env"),
        (CONFIG + "num_examples = 3\n", Budget(), "cannot be compared"),
        (CONFIG, Budget(tokens=1000), "Set interval"),
        (CONFIG, Budget(cpu_seconds=10.0), "Set interval"),
    ],
)
def test_configs_that_cannot_be_compared_are_refused(file, other, budget, said):
    with pytest.raises(ConfigError, match=said):
        read_entries([file("a.toml"), file("b.toml", other)], [], budget)


def test_how_often_a_config_evaluates_is_its_own_affair(file):
    often = [file("a.toml", CONFIG + "interval = 5\n"), file("b.toml", CONFIG + "interval = 9\n")]
    assert len(read_entries(often, [], Budget(tokens=1000))) == 2


def test_a_budget_allows_what_it_says():
    point = Point(step=3, reward=0.5, tokens=100, cpu_seconds=20.0)
    assert Budget().allows(point) and Budget(tokens=100).allows(point)
    assert not Budget(tokens=99).allows(point)
    assert not Budget(cpu_seconds=19.9).allows(point)


def test_the_time_of_children_that_have_ended_counts():
    """The child computes for half a second and ends; its parent waits for input.

    The kernel counts in ticks of 10 ms and keeps four numbers: 0.04 s are lost at most.
    """
    work = "import time\nwhile time.process_time() < 0.5: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); "
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    parent.stdout.readline()
    measured = cpu_seconds(parent.pid)
    before = os.times()
    parent.communicate(b"\n")
    after = os.times()
    total = after.children_user + after.children_system
    total -= before.children_user + before.children_system
    assert 0.46 <= measured <= total + 0.04
    assert cpu_seconds(parent.pid) == 0.0


def test_tokens_are_counted_as_the_metrics_write_them(tmp_path):
    """Metrics are floats; a budget of tokens counted none of them once."""
    rows = [(1, "500.0"), (2, "1000"), (3, "null"), (4, "1e400"), (5, "2000.0")]
    lines = [f'{{"step": {step}, "progress/total_tokens": {tokens}}}\n' for step, tokens in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    counted = [schedule._tokens(tmp_path, step) for step in (0, 1, 2, 3, 5)]
    assert counted == [0, 500, 1000, 1000, 2000]
    assert schedule._tokens(tmp_path) == 2000


def test_a_look_that_the_disk_refuses_ends_no_race(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "evals.jsonl").write_text('{"step": 3, "reward": 0.5, "env": "e"}\n')
    disk = SharedDisk(monkeypatch, run_dir)
    ends = iter((None, None, 0, 0))
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: next(ends), returncode=0)
    monkeypatch.setattr(schedule.subprocess, "Popen", lambda *args, **settings: process)
    config = SimpleNamespace(orchestrator=SimpleNamespace(eval=SimpleNamespace(env=["e"])))
    entry = SimpleNamespace(files=[], overrides=[], config=config)
    with disk.refusing() as answer:
        monkeypatch.setattr(schedule.time, "sleep", lambda seconds: answer())
        (point,) = schedule._train(entry, 1, Budget(), run_dir)
    assert disk.refused and (point.step, point.reward) == (3, 0.5)
