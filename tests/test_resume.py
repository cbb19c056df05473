"""Whole runs that end and go on; and the asynchronous run beside a plain synchronous loop.

With ``max_off_policy_steps = 0`` and an engine that computes one request at a time
(``num_slots = 1``) every number of a run is fixed by its config, so runs are compared bit for bit.
With more slots the engine's logits depend, in their last bits, on who else is in the batch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import LIMIT, eventually

from prime_rl.config.run import RunConfig
from prime_rl.orchestrator import build
from prime_rl.orchestrator.context import RunContext
from prime_rl.orchestrator.packer import pack
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel
from prime_rl.rollout import Rollout
from prime_rl.rundir.checkpoints import finished, whole_steps
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, Launch
from prime_rl.rundir.machine import free_ports
from prime_rl.rundir.status import Status
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.published import Publisher
from prime_rl.wire import encode_batch
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_app.children import Child, end, start
from prime_rl_app.commands import engine_launch
from prime_rl_app.resolve import Resolved
from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

pytestmark = pytest.mark.slow

SMALL = [
    *("--model.warmup_exact", "0.15"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]"),
    *("--trainer.optim.lr", "2e-3"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]
EXACT = [
    *("--orchestrator.max_off_policy_steps", "0"),
    *("--inference.embedded.num_slots", "1"),
]

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_run(model_cache: Path, tmp_path: Path) -> Iterator[Run]:
    """Starts ``prime-rl run`` with small settings; whatever is left is ended."""
    with starting(model_cache, tmp_path) as begin:
        yield begin


@contextmanager
def starting(cache: Path, folder: Path) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"]
        command += [str(CONFIG), *SMALL, "--output_dir", str(folder), *arguments]
        process = warm.Popen(
            command,
            env=os.environ | {"PRIME_RL_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    try:
        yield begin
    finally:
        for process in started:
            process.kill()
            process.communicate()


TEN = ["--max_steps", "10", "--ckpt.interval", "5"]


@pytest.fixture(scope="module")
def straight(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps without a break, each trained on what the newest policy sampled; all versions."""
    folder = tmp_path_factory.mktemp("straight")
    with starting(model_cache, folder) as begin:
        finish(begin("--run.name", "straight", *EXACT, *TEN, "--trainer.keep_broadcasts", "10"))
    return folder / "straight"


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == code, output
    return output


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained(run_dir: Path, step: int) -> list[tuple[Any, ...]]:
    """Of every rollout decided on for a batch: what was asked for, and what was sampled."""
    _, rollouts, dropped = read_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack")
    return [
        (
            rollout.group_id,
            rollout.example_id,
            rollout.episode_id,
            rollout.policy_version,
            [sample.token_ids.tobytes() for sample in rollout.samples],
            [sample.inference_logprobs.tobytes() for sample in rollout.samples],
            why,
        )
        for rollout, why in zip(rollouts, dropped, strict=True)
    ]


def test_ten_steps_are_five_and_a_resume_and_five_bit_for_bit(
    start_run: Run, straight: Path, tmp_path: Path
) -> None:
    five = start_run("--run.name", "halved", *EXACT, "--max_steps", "5", "--ckpt.interval", "5")
    finish(five)
    output = finish(start_run("--run.name", "halved", "--resume", *EXACT, *TEN))
    assert "resuming from step 5" in output and "max_steps: 5 then, 10 now" in output
    halved = tmp_path / "halved"
    for step in range(1, 11):
        assert trained(straight, step) == trained(halved, step), f"step {step}"
    assert same_weights(straight / "weights", halved / "weights")
    assert not same_weights(straight / "weights", finished(halved, 5).weights)
    for run_dir in (straight, halved):
        assert whole_steps(run_dir) == [5, 10]
    lines = [json.loads(line) for line in (halved / "metrics.jsonl").read_text().splitlines()]
    for key in ("train/agg/all/reward/mean", "optim/grad_norm"):
        assert [line["step"] for line in lines if key in line] == list(range(1, 11))


