"""A run's own folder."""

import json
import threading

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.rundir.directory import SUBFOLDERS, log_dir, make_run_dir
from prime_rl.rundir.launch import Launch


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
        f"run.name: {run_dir} exists already. --resume goes on with its run. For a new run, choose "
        "another run.name, leave it out to get a free one, or remove the folder."
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
