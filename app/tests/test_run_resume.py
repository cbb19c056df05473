"""``--resume``: which checkpoint is chosen, what is said of changes, what a run forgets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from disks import SharedDisk
from typer.testing import CliRunner

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.errors import NoCheckpoint, RunHeld
from prime_rl.registry.manager import installed_versions
from prime_rl.rundir.checkpoints import Checkpoint, complete, finished, unfinished, whole_steps
from prime_rl.rundir.control import supervised
from prime_rl.rundir.directory import held, log_dir, make_run_dir, runs_of
from prime_rl_app.cli.app import app
from prime_rl_app.cli.run import split_resume
from prime_rl_app.config import build_config
from prime_rl_app.resolve import Resolved
from prime_rl_app.resume import ResumePlan, begin, config_drift, newest, rewind, version_drift
from prime_rl_app.run_states import find_run


def config(parent: Path, **changes: Any) -> RunConfig:
    table = {
        "model": {"name": "tiny-reverse"},
        "max_steps": 10,
        "output_dir": str(parent),
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    }
    return build_config(table | changes)


def checkpoint(run_dir: Path, step: int, asked: RunConfig) -> Checkpoint:
    target = unfinished(run_dir, step)
    for part in (target.orchestrator, target.trainer, target.weights):
        part.mkdir(parents=True)
    (target.weights / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (target.weights / "model.safetensors").touch()
    progress = {"config": asked.model_dump(mode="json"), "plugins": installed_versions()}
    target.progress.write_text(json.dumps(progress))
    return complete(run_dir, step)


def plan(asked: RunConfig, what: str) -> ResumePlan:
    found = Resolved(asked, what).earlier_run
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("arguments", "left", "what"),
    [
        (["a.toml", "--resume"], ["a.toml"], "latest"),
        (["a.toml", "--resume", "latest", "--seed", "1"], ["a.toml", "--seed", "1"], "latest"),
        (["a.toml", "--resume", "40"], ["a.toml"], "40"),
        (["a.toml", "--resume.step", "40"], ["a.toml"], "40"),
        (["a.toml", "--resume=runs/x/checkpoints/step_4"], ["a.toml"], "runs/x/checkpoints/step_4"),
        (["--resume", "a.toml", "--seed", "1"], ["a.toml", "--seed", "1"], "latest"),
        (["a.toml", "--resume", "--seed", "1"], ["a.toml", "--seed", "1"], "latest"),
        (["a.toml", "--seed", "1"], ["a.toml", "--seed", "1"], None),
    ],
)
def test_resume_takes_a_value_or_none(
    arguments: list[str], left: list[str], what: str | None
) -> None:
    assert split_resume(arguments) == (left, what)


def test_latest_is_the_newest_whole_checkpoint_of_the_named_run(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4):
        checkpoint(run_dir, step, asked)
    unfinished(run_dir, 6).directory.mkdir()
    found = plan(asked, "latest")
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.run_dir) == (4, run_dir)
    assert found.notes == [f"resuming from step 4 of {run_dir / 'checkpoints' / 'step_4'}"]
    assert plan(asked, "2").checkpoint.step == 2


def test_a_damaged_checkpoint_is_passed_over_by_latest_and_refused_by_its_step(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4):
        checkpoint(run_dir, step, asked)
    weights = finished(run_dir, 4).weights / "model.safetensors"
    weights.write_bytes(b"\1")
    found = plan(asked, "latest")
    assert found.checkpoint.step == 2
    assert found.notes[0].startswith(f"--resume: {weights} is damaged")
    for what in ("4", str(finished(run_dir, 4).directory)):
        with pytest.raises(ConfigError, match=rf"{weights} is damaged"):
            plan(asked, what)
    finished(run_dir, 2).progress.unlink()
    with pytest.raises(ConfigError, match=r"(?s)safetensors is damaged.*progress.json is mis"):
        plan(asked, "latest")


def test_every_damage_of_a_checkpoint_or_of_the_run_ends_in_one_line_that_names_a_file(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 9}\n')
    (run_dir / "status" / "trainer.json").write_text("{}")
    saved = checkpoint(run_dir, 4, asked)
    rest = ("metrics.jsonl", "status/trainer.json", "configs/run.json", "configs/launch.json")
    files = [run_dir / name for name in rest]
    files += [path for path in saved.directory.rglob("*") if path.is_file()]
    for path in files:
        before = path.read_bytes() if path.exists() else b""
        for content in (None, b"", b"[]", b"\xff\n", b'{"step": "x"}\n', b"[" * 100_000):
            path.unlink(missing_ok=True)
            path.mkdir() if content is None else path.write_bytes(content)
            try:
                with begin(asked, plan(asked, "latest")):
                    pass
            except ConfigError as error:
                assert path.name in str(error), error
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(before)


def test_a_checkpoint_that_the_disk_refuses_to_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that took it for damaged would go back to step 2, and abandon it."""
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4):
        checkpoint(run_dir, step, asked)
    for refused in ("", "step_4", "step_4/weights", "step_4/orchestrator/progress.json"):
        with monkeypatch.context() as patches:
            disk = SharedDisk(patches, run_dir / "checkpoints" / refused)
            with disk.refusing() as answer:
                patches.setattr("time.sleep", lambda seconds, answer=answer: answer())
                found, damaged = newest(run_dir)
        assert disk.refused and damaged == []
        assert found is not None and found.step == 4


