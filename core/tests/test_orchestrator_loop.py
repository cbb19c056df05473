"""The loop's own waiting: it never waits for the dead, nor for ever."""

import asyncio
from types import SimpleNamespace

import pytest

from prime_rl import EngineError, RunError
from prime_rl.orchestrator.evals import EvalResult
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.run.launch import Launch
from prime_rl.run.status import Status


@pytest.fixture
def loop():
    """An orchestrator that holds only what waiting needs."""
    orchestrator = object.__new__(Orchestrator)
    settings = SimpleNamespace(weights_timeout=0.05)
    orchestrator.config = SimpleNamespace(orchestrator=settings)
    orchestrator.dispatcher = SimpleNamespace(num_inflight=0)
    orchestrator.evals = SimpleNamespace(inflight=0)
    orchestrator.fleet = SimpleNamespace(asleep=False)
    orchestrator.policy = SimpleNamespace(version=3)
    orchestrator.status = Status(None)
    return orchestrator


async def never():
    await asyncio.Event().wait()


async def test_where_nothing_moves_the_run_is_stuck_and_says_at_what(loop):
    loop.status.report("sampling batch 5", waiting_for="trainer (weights of step 4)")
    with pytest.raises(RunError) as caught:
        await loop._or_crash(asyncio.create_task(never()), [])
    assert str(caught.value) == (
        "nothing has moved for 0 s (orchestrator.weights_timeout): sampling batch 5, waiting for "
        "trainer (weights of step 4). The engines have version 3. See logs/latest/trainer.log."
    )


async def test_while_rollouts_are_sampled_it_waits(loop):
    loop.dispatcher.num_inflight = 1
    task = asyncio.create_task(asyncio.sleep(1.2))
    await loop._or_crash(task, [])
    assert task.done()


async def test_an_evaluation_whose_engines_are_gone_for_good_ends_with_their_error(loop):
    """The fleet's own task gives up; what it says must not wait for rollouts that never end."""

    async def gone():
        raise EngineError("no engine serves after 600 s")

    loop.evals = SimpleNamespace(envs=[], inflight=1, evaluate=lambda envs, version: never())
    with pytest.raises(EngineError, match="no engine serves"):
        async with asyncio.timeout(5):
            await loop._evaluate("before", [asyncio.create_task(gone())])
    assert loop._phase == ""


async def test_a_group_scored_by_engines_that_are_gone_for_good_ends_with_their_error(loop):
    """An algorithm may score groups under the live policy, and the fleet alone knows it is gone."""

    async def gone():
        await asyncio.sleep(1.1)  # longer than ``weights_timeout``: scoring may take its time
        raise EngineError("no engine serves after 600 s")

    hooks = SimpleNamespace(score_group=lambda group: never())
    loop.envs = [SimpleNamespace(name="e", hooks=hooks)]
    rollout = SimpleNamespace(reward=1.0)
    group = SimpleNamespace(env_index=0, size=1, survivors=[rollout], members={})
    loop.assembler = SimpleNamespace(note_failed=lambda number, env: None)
    with pytest.raises(EngineError, match="no engine serves"):
        async with asyncio.timeout(5):
            await loop._take_in(group, [asyncio.create_task(gone())])


def evaluated(env, version):
    return EvalResult(env, version, reward=0.5, num_rollouts=1, num_failed=0)


def goes_on(loop, run_dir, *, first_step, before=(), during=(), skip=False):
    """Which envs of two are evaluated before training, and where each was measured last."""
    loop.config.orchestrator.eval = SimpleNamespace(skip_first_step=skip)
    loop.launch = launch_of(first_step)
    loop._began_with = loop.launch.began_with(run_dir)
    loop.evals.envs = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    loop.evaluated = {"before": list(before), "during": list(during)}
    return [env.name for env in loop._unmeasured()], loop._last_measured()


def launch_of(first_step):
    return Launch(
        model_path="m", served_model_name="m", engine_urls=[], transport_type="zmq",
        transport_host="", transport_ports=[], first_step=first_step,
    )  # fmt: skip


def test_a_new_run_measures_the_model_it_begins_with_also_another_runs_checkpoint(loop, tmp_path):
    assert goes_on(loop, tmp_path, first_step=1) == (["a", "b"], {"a": 0, "b": 0})
    assert goes_on(loop, tmp_path, first_step=1, skip=True) == ([], {"a": 0, "b": 0})
    assert goes_on(loop, tmp_path, first_step=8) == (["a", "b"], {"a": 7, "b": 7})
    measured = [evaluated("a", 7)]  # and the machine went down before the other
    assert goes_on(loop, tmp_path, first_step=8, before=measured)[0] == ["b"]


def test_a_run_that_goes_on_measures_its_first_model_no_more_and_knows_what_it_lacks(
    loop, tmp_path
):
    (tmp_path / "configs").mkdir()
    for attempt, first_step in ((1, 1), (2, 3), (10, 5)):
        launch_of(first_step).write(tmp_path)
        path = tmp_path / "configs" / "launch.json"
        path.rename(path.with_name(f"launch.attempt_{attempt}.json"))
    before = [evaluated("a", 0), evaluated("b", 0)]
    found = goes_on(loop, tmp_path, first_step=8, before=before, during=[evaluated("a", 4)])
    assert found == ([], {"a": 4, "b": 0})
    assert goes_on(loop, tmp_path, first_step=8) == ([], {"a": 0, "b": 0})


async def test_a_background_task_that_dies_ends_the_wait_with_its_error(loop):
    async def die():
        raise ValueError("the engine is gone")

    waiting = asyncio.create_task(never())
    with pytest.raises(ValueError, match="the engine is gone"):
        await loop._or_crash(waiting, [asyncio.create_task(die())])
    await asyncio.sleep(0)
    assert waiting.cancelled()
