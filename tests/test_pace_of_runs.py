"""The pace of runs whose rollouts take their time: the real orchestrator under a simulated clock,
so that the load of the machine changes nothing; and what ``prime-rl doctor`` says of such runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_run import Simulated, TimedTrainer, World

from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.testing import make_rollout
from prime_rl_tools.doctor import History, pace_line

WARM_UP = 15
"""Steps in which the durations are not known yet."""


def simulated(
    run_dir: Path, seconds: Callable[[int], float], steps: int, **settings: Any
) -> tuple[float, str]:
    """Mean seconds of a step after the warm-up, with a trainer of 1 s, and what the doctor says
    of the metrics. ``seconds``: of a rollout, by the number of its request."""

    async def simulate() -> list[float]:
        world = World(run_dir, max_steps=steps, **settings)
        trainer = TimedTrainer(run_dir, seconds=1.0)
        world.loop.wire = trainer  # type: ignore[assignment]
        numbers = iter(range(1 << 30))

        async def produce(ask: RolloutRequest) -> Sequence[Any]:
            await asyncio.sleep(seconds(next(numbers)))
            rollout = make_rollout(float(ask.member), env="e", group_id=ask.group_id)
            rollout.policy_version = ask.policy_version
            return [rollout]

        world.source.produce = produce  # type: ignore[method-assign]
        rows: list[dict[str, float]] = []

        def step_trained(step: int, metrics: Any) -> None:
            rows.append({"step": step, "batch/agg/seen": 1.0, **world.sampling.take_metrics()})

        world.diary.step_trained = step_trained  # type: ignore[method-assign]
        await world.loop.run()
        (run_dir / "configs").mkdir(exist_ok=True)
        (run_dir / "configs/run.json").write_text(world.context.config.model_dump_json(), "utf-8")
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (run_dir / "metrics.jsonl").write_text(lines, "utf-8")
        return trainer.ends

    with asyncio.Runner(loop_factory=Simulated) as runner:
        ends = runner.run(simulate())
    assert len(ends) == steps
    mean = (ends[-1] - ends[WARM_UP]) / (len(ends) - 1 - WARM_UP)
    return mean, pace_line(History(run_dir)) or ""


def test_a_tail_that_lasts_six_steps_does_not_idle_the_trainer(tmp_path: Path) -> None:
    """One reply in twenty takes 6 s, the others 0.5 s: a third of the groups of 8 has a slow
    member. With one batch requested ahead, a step takes 2.6 to 3.0 s."""
    chance = random.Random(0)
    step, said = simulated(
        tmp_path,
        lambda number: 6.0 if chance.random() < 0.05 else 0.5,
        steps=80,
        batch_size=64,
        group_size=8,
        max_off_policy_steps=8,
        max_inflight_rollouts=1024,
    )
    assert step <= 1.1
    assert "The run is training-bound" in said


@pytest.mark.slow
def test_the_doctor_names_the_limit_of_a_run_that_samples_too_little_at_once(
    tmp_path: Path,
) -> None:
    """Two rounds of 3 s per batch of 8, since one group of 4 may be in flight."""
    step, said = simulated(
        tmp_path,
        lambda number: 3.0,
        steps=30,
        batch_size=8,
        group_size=4,
        max_off_policy_steps=1,
        max_inflight_rollouts=4,
    )
    assert step == pytest.approx(6.0, abs=0.1)
    assert "The run is sampling-bound" in said
    assert "orchestrator.max_inflight_rollouts" in said


@pytest.mark.slow
def test_the_doctor_says_that_a_tail_holds_a_run(tmp_path: Path) -> None:
    """Each second batch has a group that takes 12 s, and whose version is at most two steps older
    than the batch: 13 s with the training for three steps, or for four if none follows at once."""
    step, said = simulated(
        tmp_path,
        lambda number: 12.0 if number % 16 == 0 else 0.0,
        steps=40,
        batch_size=8,
        group_size=4,
        max_off_policy_steps=2,
    )
    assert 13.0 / 4 <= step <= 13.0 / 3
    assert "The run is held by a tail" in said
    assert "orchestrator.max_off_policy_steps" in said