def test_a_checkpoint_that_the_disk_never_reads_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4):
        checkpoint(run_dir, step, asked)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    disk = SharedDisk(monkeypatch, finished(run_dir, 4).weights)
    with disk.refusing():
        found, (damage,) = newest(run_dir)
    assert found is not None and found.step == 2
    assert "step_4/STABLE cannot be checked: [Errno 116] Stale file handle" in damage
    assert pauses == [1.0, 5.0, 25.0]


def test_a_run_that_cannot_be_read_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(run_dir := make_run_dir(asked), 4, asked)
    chosen = plan(asked, "latest")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    disk = SharedDisk(monkeypatch, run_dir / "checkpoints")
    folder = str(finished(run_dir, 4).directory)
    with disk.refusing():
        for what in ("latest", "auto", "4", folder):
            with pytest.raises(ConfigError, match=r"cannot be read: .*mine/checkpoints"):
                plan(asked, what)
        with pytest.raises(ConfigError, match="mine/checkpoints"), begin(asked, chosen):
            pass


def test_runs_before_the_one_that_continues_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of other users."""
    asked = config(tmp_path)
    first, second = make_run_dir(asked), make_run_dir(asked)
    checkpoint(second, 4, asked)
    disk = SharedDisk(monkeypatch, first / "checkpoints")
    with disk.refusing():
        assert plan(asked, "latest").run_dir == second


def test_without_a_name_the_newest_run_that_has_one_is_taken(tmp_path: Path) -> None:
    asked = config(tmp_path)
    runs = [make_run_dir(asked) for _ in range(11)]
    checkpoint(runs[1], 3, asked)
    checkpoint(runs[9], 2, asked)
    assert runs_of(asked) == runs[::-1]  # 11 before 9: by number, not by text
    assert plan(asked, "latest").run_dir == runs[9]
    assert plan(asked, "3").run_dir == runs[1]


def test_where_there_is_none_it_says_what_there_is(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    with pytest.raises(ConfigError, match=r"--resume latest: no run has a whole checkpoint: no su"):
        plan(asked, "latest")
    run_dir = make_run_dir(asked)
    checkpoint(run_dir, 4, asked)
    with pytest.raises(ConfigError, match=r"of step 5: .*mine has steps \[4\].*\[ckpt\] interval"):
        plan(asked, "5")
    with pytest.raises(ConfigError, match=r"expected 'latest', a step, or the folder of a whole"):
        plan(asked, str(tmp_path))


def test_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(run_dir := make_run_dir(asked), 10, asked)
    with pytest.raises(ZeroDivisionError), supervised(run_dir):
        raise ZeroDivisionError
    for what in ("latest", "auto"):  # it failed after its last step: the rest is made up for
        found = plan(asked, what)
        assert (found.checkpoint and found.checkpoint.step, found.is_over) == (10, False)
    with supervised(run_dir):
        pass
    assert plan(asked, "auto").is_over
    with pytest.raises(ConfigError, match=r"of step 10, max_steps is 10: nothing is left to train"):
        plan(asked, "latest")


def test_auto_leaves_a_run_that_is_done_as_it_is_without_a_checkpoint_of_its_last_step(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path, run={"name": "mine"}, ckpt={"enabled": False})
    longer = config(tmp_path, run={"name": "mine"}, max_steps=20)
    run_dir = make_run_dir(asked)
    (run_dir / "trainer.jsonl").write_text('{"step": 9}\n{"step": 10}\n')
    with pytest.raises(ZeroDivisionError), supervised(run_dir):
        raise ZeroDivisionError
    assert not plan(asked, "auto").is_over
    with supervised(run_dir):
        pass
    with pytest.raises(ConfigError, match="done after step 10, max_steps is 20, and it has no"):
        plan(longer, "auto")  # from the start, it would lose what is there
    for _ in range(2):
        found = plan(asked, "auto")
        assert (found.is_over, found.run_dir) == (True, run_dir)
        assert "is done after step 10, max_steps is 10: nothing is left" in found.notes[0]
        if found.checkpoint is None:
            checkpoint(run_dir, 8, asked)  # that of step 10 could not be written
    assert not plan(longer, "auto").is_over


def test_auto_does_not_go_on_with_a_run_that_stop_has_ended(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(run_dir := make_run_dir(asked), 4, asked)
    (run_dir / "STOP").write_text("early stop: no new best in 3 evaluations")
    assert not plan(asked, "auto").is_over  # it was killed before it was done
    with supervised(run_dir):
        pass
    found = plan(asked, "auto")
    assert found.is_over and "is done: early stop: no new best in 3" in found.notes[0]
    assert not plan(asked, "latest").is_over
    (run_dir / "STOP").write_text("")  # of a user, too late
    assert not plan(asked, "auto").is_over


def test_a_run_that_another_process_ran_meanwhile_is_not_resumed_from_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    with begin(asked, plan(asked, "auto")) as (run_dir, _), supervised(run_dir):
        checkpoint(run_dir, 4, asked)
        chosen = plan(asked, "latest")
        checkpoint(run_dir, 6, asked)
    with pytest.raises(RunHeld, match="until a moment ago"), begin(asked, chosen):
        pass
    assert whole_steps(run_dir) == [4, 6]
    with begin(asked, plan(asked, "latest")) as (_, found):
        assert found is not None and found.step == 6


def test_a_resume_that_fails_before_it_has_written_its_config_leaves_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(run_dir := make_run_dir(asked), 4, asked)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prime_rl_app.resume.rewind", fail)
    with pytest.raises(ConfigError, match="cannot make"), begin(asked, plan(asked, "latest")):
        pass
    assert find_run("mine", tmp_path) == run_dir


def test_a_rewind_leaves_nothing_behind_whatever_look_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``glob`` and ``exists`` of newer Pythons take what cannot be seen for absent. A version of
    the weights that is left would be loaded into the engines."""
    glob = Path.glob
    exists = Path.exists

    def newer_glob(path: Path, pattern: str) -> Any:
        try:
            return iter([*glob(path, pattern)])
        except OSError:
            return iter(())

    def newer_exists(path: Path) -> bool:
        try:
            return exists(path)
        except OSError:
            return False

    asked = config(tmp_path, run={"name": "mine"})
    ended = []
    for number in range(200):
        run_dir = tmp_path / f"run_{number}"
        checkpoint(run_dir, 2, asked)
        checkpoint(run_dir, 4, asked)
        unfinished(run_dir, 6).directory.mkdir()
        for name in ("metrics.jsonl", "trainer.jsonl"):
            (run_dir / name).write_text('{"step": 2}\n{"step": 3}\n')
        for folder in ("broadcasts", "rollouts_wire", "averages"):
            (run_dir / folder / "step_3").mkdir(parents=True)
        (run_dir / "status").mkdir()
        (run_dir / "status" / "trainer.json").write_text("{}")

        with monkeypatch.context() as patches:
            patches.setattr(Path, "glob", newer_glob)
            patches.setattr(Path, "exists", newer_exists)
            disk = SharedDisk(patches, run_dir)
            try:
                with disk.refusing_one(number):
                    rewind(run_dir, 2)
            except OSError:
                continue
            if not disk.refused:
                break
        ended.append(number)
        assert sorted(os.listdir(run_dir / "checkpoints")) == ["abandoned_1", "step_2"]
        for name in ("metrics.jsonl", "trainer.jsonl"):
            assert (run_dir / name).read_text() == '{"step": 2}\n'
        left = [path for path in run_dir.rglob("*") if path.name in ("step_3", "trainer.json")]
        assert left == []

    assert number < 199