def test_a_run_that_is_stopped_and_goes_on_is_one_without_a_break_bit_for_bit(
    start_run: Run, straight: Path, tmp_path: Path
) -> None:
    """Without a table ``[ckpt]``."""
    process = start_run("--run.name", "stopped", *EXACT, "--max_steps", "100000")
    stopped = tmp_path / "stopped"
    steps = stopped / "trainer.jsonl"
    eventually(lambda: steps.exists() and steps.read_bytes().count(b"\n") >= 2, process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=130)
    (last,) = whole_steps(stopped)
    until = ["--max_steps", str(last + 2)]
    assert f"resuming from step {last} of" in finish(
        start_run("--run.name", "stopped", "--resume", *EXACT, *until)
    )
    whole = straight
    if last > 8:  # the stop came late
        finish(start_run("--run.name", "whole", *EXACT, *until))
        whole = tmp_path / "whole"
    for step in range(1, last + 3):
        assert trained(whole, step) == trained(stopped, step), f"step {step}"
    version = whole / f"broadcasts/step_{last + 2}"
    assert same_weights(version, stopped / "weights")
    assert not same_weights(version, finished(stopped, last).weights)


def test_an_adapter_is_published_alone_and_a_resume_goes_on_from_it_bit_for_bit(
    start_run: Run, tmp_path: Path
) -> None:
    lora = ["--run.name", "lora", *EXACT, "--max_steps", "4", "--ckpt.interval", "2"]
    lora += ["--trainer.lora.rank", "8"]
    finish(start_run(*lora))
    folder = tmp_path / "lora"
    lines = [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]
    # What the engine makes of base and adapter is the policy that trains.
    assert [line["metrics"]["mismatch_kl/all/mean"] < 1e-9 for line in lines] == [True] * 4
    for place in ("broadcasts/step_4", "checkpoints/step_4/weights", "weights/adapter"):
        assert not (folder / place / "model.safetensors").exists()
    adapter = load_file(folder / "weights/adapter/adapter_model.safetensors")
    assert all(t.any() for name, t in adapter.items() if name.endswith("lora_B.weight"))
    base = Path(Launch.read(folder).model_path)
    exported = AutoModelForCausalLM.from_pretrained(folder / "weights").state_dict()
    begun = load_file(base / "model.safetensors")
    moved = {name.split(".")[-2] for name in begun if not begun[name].equal(exported[name])}
    assert moved == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert "resuming from step 2" in finish(start_run(*lora, "--resume", "2"))
    assert "to version 2" in (folder / "logs/latest/orchestrator.log").read_text()
    again = load_file(folder / "weights/adapter/adapter_model.safetensors")
    assert all(again[name].equal(tensor) for name, tensor in adapter.items())


def check_the_books(run_dir: Path, last: int) -> None:
    """Every group that was opened is decided on, buffered or on its way, and no rollout twice; and
    examples are those that the standard sampler asks for: one after the other."""
    part = finished(run_dir, last).orchestrator
    progress = json.loads((part / "progress.json").read_text())
    files = [run_dir / "rollouts" / f"step_{step}.msgpack" for step in range(1, last + 1)]
    seen: Counter[tuple[int, int]] = Counter()
    examples: dict[int, int] = {}
    for file in [*files, part / "buffered.msgpack"]:
        for rollout in read_rollouts(file)[1]:
            seen[rollout.group_id, rollout.episode_id] += 1
            examples[rollout.group_id] = rollout.example_id
    assert set(seen.values()) == {1}
    assert {sum(1 for group, _ in seen if group == each) for each in examples} == {4}
    waiting = {group["group_id"]: group["example"] for group in progress["waiting"]}
    assert not waiting.keys() & examples.keys()
    asked = examples | waiting
    assert sorted(asked) == list(range(progress["groups_opened"]))
    assert all(example == group_id for group_id, example in asked.items())


def test_killed_amid_asynchronous_training_none_is_skipped_and_none_comes_twice(
    start_run: Run, processes_of: Callable[[Path], list[int]], tmp_path: Path
) -> None:
    settings = ["--run.name", "killed", "--ckpt.interval", "2", "--ckpt.keep_last", "2"]
    settings += ["--recovery.max_restarts", "0"]
    # A policy that learns fast from old rollouts may collapse, and then nothing is left to train.
    settings += ["--trainer.optim.lr", "1e-5"]
    process = start_run(*settings, "--max_steps", "400")
    run_dir = tmp_path / "killed"
    eventually(lambda: [step for step in whole_steps(run_dir) if step >= 6], process)
    status = json.loads((run_dir / "status" / "trainer.json").read_text())
    os.kill(status["pid"], signal.SIGKILL)
    output = finish(process, code=1)
    assert "trainer was ended by SIGKILL" in output and "trainer.log" in output
    assert not processes_of(run_dir)
    step = whole_steps(run_dir)[-1]
    assert len(whole_steps(run_dir)) <= 3  # the oldest goes just after the newest is there
    output = finish(start_run(*settings, "--resume", "latest", "--max_steps", str(step + 6)))
    assert f"resuming from step {step} of" in output
    assert (run_dir / "logs" / "attempt_2").is_dir()
    check_the_books(run_dir, step + 6)


