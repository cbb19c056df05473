"""The real wandb package, offline. The tests read its files."""

import json
import math
from types import SimpleNamespace

import pytest
from wandb_files import WandbRun

from prime_rl.testing import make_rollout
from prime_rl_wandb import WandbConfig, WandbMonitor, register_observers
from prime_rl_wandb.table import COLUMNS, conversation, credit_text, table_row

pytestmark = pytest.mark.slow  # wandb starts a service for each run


def started(folder, **settings):
    return WandbMonitor(WandbConfig(mode="offline", **settings), folder)


def row_of(rollout, reason=None):
    return dict(zip(COLUMNS, table_row(4, rollout, reason), strict=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One offline run with lines of both processes, out of order, and two tables."""
    folder = tmp_path_factory.mktemp("runs") / "my-run--1"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "run.json").write_text(json.dumps({"max_steps": 12, "seed": 3}))
    monitor = started(folder, project="p", group="g", tags=("one", "two"), table_rows=2)
    monitor.log(0, {"eval/held/all/reward/mean": 0.125})
    monitor.log(1, {"train/agg/all/reward/mean": 0.5, "time/step": 1.0, "nan": math.nan})
    monitor.log(2, {"train/agg/all/reward/mean": 0.75, "time/step": 2.0})
    monitor.log(1, {"loss/mean": 0.25, "time/trainer/step": 3.0})  # a line of the previous step
    rollouts = [make_rollout(1.0), make_rollout(0.0), make_rollout(0.5)]
    rollouts[0].assign_advantages([0.5, 0.5, -0.25])
    rollouts[1].assign_advantages(0.0)
    for step in (1, 11):
        monitor.log_rollouts(step, rollouts, [None, "post_batch_filters", None])
    monitor.close()
    return WandbRun(folder)


def test_trainer_orchestrator_and_evals_are_one_run_at_their_own_steps(written):
    lines = [{k: v for k, v in row.items() if not k.startswith("_")} for row in written.rows]
    assert [line for line in lines if "rollouts" not in line] == [
        {"step": 0, "eval/held/all/reward/mean": 0.125},
        {"step": 1, "train/agg/all/reward/mean": 0.5, "time/step": 1.0},
        {"step": 2, "train/agg/all/reward/mean": 0.75, "time/step": 2.0},
        {"step": 1, "loss/mean": 0.25, "time/trainer/step": 3.0},
    ]
    assert written.defined == {"step": "", "*": "step"}  # the x axis of every chart


def test_the_run_carries_name_tags_group_and_config(written):
    run = written.run
    assert (run.display_name, run.project, run.run_group) == ("my-run--1", "p", "g")
    assert list(run.tags) == ["one", "two"]
    assert (written.config["max_steps"], written.config["seed"]) == (12, 3)


def test_tables_contain_rollouts_with_their_credit(written):
    tables = written.tables()
    assert sorted(tables) == [1, 11]
    assert tables[1]["columns"] == list(COLUMNS)
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in tables[1]["data"])
    assert (first["step"], first["reward"], first["dropped_by"]) == (1, 1.0, None)
    assert first["credit"] == "+0.500 x2, -0.250 x1"
    assert first["advantage_mean"] == pytest.approx(0.25)
    assert (first["advantage_min"], first["advantage_max"]) == (-0.25, 0.5)
    assert (first["tokens"], first["trained_tokens"]) == (5, 3)
    assert second["dropped_by"] == "post_batch_filters"


def test_a_resumed_run_keeps_its_id(tmp_path):
    first, second = started(tmp_path), started(tmp_path)
    assert first._run_id() == second._run_id() != ""


def test_tables_are_logged_at_the_interval_from_the_first_step(tmp_path):
    monitor = started(tmp_path, table_interval=3)
    assert [step for step in range(1, 11) if monitor.wants_rollouts(step)] == [1, 4, 7, 10]
    none = started(tmp_path, table_interval=0)
    assert not any(none.wants_rollouts(step) for step in range(1, 11))


def test_a_failed_start_raises_at_every_line_and_is_not_retried(tmp_path, monkeypatch):
    monitor, asked = started(tmp_path), []

    def fail(**arguments):
        asked.append(arguments["mode"])
        raise OSError("no network")

    monkeypatch.setattr("wandb.init", fail)
    with pytest.raises(OSError, match="no network"):
        monitor.log(1, {})
    with pytest.raises(RuntimeError, match="W&B cannot be reached: no network"):
        monitor.log(2, {})
    assert asked == ["offline"]
    monitor.close()


def test_disabled_writes_nothing(tmp_path):
    monitor = WandbMonitor(WandbConfig(mode="disabled"), tmp_path)
    monitor.log(1, {"a": 1.0})
    monitor.close()
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_a_rollout_without_credit_or_samples_has_empty_cells():
    row = row_of(make_rollout(0.5), "sampler")
    assert (row["advantage_mean"], row["credit"], row["conversation"]) == (None, "", "")
    assert row["dropped_by"] == "sampler"


def test_long_texts_are_truncated():
    assert len(credit_text([float(i) for i in range(1000)])) == 400
    rollout = make_rollout()
    rollout.task = {"prompt": "x" * 10_000}
    assert len(row_of(rollout)["prompt"]) == 4000


def test_the_conversation_has_a_line_per_message():
    rollout = make_rollout()
    said = [
        SimpleNamespace(role="user", content="2 + 2?"),
        SimpleNamespace(role="tool", content=None),
    ]
    rollout.trace = SimpleNamespace(messages=said)
    assert conversation(rollout) == "[user] 2 + 2?\n[tool] "


def test_it_registers_the_monitor():
    assert register_observers() == [WandbMonitor]