def test_a_reference_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    made = checkpoint(make_run_dir(asked), 2, asked)
    made.write_reference(1)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as newer Pythons say then
    assert made.reference == 1
    disk = SharedDisk(monkeypatch, made.trainer)
    with disk.refusing(), pytest.raises(ConfigError, match=r"reference\.json cannot be read"):
        print(made.reference)
    (made.trainer / "reference.json").unlink()
    assert made.reference == 0


def test_later_checkpoints_find_a_name_beside_what_is_left_of_earlier_ones(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(run_dir := make_run_dir(asked), 4, asked)
    (run_dir / "checkpoints" / "abandoned_2").mkdir()  # the first one was deleted
    rewind(run_dir, 2)
    assert (run_dir / "checkpoints" / "abandoned_3" / "step_4").is_dir()


def test_auto_starts_a_run_without_a_checkpoint_again_in_place(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    fresh = plan(asked, "auto")
    assert (fresh.checkpoint, fresh.run_dir) == (None, None)
    with begin(asked, fresh) as (run_dir, _):
        (run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
        (run_dir / "broadcasts" / "step_1").mkdir()
        with pytest.raises(RunHeld) as caught, begin(asked, plan(asked, "auto")):
            pass
        assert caught.value.exit_code == 3
        for what in ("latest", "7"):  # not that it has no checkpoint
            with pytest.raises(RunHeld, match="another process runs this run already"):
                plan(asked, what)
    with begin(asked, plan(asked, "auto")) as (again, found):
        assert (again, found, log_dir(run_dir).name) == (run_dir, None, "attempt_2")
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert os.listdir(run_dir / "broadcasts") == []
    with pytest.raises(NoCheckpoint) as missing:
        plan(asked, "latest")
    assert missing.value.exit_code == 4


def test_changed_keys_and_plugins_are_reported(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(make_run_dir(asked), 4, asked)
    later = config(tmp_path, run={"name": "mine"}, seq_len=64, max_steps=20)
    assert plan(later, "latest").notes[1:] == [
        "changed since: max_steps: 10 then, 20 now",
        "changed since: seq_len: 2048 then, 64 now",
    ]


def test_drift_is_told_key_by_key() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "envs": [{"id": "x"}], "gone": True}
    now = {"a": {"b": 2, "c": [1, 2]}, "envs": [{"id": "x"}, {"id": "y"}]}
    assert config_drift(before, now) == [
        "a.b: 1 then, 2 now",
        'envs.1.id: absent then, "y" now',
        "gone: true then, absent now",
    ]
    assert version_drift({"core": "1", "old": "1"}, {"core": "2", "new": "3"}) == [
        "plugin core: 1 then, 2 now",
        "plugin new: not installed then, 3 now",
        "plugin old: 1 then, not installed now",
    ]


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {"type": "muon"}, "has the state of adamw, and [trainer.optim] says muon. Set it"),
        ({}, {"type": "sgd"}, "has the state of adamw, and [trainer.optim] says sgd. Set it"),
        ({"type": "sgd"}, {"type": "sgd", "momentum": 0.9}, "of sgd, and [trainer.optim] says sgd"),
        ({"type": "sgd", "momentum": 0.9}, {"type": "sgd"}, None),
        ({"type": "muon"}, {"type": "sign_sgd"}, None),
        ({"lr": 1e-3}, {"lr": 1e-4, "beta2": 0.95}, None),
    ],
)
def test_an_optimizer_whose_state_is_not_there_is_refused(
    then: dict[str, Any], now: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    asked = config(tmp_path, run={"name": "mine"}, trainer={"optim": then})
    saved = checkpoint(make_run_dir(asked), 4, asked)
    later = config(tmp_path, run={"name": "mine"}, trainer={"optim": now})
    if said is None:
        assert plan(later, "latest").checkpoint.step == 4
        return
    with pytest.raises(ConfigError) as caught:
        plan(later, "latest")
    assert said in str(caught.value) and f'model.name = "{saved.weights}"' in str(caught.value)


def test_another_model_is_refused_unless_it_has_the_same_shape(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    checkpoint(make_run_dir(asked), 4, asked)
    folder = tmp_path / "model"
    folder.mkdir()
    other = config(tmp_path, run={"name": "mine"}, model={"name": str(folder)})
    with pytest.raises(ConfigError, match=r"\[model\] has changed \(name: .*Set it back"):
        plan(other, "latest")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 32, "use_cache": False}))
    with pytest.raises(ConfigError, match=r"cannot be those of .*hidden_size: 64 then, 32 now"):
        plan(other, "latest")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "use_cache": False}))
    assert any("model.name" in note for note in plan(other, "latest").notes)


