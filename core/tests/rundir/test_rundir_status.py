"""Status files, text that is replaced, and files that grow."""

import json
import os
import threading
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest

from prime_rl.plugins.status import EngineFacts, Facts, StatusReport, read_status
from prime_rl.rundir.status import Status, Tail, process_name, replace_text


def test_a_status_reads_back(tmp_path):
    path = tmp_path / "trainer.json"
    assert read_status(path) is None
    Status(path).report("training", progress=0.25, waiting_for="batch 3", step=2, note="x")
    report = read_status(path)
    assert (report.state, report.progress, report.waiting_for) == ("training", 0.25, "batch 3")
    assert report.detail == {"step": 2, "note": "x"}
    assert report.pid == os.getpid() and report.time > 0


FACTS = Facts(
    waits_for="orchestrator",
    engines={"inference": EngineFacts(version=3), "http://a:1": EngineFacts(silence=2)},
    fault="plugin",
)


def test_the_facts_of_a_status_read_back_beside_its_texts(tmp_path):
    path = tmp_path / "engines.json"
    Status(path).report("waiting", facts=FACTS, inference="version 3")
    report = read_status(path)
    assert report.facts == FACTS and report.facts.newest_version == 3
    assert report.detail == {"inference": "version 3"}
    assert EngineFacts().version is Facts().newest_version is None


def test_an_older_reader_understands_a_status_with_facts(tmp_path):
    """It knew six fields, refused any other, and took numbers and texts as details."""
    path = tmp_path / "trainer.json"
    Status(path).report("waiting", waiting_for="orchestrator", facts=FACTS, step=2)
    table = json.loads(path.read_text())
    assert set(table) == {"state", "progress", "waiting_for", "detail", "pid", "time"}
    assert all(isinstance(value, float | int | str) for value in table["detail"].values())
    Status(path).report("training", step=2)
    assert json.loads(path.read_text())["detail"] == {"step": 2}  # without facts, as before


@pytest.mark.parametrize("facts", ["", "[]", "{", '{"waits_for": 3}', '{"engines": {"a": 1}}'])
def test_a_status_with_damaged_facts_counts_as_unreadable(tmp_path, facts):
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps({"state": "waiting", "detail": {"facts": facts}}))
    assert read_status(path) is None


def test_a_status_of_a_newer_version_is_read_without_what_is_unknown(tmp_path):
    path = tmp_path / "trainer.json"
    facts = '{"waits_for": "engines", "more": 1}'
    table = {"state": "a", "new": 1, "detail": {"facts": facts, "n": 2}}
    path.write_text(json.dumps(table))
    report = read_status(path)
    assert (report.state, report.detail, report.facts.waits_for) == ("a", {"n": 2}, "engines")


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
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.json"]
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


def test_complete_lines_are_returned_once_and_a_partial_line_later(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.new_lines() == []  # no file yet
    with path.open("a") as file:
        file.write("one\n\ntw")
        file.flush()
        assert tail.new_lines() == [b"one"]
        assert tail.new_lines() == []
        file.write("o\nthree\n")
        file.flush()
        assert tail.new_lines() == [b"two", b"three"]


def test_the_first_process_of_a_part_has_no_number():
    names = [process_name("inference", number) for number in range(3)]
    assert names == ["inference", "inference_1", "inference_2"]
