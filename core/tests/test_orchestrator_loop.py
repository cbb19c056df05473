"""The loop's own waiting: it never waits for the dead, nor for ever."""

import asyncio
from types import SimpleNamespace

import pytest

from prime_rl import EngineError, RunError
from prime_rl.orchestrator.loop import Orchestrator
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


async def test_a_background_task_that_dies_ends_the_wait_with_its_error(loop):
    async def die():
        raise ValueError("the engine is gone")

    waiting = asyncio.create_task(never())
    with pytest.raises(ValueError, match="the engine is gone"):
        await loop._or_crash(waiting, [asyncio.create_task(die())])
    await asyncio.sleep(0)
    assert waiting.cancelled()