# -- the synchronous loop ---------------------------------------------------------------------


def serve(config: RunConfig, launch: Launch, run_dir: Path) -> Child:
    (run_dir / "status").mkdir(parents=True, exist_ok=True)
    engine = Resolved(config).engine
    command = engine.command(engine_launch(config, launch, run_dir, "key"))
    return start("inference", command.argv, dict(command.env), run_dir / "engine.log")


async def group_of(env: build.TrainEnv, asked: tuple[int, int], version: int) -> list[Rollout]:
    """One group, one rollout after the other, with its credit."""
    group_id, example = asked
    group: list[Rollout] = []
    for member in range(env.group_size):
        seed = group_id * 4096 % 2**31 + member  # of a run with seed 0
        for rollout in await env.source.produce(
            RolloutRequest(group_id, example, member, version, seed)
        ):
            await score_rollout(env.hooks, rollout)
            group.append(rollout)
    await score_group(env.hooks, group)
    for rollout in group:
        stamp(rollout, env.algorithm.action_loss)
    return group


def train_on(trainer: Trainer, step: int, batch: Sequence[Rollout], config: RunConfig) -> None:
    samples = [s.cut(config.seq_len) for rollout in batch for s in rollout.samples]
    envs = [rollout.env for rollout in batch for _ in rollout.samples]
    rows = pack(samples, envs, config.trainer.micro_batch_tokens or config.seq_len)
    trainer.train_step(step, decode_batch(memoryview(encode_batch(step, rows)))[1])


async def synchronous_run(config: RunConfig, launch: Launch, run_dir: Path) -> None:
    """Sample a batch, score it, train on it, load the weights; again."""
    hooks = load_plugins()
    trainer = Trainer(
        load_model(Path(launch.model_path), config.trainer),
        Components.load(config.trainer, load_plugins(TRAINER_GROUP)),
        config.trainer,
        config.max_steps,
        kernel=make_kernel(config.trainer, load_plugins(TRAINER_GROUP)),
    )
    publisher = Publisher(run_dir / "broadcasts", keep=config.max_steps + 1)
    async with AsyncExitStack() as stack:
        run = RunContext(config, launch, run_dir, hooks, Status(None))
        engines = build.build_engines(run)
        fleet = engines.fleet
        stack.push_async_callback(fleet.close)
        shared = build.build_shared(run, engines)
        env = build.build_train_env(shared, *config.orchestrator.train.env)
        await stack.enter_async_context(env.environment)
        sampler = build.build_sampler(config, hooks, [env])
        await fleet.wait_ready(LIMIT)
        num_groups = 0
        for step in range(1, config.max_steps + 1):
            batch: list[Rollout] = []
            while len(batch) < config.orchestrator.batch_size:
                _, example = sampler.next_example()
                group = await group_of(env, (num_groups, example), step - 1)
                num_groups += 1
                batch += [rollout for rollout in group if rollout.advantages.any()]
            # What a batch leaves over is stale at the next version.
            train_on(trainer, step, batch[: config.orchestrator.batch_size], config)
            publisher.write(trainer.model, step)
            await fleet.update_weights(publisher.path(step), step)


async def test_with_staleness_0_a_run_is_the_synchronous_loop_bit_for_bit(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "key")
    monkeypatch.setenv(ENGINE_KEY, "EMPTY")  # as the orchestrator would, for its own process
    run_dir, own = straight, tmp_path / "sync"
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    assert config.seed == 0
    launch = Launch.read(run_dir)
    (port,) = free_ports(1)
    launch = Launch(
        model_path=launch.model_path,
        served_model_name=launch.served_model_name,
        engine_urls=[f"http://127.0.0.1:{port}"],
        engine_names=["inference"],
        transport_type="zmq",
        transport_host="127.0.0.1",
        transport_ports=[],
    )
    threads = torch.get_num_threads()
    engine = serve(config, launch, own)
    torch.set_num_threads(1)  # as in a run
    try:
        await synchronous_run(config, launch, own)
    finally:
        torch.set_num_threads(threads)
        end([engine])
    versions = own / "broadcasts"
    for step in (9, 10):
        theirs = run_dir / "broadcasts" / f"step_{step}"
        assert same_weights(versions / f"step_{step}", theirs), f"version {step}"
    assert same_weights(versions / "step_5", finished(run_dir, 5).weights)
    assert not same_weights(versions / "step_1", versions / "step_10")
