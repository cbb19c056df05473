"""Saved rollouts scored again: the same algorithm ships the same bytes, another one is compared."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from report_runs import GROUP, config_of, make_run, offering
from typer.testing import CliRunner

from prime_rl import hookimpl
from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.config.run import RunConfig
from prime_rl.config.trainer import LossTable
from prime_rl.errors import ConfigError, RunError
from prime_rl.testing import CodePoints, FakeReference
from prime_rl_app.cli.app import app
from prime_rl_app.saved_rollouts import read_step, step_files, write_rollouts
from prime_rl_tools.replay import score
from prime_rl_tools.replay.compare import change_of, credit, most_changed
from prime_rl_tools.replay.host import NoText, NotRecorded, RecordedReference, ReplayHost
from prime_rl_tools.replay.score import algorithms_of, read_run_config, read_steps, replay

ALL = ["centred", "counted", "taught", "hinted", "observing", "whitened", "asking"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(score, "load_plugins", lambda disabled=(): offering())


def replayed(run_dir, algo=None, until=None):
    config = read_run_config(run_dir)
    algorithms = {"words": AlgoConfig(type=algo)} if algo else algorithms_of(config)
    found = asyncio.run(replay(config, read_steps(run_dir, until), algorithms))
    return found, [change_of(config, found, step) for step in found.steps]


def command(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


# -- the same algorithm --------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALL)
def test_the_same_algorithm_reproduces_every_frame_byte_for_byte(tmp_path, algo):
    make_run(tmp_path / "run", algo)
    _, changes = replayed(tmp_path / "run")
    assert [change.step for change in changes] == [1, 2, 3]
    assert all(change.frames_equal is True and change.num_changed == 0 for change in changes)
    assert any(change.num_rollouts > change.num_kept for change in changes)


def test_the_minibatches_of_a_batch_are_reproduced(tmp_path):
    make_run(tmp_path / "run", minibatches=2)
    _, changes = replayed(tmp_path / "run")
    assert all(change.frames_equal is True for change in changes)


@pytest.mark.parametrize("until", [1, 2, 3])
def test_a_step_is_replayed_from_the_files_up_to_it(tmp_path, until):
    """Order matters to ``counted``: its first steps are scored too, siblings that wait included."""
    make_run(tmp_path / "run", "counted")
    _, changes = replayed(tmp_path / "run", until=until)
    assert [change.step for change in changes] == list(range(1, until + 1))
    assert all(change.frames_equal for change in changes)


def test_the_test_runs_have_groups_across_batches_and_out_of_order(tmp_path):
    make_run(tmp_path / "run", "counted")
    steps = read_steps(tmp_path / "run")
    assert any(step.waiting for step in steps)
    scored = sorted((s.rollout.place, s.rollout.group_id) for step in steps for s in step.rollouts)
    groups = [group for _, group in scored]
    assert groups != sorted(groups)


def test_an_algorithms_loss_has_the_settings_of_the_run(tmp_path):
    table = LossTable.model_validate({"import_path": "report_runs:own_loss"})
    make_run(tmp_path / "run", losses={"custom": table})
    _, changes = replayed(tmp_path / "run", "named")
    assert all(change.num_changed == change.num_rollouts for change in changes)  # custom_weights


def test_a_changed_reward_changes_its_frame(tmp_path):
    make_run(tmp_path / "run", "centred")
    path = step_files(tmp_path / "run")[2]
    stored = read_step(path)
    kept = next(s for s in stored.rollouts if s.dropped_by is None)
    kept.rollout.reward += 0.01
    write_rollouts(
        path, 2, [s.rollout for s in stored.rollouts],
        {id(s.rollout): s.dropped_by for s in stored.rollouts if s.dropped_by},
        waiting=[s.rollout for s in stored.waiting], frames=stored.frames,
    )  # fmt: skip
    _, changes = replayed(tmp_path / "run")
    assert changes[1].frames_equal is False and changes[1].num_changed > 0
    result = command(tmp_path / "run")
    assert result.exit_code == 1 and "frames differ" in result.output


class Shaping:
    """Charges for length, once as a rollout comes and once in its group."""

    @hookimpl(wrapper=True)
    def score_rollout(self, rollout):
        rollout.reward -= 0.01 * rollout.num_tokens
        rollout.metrics["charged"] = rollout.metrics.get("charged", 0.0) + 1.0
        yield

    @hookimpl(wrapper=True)
    def score_group(self, group):
        for rollout in group:
            rollout.reward *= 0.5
        yield


def test_a_plugins_change_of_a_reward_is_applied_once(tmp_path, monkeypatch):
    shared = offering()
    shared.register(Shaping(), "shaping")
    monkeypatch.setattr(score, "load_plugins", lambda disabled=(): shared)
    make_run(tmp_path / "run", "centred", shared=shared)
    found, changes = replayed(tmp_path / "run")
    assert all(change.frames_equal is True and change.num_changed == 0 for change in changes)
    for pair in found.scored.values():
        stored, again = pair.stored.rollout, pair.again
        cost = 0.01 * stored.num_tokens
        assert again.reward == stored.reward == (stored.given["reward"] - cost) * 0.5
        assert again.metrics == stored.metrics == {"charged": 1.0}
        assert stored.given["metrics"] == {}


def test_an_unchanged_reward_is_saved_once(tmp_path):
    make_run(tmp_path / "run", "centred")
    found, _ = replayed(tmp_path / "run")
    assert all(pair.stored.rollout.given is None for pair in found.scored.values())


def test_reference_logprobs_come_from_the_file(tmp_path):
    make_run(tmp_path / "run", "taught")
    found, changes = replayed(tmp_path / "run")
    assert sum(change.num_from_file for change in changes) == 0
    for step in found.steps:
        for stored in step.rollouts:
            before, after = stored.rollout.samples[0], found.of(stored).again.samples[0]
            np.testing.assert_array_equal(after.ref_logprobs, before.ref_logprobs)
            assert before.ref_logprobs.any() and after.ref_logprobs is not before.ref_logprobs


def test_rollouts_that_need_a_model_keep_their_saved_streams_and_are_counted(tmp_path):
    make_run(tmp_path / "run", "hinted")
    _, changes = replayed(tmp_path / "run")
    assert all(change.num_from_file == change.num_rollouts for change in changes)
    assert all(change.frames_equal for change in changes)
    assert "keep their saved streams" in command(tmp_path / "run").output


def test_a_batch_whose_credit_needs_a_model_keeps_its_saved_streams_as_a_whole(tmp_path):
    make_run(tmp_path / "run", "asking")
    found, changes = replayed(tmp_path / "run")
    kept = [found.of(s) for step in found.steps for s in step.rollouts if s.dropped_by is None]
    assert kept and all(pair.from_file for pair in kept)
    assert [change.num_from_file for change in changes] == [change.num_kept for change in changes]
    with pytest.raises(NotRecorded):
        make_run(tmp_path / "other", "counted")
        replayed(tmp_path / "other", "asking")


def test_another_algorithm_compares_the_rollouts_of_each_batch(tmp_path):
    make_run(tmp_path / "run", "centred")
    found, changes = replayed(tmp_path / "run", "whitened")
    for step in found.steps:
        again = [found.of(s).again for s in step.rollouts if s.dropped_by is None]
        assert sum(float(rollout.advantages[0]) for rollout in again) == pytest.approx(0, abs=1e-4)
    assert all(change.num_changed for change in changes)


def test_a_group_with_an_unsaved_sibling_keeps_its_streams(tmp_path):
    """As after a crash: who waited in a checkpoint is in no file."""
    make_run(tmp_path / "run", "centred")
    path = step_files(tmp_path / "run")[3]
    stored = read_step(path)
    assert stored.waiting
    dropped = {id(s.rollout): s.dropped_by for s in stored.rollouts if s.dropped_by}
    rollouts = [each.rollout for each in stored.rollouts]
    write_rollouts(path, 3, rollouts, dropped, frames=stored.frames)
    _, changes = replayed(tmp_path / "run")
    assert [change.num_from_file for change in changes][:2] == [0, 0]
    assert changes[2].num_from_file > 0 and changes[2].frames_equal is True


# -- another one ---------------------------------------------------------------------------------


def test_another_algorithm_is_compared_rollout_by_rollout(tmp_path):
    make_run(tmp_path / "run", "centred")
    found, changes = replayed(tmp_path / "run", "counted")
    first = min(found.scored)
    again = [found.scored[place].again for place in sorted(found.scored)]
    assert [float(credit(rollout)[0]) for rollout in again] == list(range(len(again)))
    assert first[1:] == (0, 0, GROUP) and changes[0].zero_after == 1
    assert all(change.frames_equal is False for change in changes)
    assert changes[-1].mean_abs_after > changes[-1].mean_abs_before
    top = most_changed(list(found.scored.values()), 2)
    moves = [abs(float(credit(p.again)[0] - credit(p.stored.rollout)[0])) for p in top]
    assert len(top) == 2 and moves[0] >= moves[1] > len(again) - 3


def test_streams_of_the_first_algorithm_are_removed(tmp_path):
    make_run(tmp_path / "run", "observing")
    found, _ = replayed(tmp_path / "run", "centred")
    for pair in found.scored.values():
        assert pair.stored.rollout.samples[0].ce_weights is not None
        assert pair.again.samples[0].ce_weights is None


def test_an_algorithm_that_needs_a_model_is_refused_for_rollouts_of_another(tmp_path):
    make_run(tmp_path / "run", "centred")
    with pytest.raises(NotRecorded, match="choose an algorithm that needs no model"):
        replayed(tmp_path / "run", "taught")


# -- the command ---------------------------------------------------------------------------------


def test_the_command_prints_changes_as_a_table_and_as_json(tmp_path):
    make_run(tmp_path / "run", "centred")
    result = command(tmp_path / "run")
    assert result.exit_code == 0 and result.output.count("identical") == 3
    result = command(tmp_path / "run", "--algo", "counted", "--step", "2")
    assert result.exit_code == 0, result.output
    assert "words: centred, now counted" in result.output and "Credit moved" in result.output
    (change,) = json.loads(command(tmp_path / "run", "--step", "3", "--json").output)
    assert change["step"] == 3 and change["frames_equal"] is True and change["num_kept"] == 6


def test_an_env_without_a_saved_rollout_changes_nothing(tmp_path):
    """Such as one of many, or one whose rollouts all fail."""
    make_run(tmp_path / "run", "centred")
    path = tmp_path / "run/configs/run.json"
    config = json.loads(path.read_text())
    (words,) = config["orchestrator"]["train"]["env"]
    config["orchestrator"]["train"]["env"].append(words | {"name": "silent"})
    path.write_text(json.dumps(config))
    result = command(tmp_path / "run")
    assert result.exit_code == 0, result.exception
    assert result.output.count("identical") == 3


def test_a_config_names_the_algorithm_of_each_env(tmp_path):
    make_run(tmp_path / "run", "centred")
    other = tmp_path / "other.toml"
    other.write_text(
        'max_steps = 1\nmodel.name = "tiny"\norchestrator.algo.type = "centred"\n'
        '[[orchestrator.train.env]]\nid = "x"\nname = "words"\nalgo.type = "counted"\n'
    )
    result = command(tmp_path / "run", "--config", other)
    assert "words: centred, now counted" in result.output
    both = command(tmp_path / "run", "--config", other, "--algo", "centred")
    assert isinstance(both.exception, ConfigError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], "no step 9; there are 1 to 3"),
        (["--algo", "centered"], "Did you mean 'centred'"),
    ],
)
def test_a_run_that_cannot_be_replayed_is_refused_with_the_reason(tmp_path, arguments, message):
    make_run(tmp_path / "run", "centred")
    assert message in str(command(tmp_path / "run", *arguments).exception)


def test_a_folder_that_is_no_run_and_a_run_without_rollouts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        read_run_config(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/run.json").write_text('{"max_step": 3}')
    with pytest.raises(
        ConfigError, match=r"(?s)run\.json: .*max_step: unknown key; did you mean 'max_s"
    ):
        read_run_config(tmp_path)
    for damaged in (b'{"max', b"\xff\xfe\0junk", b"5", b'{"junk": "\x1b[31m'):
        (tmp_path / "configs/run.json").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"run\.json: damaged, expected a table as J") as said:
            read_run_config(tmp_path)
        assert "\n" not in str(said.value) and "junk" not in str(said.value)
    (tmp_path / "configs/run.json").write_text('{"max_steps": "x", "trainer": 5}')
    with pytest.raises(ConfigError, match=r"; trainer: expected a table") as said:
        read_run_config(tmp_path)
    assert "\n" not in str(said.value)
    with pytest.raises(RunError, match="save_rollouts"):
        read_steps(tmp_path)


def test_files_without_places_are_refused(tmp_path):
    make_run(tmp_path / "run", "centred")
    path = step_files(tmp_path / "run")[1]
    stored = read_step(path)
    for each in stored.rollouts:
        each.rollout.place = None
    write_rollouts(path, 1, [each.rollout for each in stored.rollouts], {})
    with pytest.raises(RunError, match="lack the order in which they were scored"):
        replayed(tmp_path / "run")


def test_the_host_has_the_saved_examples_and_agents(tmp_path):
    make_run(tmp_path / "run", "centred")
    rollouts = [s.rollout for step in read_steps(tmp_path / "run") for s in step.rollouts]
    orchestrator = {"train": {"env": [{"id": "words"}]}}
    config = RunConfig(
        model={"name": "m"}, max_steps=1, seed=3, seq_len=64, orchestrator=orchestrator
    )
    host = ReplayHost("words", config, rollouts)
    assert (host.seed, host.seq_len, host.max_completion_tokens, host.step) == (3, 64, None, 0)
    assert host.envs == ("words",)
    assert host.agents == ("agent",) and host.task(1) == {"prompt": "say it"}
    with pytest.raises(IndexError, match="example 999"):
        host.task(999)
    with pytest.raises(NotRecorded):
        host.render([])
    with pytest.raises(NotRecorded):
        host.supervised_sample([])


@pytest.mark.parametrize(
    ("recorded", "base"), [(NoText, CodePoints), (RecordedReference, FakeReference)]
)
def test_a_replay_inherits_no_made_up_answer(recorded, base):
    answers = {name for name in vars(base) if callable(getattr(base, name)) and name[0] != "_"}
    assert answers <= vars(recorded).keys() | {"answer", "reply"}


def test_an_env_the_other_config_does_not_name_takes_its_default():
    own = algorithms_of(config_of("centred"), ("words", "other"))
    assert {env: table.type for env, table in own.items()} == dict.fromkeys(
        ("words", "other"), "centred"
    )
