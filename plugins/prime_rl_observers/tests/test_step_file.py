"""Old lines of ``trainer.jsonl`` become as short as those of ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prime_rl import PluginConfig
from prime_rl.rundir.status import Tail
from prime_rl.trainer.metrics import append_metrics, append_row
from prime_rl_app.recovery import last_trained
from prime_rl_app.resume import _cut
from prime_rl_observers.step_file import NEWEST, StepFile

METRICS = {"loss/mean": 1.0, "loss/p90": 2.0, "time/step": 3.0, "optim/lr": float("nan")}
MEANS = {"loss/mean": 1.0, "time/step": 3.0, "optim/lr": None}


def observer(run_dir: Path, interval: int) -> StepFile:
    (run_dir / "configs").mkdir(exist_ok=True)
    config = {"monitors": {"file": {"interval": interval}}}
    (run_dir / "configs" / "run.json").write_text(json.dumps(config))
    made: Any = StepFile(PluginConfig())
    made.started(None, run_dir)
    return made


def train(run_dir: Path, made: StepFile, first: int, last: int) -> None:
    for step in range(first, last + 1):
        append_metrics(run_dir / "trainer.jsonl", step, METRICS)
        made.step_done(step, METRICS)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "trainer.jsonl").read_text().splitlines()]


def test_old_lines_keep_the_means_and_every_tenth_all(tmp_path: Path) -> None:
    train(tmp_path, observer(tmp_path, 10), 1, 2 * NEWEST)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 2 * NEWEST + 1))
    whole = MEANS | {"loss/p90": 2.0}
    for row in found:
        kept = row["step"] % 10 == 0 or row["step"] > NEWEST
        assert row["metrics"] == (whole if kept else MEANS), row
    # After a resume: no line is lost or becomes another, and those that read the file count on.
    _cut(tmp_path / "trainer.jsonl", NEWEST + 50)
    train(tmp_path, observer(tmp_path, 10), NEWEST + 51, 4 * NEWEST + 50)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 4 * NEWEST + 51))
    assert found[NEWEST + 60]["metrics"] == MEANS  # step 161
    assert last_trained(tmp_path) == 4 * NEWEST + 50


def test_of_old_lines_of_experts_every_tenth_stays(tmp_path: Path) -> None:
    made = observer(tmp_path, 10)
    path = tmp_path / "expert_load.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    def count(first: int, last: int) -> None:
        for step in range(first, last + 1):
            append_row(path, {"step": step, "layers": [0], "choices": [[step, 2 * step]]})
            train(tmp_path, made, step, step)

    count(1, 2 * NEWEST)
    assert steps() == [*range(10, 101, 10), *range(101, 201)]
    count(2 * NEWEST + 1, 4 * NEWEST)
    assert steps() == [*range(10, 301, 10), *range(301, 401)]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 10,
        "layers": [0],
        "choices": [[10, 20]],
    }


def test_a_follower_sees_each_step_whole_before_it_is_shortened(tmp_path: Path) -> None:
    made, tail, seen = observer(tmp_path, 10), Tail(tmp_path / "trainer.jsonl"), set[int]()
    for step in range(1, 5 * NEWEST):
        train(tmp_path, made, step, step)
        for row in map(json.loads, tail.new_lines()):
            if row["step"] not in seen:
                assert "loss/p90" in row["metrics"]
            seen.add(row["step"])
    assert seen == set(range(1, 5 * NEWEST))
    assert any("loss/p90" not in row["metrics"] for row in rows(tmp_path))


@pytest.mark.parametrize("config", [None, "{", '{"monitors": {}}', '{"monitors": {"file": {}}}'])
def test_by_default_nothing_is_shortened(tmp_path: Path, config: str | None) -> None:
    made: Any = StepFile(PluginConfig())
    if config is not None:
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs" / "run.json").write_text(config)
    made.started(None, tmp_path)
    train(tmp_path, made, 1, 2 * NEWEST)
    assert all("loss/p90" in row["metrics"] for row in rows(tmp_path))


def test_a_process_that_another_attempt_has_replaced_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped after it had read the file, while a resume cut the file."""
    made, path, write = observer(tmp_path, 10), tmp_path / "trainer.jsonl", Path.write_bytes
    train(tmp_path, made, 1, 2 * NEWEST - 1)

    def stopped(file: Path, data: bytes) -> int:
        if file.name.startswith(".trainer.jsonl"):
            monkeypatch.undo()
            _cut(path, 7)
        return write(file, data)

    monkeypatch.setattr(Path, "write_bytes", stopped)
    train(tmp_path, made, 2 * NEWEST, 2 * NEWEST)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 8))
    assert [each.name for each in tmp_path.glob("*trainer*")] == ["trainer.jsonl"]


@pytest.mark.parametrize(
    "line",
    [b"[]\n", b"null\n", b"{}\n", b"[" * 9999 + b"\n", b"\xff\n", b'{"step": "7", "metrics": {}}\n',
     b'{"step": 7, "metrics": []}\n', b'{"step": 7}\n', b"\n"],
)  # fmt: skip
def test_a_damaged_line_stays_and_the_others_are_shortened(tmp_path: Path, line: bytes) -> None:
    made, path = observer(tmp_path, 10), tmp_path / "trainer.jsonl"
    path.write_bytes(line)
    train(tmp_path, made, 1, 2 * NEWEST)
    first, second, *_ = path.read_bytes().splitlines(keepends=True)
    assert first == line
    assert "loss/p90" not in json.loads(second)["metrics"]
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("config", ["[]", "null", "3", "[" * 9999, '{"monitors": []}',
                                    '{"monitors": {"file": {"interval": [2]}}}',
                                    '{"monitors": {"file": {"interval": 0}}}'])  # fmt: skip
def test_a_config_of_another_shape_shortens_nothing(tmp_path: Path, config: str) -> None:
    test_by_default_nothing_is_shortened(tmp_path, config)
