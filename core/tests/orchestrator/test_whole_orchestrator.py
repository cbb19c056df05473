"""The orchestrator as its process builds it, in this process: a real environment, fleet, wire and
run directory, an engine on loopback, and a trainer that publishes a version for each batch."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import renderers.client
from scripted_engine import ScriptedEngine, scripted_engine
from small_tokenizer import build_tokenizer
from waiting import LIMIT
from words_env import WORDS

from prime_rl.config.run import RunConfig
from prime_rl.orchestrator import __main__ as process
from prime_rl.orchestrator.context import RunContext
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.observer import ObserverHost
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.checkpoints import unfinished
from prime_rl.rundir.directory import new_attempt
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.wire.micro_batch import MicroBatch, decode_batch
from prime_rl.wire.transport import FILES, make_receiver


@pytest.fixture(autouse=True)
def variables_are_restored() -> Iterator[None]:
    """The orchestrator's process sets some of its own."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def no_lock_of_an_earlier_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """renderers keeps one for the process, of the first event loop that waited for it."""
    monkeypatch.setattr(renderers.client, "_max_prompt_len_lock", asyncio.Lock())


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with scripted_engine(build_tokenizer(), "m") as running:
        yield running


class Run:
    """A run of two rollouts per group and two groups per batch."""

    def __init__(self, run_dir: Path, engine: ScriptedEngine, max_steps: int, **launch: Any):
        self.run_dir = run_dir
        model = run_dir / "model"
        if not model.exists():
            build_tokenizer().save_pretrained(model)
            new_attempt(run_dir)
        orchestrator = {
            "batch_size": 4,
            "group_size": 2,
            "max_off_policy_steps": 0,
            "algo": {"type": "above_mean"},
            "sampler": {"type": "rotating"},
            "renderer": {"name": "plain"},
            "post_batch_filters": [{"type": "too_short"}],
            "env_workers": 0,
            "max_empty_batches": 3,
            "train": {"env": [{"id": "words_env"}], "harness": {"id": "small-harness"}},
        }
        config = RunConfig.model_validate(
            {
                "model": {"name": "m"},
                "max_steps": max_steps,
                "ckpt": {"interval": 1},
                "orchestrator": orchestrator,
                "trainer": {"loss": {"type": "plain"}},
                "monitors": {"kept": {}},
            }
        )
        self.launch = Launch(
            model_path=str(model),
            served_model_name="m",
            engine_urls=[engine.url],
            transport_type=FILES,
            transport_host="",
            transport_ports=[],
            **launch,
        )
        self.launch.write(run_dir)
        losses = Components.load(config.trainer, load_plugins(TRAINER_GROUP))
        status = Status(run_dir / "status/orchestrator.json")
        self.context = RunContext(config, self.launch, run_dir, load_plugins(), status, losses)
        self.batches: dict[int, list[MicroBatch]] = {}

    async def __call__(self) -> Orchestrator:
        """Until the last step; the trainer works in a thread."""
        async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
            orchestrator = await process._build(stack, self.context)
            trainer = asyncio.create_task(asyncio.to_thread(self.train))
            assert await orchestrator.run() is None
            await trainer
        return orchestrator

    def train(self) -> None:
        receiver = make_receiver(self.launch, self.run_dir)
        for step in range(self.launch.first_step, self.context.config.max_steps + 1):
            frame = receiver.receive(LIMIT)
            assert frame is not None
            number, self.batches[step] = decode_batch(frame)
            assert number == step
            folder = self.run_dir / f"broadcasts/step_{step}"
            folder.mkdir(parents=True)
            with (self.run_dir / "trainer.jsonl").open("a") as file:
                line = {"step": step, "time": 0.0, "metrics": {"loss/mean": step / 2}}
                file.write(json.dumps(line) + "\n")
            (folder / "STABLE").touch()
        receiver.close()


def prompts(rows: list[MicroBatch]) -> set[str]:
    tokenizer = build_tokenizer()
    text = tokenizer.decode(rows[0].token_ids)
    return {word for word in WORDS if f"user\n{word}<|im_end|>" in text}


def check_wiring(loop: Orchestrator, lent: ObserverHost) -> None:
    """That each part has the others which it works with."""
    (env,) = loop.sampling.envs
    assert loop.weights.announced == loop.wire.announced
    assert loop.checkpoints in loop.observers
    assert loop.checkpoints is not None and loop.checkpoints.observers is loop.observers
    assert env.group_size == 2 and loop.buffer._patience == 3 * 4

    reporter = loop.observers[0]
    assert isinstance(reporter, Reporter)
    parts = (loop.buffer, loop.weights, loop.sampling, env.host, env.environment)
    assert all(part.take_metrics in reporter.sources for part in parts)
    assert loop.context.waited.take in reporter.sources

    assert not lent.is_scoring()
    loop.sampling.is_scoring = True
    assert lent.is_scoring()
    loop.sampling.dispatcher = SimpleNamespace(  # type: ignore[assignment]
        num_inflight=5, num_waiting=7, max_inflight=9, alone={"words_env"}
    )
    assert (lent.num_inflight(), lent.num_waiting(), lent.max_inflight()) == (5, 7, 9)
    assert lent.scored_alone("words_env") and not lent.scored_alone("other")


async def test_two_steps_and_one_and_one_more_after_a_resume(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """One test: renderers keeps a lock of its event loop for the process."""
    from core_parts_loop import Kept, Lent

    straight = Run(tmp_path / "straight", engine, max_steps=2)
    orchestrator = await straight()
    assert [prompts(straight.batches[step]) for step in (1, 2)] == [{"ab", "cd"}, {"ef", "ab"}]
    assert [rows[0].num_sequences for rows in straight.batches.values()] == [4, 4]
    assert engine._version == 2 and orchestrator.weights.policy.version == 2

    # Every part that measures reaches the monitors, under the step that it is about.
    steps = Kept.metrics[straight.run_dir]
    assert [steps[step]["loss/mean"] for step in (1, 2)] == [0.5, 1.0]
    assert [steps[step]["watcher/policy_version"] for step in (1, 2)] == [0.0, 1.0]
    assert steps[1]["filters/post_batch_filters/too_short"] == 0.0
    assert steps[1]["batch/truncated_samples"] == 0.0
    names = {name.partition("/")[0] for name in steps[2]}
    assert {"wait", "filters", "watcher", "time", "dispatcher", "pace"} <= names

    check_wiring(orchestrator, Lent.hosts[straight.run_dir])

    engine._version = 0
    first = Run(tmp_path / "first", engine, max_steps=1)
    await first()
    part = unfinished(first.run_dir, 1).directory
    second = Run(first.run_dir, engine, max_steps=2, first_step=2, resume_from=str(part))
    await second()
    for name in ("token_ids", "advantages"):
        columns = [
            [getattr(row, name).tolist() for row in run.batches[2]] for run in (straight, second)
        ]
        assert columns[0] == columns[1]
