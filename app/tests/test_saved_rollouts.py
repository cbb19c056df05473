"""The files of a run's rollouts: atomic writes, and what replaying needs."""

from types import SimpleNamespace

from prime_rl import PluginConfig, Rollout, Sample
from prime_rl.rollout import Batch
from prime_rl_app.saved_rollouts import (
    RolloutStore,
    SaveConfig,
    SaveRollouts,
    read_rollouts,
    read_step,
    step_files,
    write_rollouts,
)


def observer_of(run_dir, *, is_on=True, settings=None):
    config = SimpleNamespace(orchestrator=SimpleNamespace(save_rollouts=is_on))
    run = SimpleNamespace(config=config, run_dir=run_dir)
    return SaveRollouts(
        settings or PluginConfig(), SimpleNamespace(shared=SimpleNamespace(run=run))
    )


def test_the_observer_writes_each_batch(tmp_path):
    kept, dropped = member(1), member(0)
    observer = observer_of(tmp_path)
    observer.group_scored([kept], version=0)
    batch = Batch(3, kept=[kept], seen=[kept, dropped], dropped={id(dropped): "stale"})
    observer.batch_sent(batch, [b"abc"])
    step, rollouts, reasons = read_rollouts(step_files(tmp_path)[3])
    assert (step, reasons) == (3, [None, "stale"])
    assert [rollout.place and rollout.place[1:] for rollout in rollouts] == [(0, 0, 1), None]


def test_the_observer_writes_nothing_where_rollouts_are_not_saved(tmp_path):
    observer = observer_of(tmp_path, is_on=False)
    observer.group_scored([member(0)], version=0)
    observer.batch_sent(Batch(3), [])
    assert list(tmp_path.iterdir()) == []


def test_the_newest_files_stay_and_those_of_every_multiple(tmp_path):
    observer = observer_of(tmp_path, settings=SaveConfig(keep_last=2, keep_interval=4))
    evaluated = tmp_path / "eval_rollouts"
    for step in range(1, 12):
        if step % 2 == 0:  # the first evaluation is at version 2, and stays
            (evaluated / f"step_{step}").mkdir(parents=True)
            (evaluated / f"step_{step}" / "e.msgpack").touch()
        observer.batch_sent(Batch(step), [])
    assert [*step_files(tmp_path)] == [4, 8, 10, 11]
    assert {path.name for path in evaluated.iterdir()} == {"step_2", "step_4", "step_8", "step_10"}
    assert SaveConfig(keep_last=3).superseded([1, 2, 3, 4, 9]) == [1, 2]
    assert SaveConfig(keep_interval=4).superseded([1, 2, 3]) == []  # all stay


def test_the_run_survives_a_full_disk_without_its_saved_rollouts(tmp_path, caplog):
    (tmp_path / "rollouts").touch()  # no folder can be made there
    observer_of(tmp_path).batch_sent(Batch(3), [])
    assert "step 3: its rollouts are not kept: " in caplog.text


def test_a_second_write_replaces_the_first(tmp_path):
    path = tmp_path / "rollouts" / "step_3.msgpack"
    for rollouts in ([member(0), member(0)], [member(0)]):
        write_rollouts(path, 3, rollouts, {})
        assert [entry.name for entry in path.parent.iterdir()] == ["step_3.msgpack"]
    assert len(read_rollouts(path)[1]) == 1


def member(group_id, reward=0.0):
    sample = Sample(token_ids=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -1.0])
    return Rollout(env="e", example_id=0, group_id=group_id, reward=reward, samples=[sample])


def test_places_give_the_order_of_scoring(tmp_path):
    late, early = [member(0), member(0)], [member(1)]
    store = RolloutStore(tmp_path)
    store.group_scored(early)
    store.group_scored(late)
    store.write(1, [late[0], early[0], late[1]], {})
    stored = read_step(step_files(tmp_path)[1])
    places = [each.rollout.place for each in stored.rollouts]
    assert [place[1:] for place in places] == [(1, 0, 2), (0, 0, 1), (1, 1, 2)]
    assert len({place[0] for place in places}) == 1


def test_siblings_that_wait_for_a_batch_are_saved_apart(tmp_path):
    group = [member(7, 0.25), member(7, 0.75)]
    store = RolloutStore(tmp_path)
    store.group_scored(group)
    store.group_scored([member(8)])
    store.write(1, group[:1], {})
    store.write(2, group[1:], {})
    first, second = (read_step(path) for path in step_files(tmp_path).values())
    assert [each.rollout.reward for each in first.rollouts] == [0.25]
    assert [(w.rollout.reward, w.rollout.place[1:]) for w in first.waiting] == [(0.75, (0, 1, 2))]
    assert [each.rollout.reward for each in second.rollouts] == [0.75] and second.waiting == []
    assert len(read_rollouts(step_files(tmp_path)[1])[1]) == 1


def test_places_of_a_later_attempt_come_after_those_of_an_earlier_one(tmp_path):
    """What was scored before and waited in a checkpoint keeps its place."""
    before, after = [member(0), member(0)], [member(1)]
    RolloutStore(tmp_path).group_scored(before)
    write_rollouts(tmp_path / "buffered.msgpack", 1, before, {})
    _, restored, _ = read_rollouts(tmp_path / "buffered.msgpack")
    store = RolloutStore(tmp_path)
    store.group_scored(after)
    store.write(2, [*after, *restored], {})
    places = [each.rollout.place for each in read_step(step_files(tmp_path)[2]).rollouts]
    assert sorted(places) == [places[1], places[2], places[0]]
    assert places[1:] == [rollout.place for rollout in before]


def test_kept_rollouts_are_in_the_order_of_packing(tmp_path):
    third, first, dropped, second = (member(g, g / 10) for g in (3, 1, 0, 1))
    store = RolloutStore(tmp_path)
    store.write(1, [third, first, dropped, second], {id(dropped): "stale"})
    kept = read_step(step_files(tmp_path)[1]).kept
    assert [rollout.group_id for rollout in kept] == [1, 1, 3]


def test_the_digests_of_frames_are_saved(tmp_path):
    RolloutStore(tmp_path).write(1, [], {}, [b"abc"])
    (frame,) = read_step(step_files(tmp_path)[1]).frames
    assert frame.num_bytes == 3
    assert frame.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_step_files_are_in_order_without_other_files(tmp_path):
    store = RolloutStore(tmp_path)
    for step in (10, 9):
        store.write(step, [], {})
    (tmp_path / "rollouts" / "step_x.msgpack").touch()
    assert list(step_files(tmp_path)) == [9, 10]