def test_a_run_that_goes_on_has_a_new_attempt_and_forgets_what_came_after(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4, 6):
        checkpoint(run_dir, step, asked)
    lines = "".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3, 4, 5, 4, 6)) + '{"step": 3'
    files = ("metrics.jsonl", "trainer.jsonl", "expert_load.jsonl")
    for name in files:
        (run_dir / name).write_text(lines)
    for n in (3, 4, 5):
        (run_dir / "broadcasts" / f"step_{n}").mkdir()
        (run_dir / "rollouts" / f"step_{n}.msgpack").touch()
    (run_dir / "broadcasts" / ".step_4").mkdir()
    (run_dir / "status" / "trainer.json").touch()
    unfinished(run_dir, 8).directory.mkdir()

    found = plan(asked, "4")
    with begin(asked, found) as (again, resumed):
        assert (again, resumed.step) == (run_dir, 4)
        with pytest.raises(ConfigError, match="another process runs this run"), held(run_dir):
            pass
    for name in files:
        kept = [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()]
        assert kept == [1, 2, 3, 4, 4]
    assert sorted(os.listdir(run_dir / "broadcasts")) == ["step_3", "step_4"]
    assert sorted(os.listdir(run_dir / "rollouts")) == ["step_3.msgpack", "step_4.msgpack"]
    assert os.listdir(run_dir / "status") == []
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["abandoned_1", "step_2", "step_4"]
    assert os.listdir(run_dir / "checkpoints" / "abandoned_1") == ["step_6"]
    assert sorted(os.listdir(run_dir / "logs")) == ["attempt_1", "attempt_2", "latest"]
    assert (run_dir / "logs" / "latest").resolve() == log_dir(run_dir).resolve()
    assert log_dir(run_dir).name == "attempt_2"
    assert sorted(os.listdir(run_dir / "configs")) == ["run.attempt_1.json", "run.json"]


