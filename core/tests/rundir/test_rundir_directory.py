"""A run's own folder, and the status files in it."""

import json
import os
import threading
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.rundir.directory import SUBFOLDERS, log_dir, make_run_dir
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status, StatusReport, read_status, replace_text


def config(tmp_path, **tables):
    given = {
        "model": {"name": "owner/My Model"},
        "max_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    envs = {"train": {"env": [{"id": "a"}, {"id": "b/c", "name": "Two"}]}}
    return RunConfig.model_validate({**given, "orchestrator": envs, **tables})


def test_a_run_directory_has_its_folders_and_the_resolved_config(tmp_path):
    asked = config(tmp_path, seed=3)
    run_dir = make_run_dir(asked)
    assert run_dir == tmp_path / "out" / "a-two--my-model--1"
    assert all((run_dir / folder).is_dir() for folder in SUBFOLDERS)
    assert (run_dir / "logs" / "latest").resolve() == log_dir(run_dir).resolve()
    assert RunConfig.model_validate_json((run_dir / "configs/run.json").read_bytes()) == asked


def test_a_second_run_gets_its_own_directory(tmp_path):
    names = [make_run_dir(config(tmp_path)).name for _ in range(3)]
    assert [name.rsplit("--", 1)[1] for name in names] == ["1", "2", "3"]


def test_concurrent_runs_get_distinct_directories(tmp_path):
    made, barrier = [], threading.Barrier(8)

    def start():
        barrier.wait()
        made.append(make_run_dir(config(tmp_path)))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


def test_a_name_that_is_taken_is_refused(tmp_path):
    named = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(named)
    (run_dir / "metrics.jsonl").write_text("first")
    with pytest.raises(ConfigError) as caught:
        make_run_dir(named)
    assert str(caught.value) == (
        f"run.name: {run_dir} exists already. Choose another run.name, leave it out to get a free "
        "one, or remove the folder."
    )
    assert (run_dir / "metrics.jsonl").read_text() == "first"


def test_a_launch_reads_back_and_holds_no_secret(tmp_path):
    run_dir = make_run_dir(config(tmp_path))
    launch = Launch(
        model_path="m", served_model_name="s", engine_urls=["http://127.0.0.1:1"],
        transport_type="zmq", transport_host="127.0.0.1", transport_ports=[2], wait_for_model=True,
    )  # fmt: skip
    launch.write(run_dir)
    assert Launch.read(run_dir) == launch
    keys = json.loads((run_dir / "configs" / "launch.json").read_text())
    assert not [name for name in keys if "key" in name or "secret" in name]


# -- status ---------------------------------------------------------------------------------


def test_a_status_reads_back(tmp_path):
    path = tmp_path / "trainer.json"
    assert read_status(path) is None
    Status(path).report("training", progress=0.25, waiting_for="batch 3", step=2, note="x")
    report = read_status(path)
    assert (report.state, report.progress, report.waiting_for) == ("training", 0.25, "batch 3")
    assert report.detail == {"step": 2, "note": "x"}
    assert report.pid == os.getpid() and report.time > 0


def test_a_new_report_replaces_the_old_one(tmp_path):
    status = Status(tmp_path / "s.json")
    status.report("a", progress=0.5, waiting_for="b", n=1)
    status.report("c")
    report = read_status(tmp_path / "s.json")
    assert (report.state, report.progress, report.waiting_for, report.detail) == (
        "c",
        None,
        None,
        {},
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.json"]


def test_a_status_that_cannot_be_written_leaves_the_last_one_and_does_not_fail(tmp_path):
    status = Status(tmp_path / "s.json")
    status.report("training")
    limits = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (10, limits[1]))
    try:
        status.report("waiting", waiting_for="disk")
        with pytest.raises(OSError, match="too large"):
            replace_text(tmp_path / "s.json", "a longer text")
    finally:
        setrlimit(RLIMIT_FSIZE, limits)
    assert read_status(tmp_path / "s.json").state == "training"


def test_text_is_replaced_by_a_rename_and_never_in_place(tmp_path):
    path = tmp_path / "s.json"
    replace_text(path, "old")
    with path.open() as reader:  # a concurrent reader keeps the old file
        replace_text(path, "new text")
        assert reader.read() == "old"
    assert path.read_text() == "new text"
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.json"]


def test_a_status_that_cannot_be_read_just_now_is_none(tmp_path, monkeypatch):
    def stale(self):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", stale)
    assert read_status(tmp_path / "s.json") is None


def test_a_status_without_a_path_writes_nothing():
    status = Status(None)
    status.report("a")
    assert status.last.state == "a"


@pytest.mark.parametrize("text", ["", "{", '{"unknown": 1}', "null"])
def test_a_file_that_is_no_status_is_none(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    assert read_status(path) is None


def test_a_concurrent_reader_never_sees_a_torn_report(tmp_path):
    path, done = tmp_path / "s.json", threading.Event()
    status = Status(path)
    status.report("x" * 20_000)
    torn = []

    def read():
        while not done.is_set():
            report = read_status(path)
            if report is None or len(set(report.state)) != 1 or len(report.state) != 20_000:
                torn.append(report)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        status.report("ab"[number % 2] * 20_000)
    done.set()
    reader.join()
    assert torn == []


def test_a_fresh_report_is_starting():
    assert StatusReport().state == "starting"


def test_a_real_run_claims_the_directory_of_a_dry_run_once(tmp_path):
    named = config(tmp_path, run={"name": "mine"})
    dry = make_run_dir(named, dry=True)
    assert sorted(each.name for each in dry.iterdir()) == [".dry-run", "configs"]
    assert make_run_dir(named, dry=True) == dry
    assert make_run_dir(named) == dry
    assert all((dry / folder).is_dir() for folder in SUBFOLDERS)
    with pytest.raises(ConfigError, match="exists already"):
        make_run_dir(named)


def test_dry_runs_use_up_no_numbers(tmp_path):
    names = [make_run_dir(config(tmp_path), dry=True).name for _ in range(2)]
    names.append(make_run_dir(config(tmp_path)).name)
    assert [name.rsplit("--", 1)[1] for name in names] == ["1", "1", "1"]
