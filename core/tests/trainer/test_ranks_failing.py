"""How a rank of the trainer reports that it fails. Real ranks fail in
``app/tests/test_agent_of_failing_ranks.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl import ConfigError
from prime_rl.plugins.status import read_status
from prime_rl.rundir.status import Status
from prime_rl.trainer import __main__ as trainer
from prime_rl.trainer.__main__ import GONE, report_failure
from prime_rl.trainer.rank import FAILED, FOLLOWED, Rank


def test_the_first_error_is_reported_and_a_lost_connection_is_not_mistaken_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status, rank = Status(tmp_path / "trainer.json"), Rank(0, 2)

    def reason() -> object:
        found = read_status(tmp_path / "trainer.json")
        return found and found.detail["error"]

    lost = RuntimeError("gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert report_failure(lost, status, rank) == FOLLOWED
    assert reason() == GONE
    status.report("training")
    assert report_failure(ConfigError("no such key"), status, rank) == FAILED
    assert report_failure(ValueError("a consequence"), status, Rank(1, 2, 1)) == FOLLOWED
    assert reason() == "no such key"
    assert not any(record.exc_info for record in caplog.records)
    status.report("training")
    assert report_failure(ValueError("ours to fix"), status, rank) == FAILED
    assert reason() == "ValueError: ours to fix"
    traceback, last = caplog.records[-2:]  # the user sees the end of the log
    assert traceback.exc_info and last.getMessage() == "ValueError: ours to fix"
    assert report_failure(lost, status, Rank()) == FAILED  # without other ranks


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_the_trainer_takes_one_run_directory(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.main(arguments) == 2
    assert "usage: python -m prime_rl.trainer RUN_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1])
def test_only_rank_0_shows_what_it_does_and_a_failed_rank_of_several_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left: list[int] = []
    seen: list[Path | None] = []

    def run(run_dir: Path, status: Status, rank: Rank) -> None:
        seen.append(status.path)
        raise ConfigError("no such key")

    for name in ("exit_with_parent", "exit_on_signal"):
        monkeypatch.setattr(trainer, name, lambda *more, **named: None)
    monkeypatch.setattr(trainer, "run", run)
    monkeypatch.setattr(trainer, "leave", left.append)
    for variable, value in {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert trainer.main([str(tmp_path)]) == FAILED
    path = tmp_path / "status" / "trainer.json"
    assert seen == [path if number == 0 else None]
    assert left == [FAILED]
    report = read_status(path)  # the first rank that fails writes it, whichever it is
    assert report is not None and report.detail["error"] == "no such key"