def test_another_runs_checkpoint_begins_a_new_run_and_leaves_the_old_alone(tmp_path: Path) -> None:
    old = config(tmp_path, run={"name": "old"})
    saved = checkpoint(make_run_dir(old), 4, old)
    new = config(tmp_path, run={"name": "new"})
    found = plan(new, str(saved.directory))
    assert found.run_dir is None and "in a new run (a copy of run old)" in found.notes[0]
    with begin(new, found) as (run_dir, copied):
        pass
    assert run_dir.name == "new" and copied.run_dir == run_dir and copied.is_whole
    assert whole_steps(tmp_path / "old") == [4] and finished(run_dir, 4).weights.is_dir()
    same = plan(old, str(saved.directory))
    assert same.run_dir == (tmp_path / "old").resolve()


def test_a_disk_that_refuses_a_rewind_says_so_and_latest_is_then_where_it_was_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    for step in (2, 4):
        checkpoint(run_dir, step, asked)
    (run_dir / "metrics.jsonl").write_text('{"step": 3}\n')

    def full(path: Path, text: str, encoding: str, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    said = r"--resume: cannot make .*mine ready: .*No space left"
    with pytest.raises(ConfigError, match=said), begin(asked, plan(asked, "2")):
        pytest.fail("the run must not go on")
    assert whole_steps(run_dir) == [2]


def test_rewinding_twice_is_the_same_as_once(tmp_path: Path) -> None:
    asked = config(tmp_path, run={"name": "mine"})
    run_dir = make_run_dir(asked)
    checkpoint(run_dir, 2, asked)
    for _ in range(2):
        rewind(run_dir, 2)
    assert whole_steps(run_dir) == [2]


def test_two_attempts_at_one_run_are_refused(tmp_path: Path) -> None:
    with held(tmp_path):  # noqa: SIM117 - the second one must fail while the first goes on
        with pytest.raises(ConfigError, match="another process runs this run"), held(tmp_path):
            pass
    with held(tmp_path):
        pass


def test_the_command_line_says_what_it_would_resume(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        'max_steps = 9\n[model]\nname = "tiny-reverse"\n[orchestrator.renderer]\nname = "qwen3"\n'
        '[[orchestrator.train.env]]\nid = "reverse-text"\n[run]\nname = "mine"\n'
    )
    command = ["run", str(toml), "--output_dir", str(tmp_path), "--dry-run", "--quick"]
    assert CliRunner().invoke(app, command).exit_code == 0
    asked = RunConfig.model_validate_json((tmp_path / "mine/configs/run.json").read_bytes())
    checkpoint(tmp_path / "mine", 4, asked)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert "resuming from step 4 of" in done.output and "changed since" not in done.output
    assert sorted(tmp_path.rglob("*")) == before
