"""Runs that the user ends: Ctrl-C, ``prime-rl stop``, and both again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import lines_so_far

from prime_rl.rundir.checkpoints import whole_steps

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]

pytestmark = pytest.mark.slow

SMALL = [
    *("--model.warmup_exact", "0.15", "--max_steps", "100000"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]
PATIENCE = 600.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(model_cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``prime-rl`` with some arguments; whatever is left is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = warm.Popen(
            [*CLI, *arguments],
            env=os.environ | {"PRIME_RL_CACHE": str(model_cache), "COLUMNS": "400"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell that starts the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def command(folder: Path, *more: str) -> list[str]:
    return ["run", str(CONFIG), *SMALL, "--output_dir", str(folder), "--run.name", "mine", *more]


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_trained(run_dir: Path) -> Callable[[], bool]:
    return lambda: len(lines_so_far(run_dir / "trainer.jsonl")) >= 2


def outcome(process: subprocess.Popen[str], code: int) -> str:
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == code, output
    return output


def check_stopped(run_dir: Path, output: str) -> int:
    """The last step of a run that has ended in order."""
    assert (
        "stopping: finishing the step and saving (a second signal ends the run at once)" in output
    )
    last = lines_so_far(run_dir / "trainer.jsonl")[-1]["step"]
    assert f"Stopped at step {last}\n" in output and "Learning curve" in output
    assert json.loads((run_dir / "summary.json").read_text())["stopped_at"] == last
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    for key in ("train/agg/all/reward/mean", "optim/grad_norm"):
        steps = [row["step"] for row in lines_so_far(run_dir / "metrics.jsonl") if key in row]
        assert steps == list(range(1, last + 1))
    said = output + "".join(path.read_text() for path in run_dir.glob("logs/latest/*.log"))
    for bad in ("ERROR", "Error:", "Traceback", "ConnectError"):
        assert bad not in said, said
    return int(last)


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of the exported folder."""
    AutoTokenizer.from_pretrained(run_dir / "weights")
    state = AutoModelForCausalLM.from_pretrained(run_dir / "weights").state_dict()
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def resume_command(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith("Resume with")]
    program, *arguments = shlex.split(line.removeprefix("Resume with"))
    assert program == "prime-rl"
    return arguments


def test_ctrl_c_saves_the_last_version_and_the_printed_command_goes_on_from_it(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    run_dir = tmp_path / "mine"
    process = start(*command(tmp_path))
    wait_until(has_trained(run_dir), process)
    process.send_signal(signal.SIGINT)
    output = outcome(process, 130)
    last = check_stopped(run_dir, output)
    assert not processes_of(run_dir)
    published = load_file(run_dir / "broadcasts" / f"step_{last}" / "model.safetensors")
    saved = exported(run_dir)
    assert published.keys() - {"lm_head.weight"} == saved.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    assert whole_steps(run_dir) == [last]

    resumed = start(*resume_command(output), "--max_steps", str(last + 2))
    output = outcome(resumed, 0)
    assert f"resuming from step {last} of" in output and "Stopped" not in output
    assert [row["step"] for row in lines_so_far(run_dir / "trainer.jsonl")] == list(
        range(1, last + 3)
    )
    assert whole_steps(run_dir) == [last, last + 2]  # what a run was resumed from stays
    assert json.loads((run_dir / "summary.json").read_text())["stopped_at"] is None


def test_the_stop_command_saves_adapter_and_merged_model(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    run_dir = tmp_path / "mine"
    process = start(*command(tmp_path, "--trainer.lora.rank", "4", "--ckpt.enabled", "false"))
    wait_until(has_trained(run_dir), process)
    asked = [*CLI, "stop", "mine", "--output-dir", str(tmp_path)]
    told = warm.run(asked, timeout=PATIENCE)
    assert (told.returncode, told.stdout) == (0, f"{run_dir}: stopped\n"), told.stderr
    output = outcome(process, 130)
    last = check_stopped(run_dir, output)
    assert not processes_of(run_dir)
    name = "adapter_model.safetensors"
    published = load_file(run_dir / "broadcasts" / f"step_{last}" / name)
    adapter = load_file(run_dir / "weights" / "adapter" / name)
    assert published.keys() == adapter.keys()
    assert all(torch.equal(adapter[key], published[key]) for key in adapter)
    base = json.loads((run_dir / "configs" / "launch.json").read_text())["model_path"]
    begun, merged = load_file(Path(base) / "model.safetensors"), exported(run_dir)
    moved = {key.split(".")[-2] for key in merged if not torch.equal(begun[key], merged[key])}
    assert "q_proj" in moved and "embed_tokens" not in moved
    assert "No checkpoint to resume from" in output and not whole_steps(run_dir)


def test_two_ranks_that_broadcast_from_memory_save_unrounded_weights(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "mine"
    process = start(
        *command(tmp_path, "--trainer.num_ranks", "2", "--weight_broadcast.type", "gloo"),
        *("--trainer.publish_dtype", "bfloat16", "--inference.embedded.dtype", "bfloat16"),
    )
    wait_until(has_trained(run_dir), process)
    process.send_signal(signal.SIGTERM)
    output = outcome(process, 130)
    last = check_stopped(run_dir, output)
    weights = load_file(run_dir / "checkpoints" / f"step_{last}" / "weights" / "model.safetensors")
    saved = exported(run_dir)
    assert all(torch.equal(saved[name], weights[name]) for name in saved)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in weights.values())
    resumed = start(*resume_command(output), "--max_steps", str(last + 1))
    assert f"resuming from step {last} of" in outcome(resumed, 0)


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    run_dir = tmp_path / "mine"
    process = start(*command(tmp_path))
    wait_until(has_trained(run_dir), process)
    trainer = json.loads((run_dir / "status" / "trainer.json").read_text())["pid"]
    os.kill(trainer, signal.SIGSTOP)  # a step that takes long
    process.send_signal(signal.SIGINT)
    wait_until((run_dir / "STOP").exists, process)
    process.send_signal(signal.SIGINT)
    output = outcome(process, 130)
    (last, *_) = [line for line in output.splitlines() if line.startswith("stopped at once; ")]
    trained = lines_so_far(run_dir / "trainer.jsonl")[-1]["step"]
    assert last.endswith(f"no checkpoint yet; steps 1 to {trained} will be trained again")
    assert f"Run directory   {run_dir}" in output
    assert "Traceback" not in output and "Error" not in output
    assert not processes_of(run_dir)
    assert not (run_dir / "weights").exists()


def test_a_stop_before_the_first_step_says_that_there_are_no_weights(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    run_dir = tmp_path / "mine"
    # The batch of a step takes much longer than a start.
    process = start(*command(tmp_path, "--orchestrator.batch_size", "4096"))
    wait_until((run_dir / "status" / "orchestrator.json").exists, process)
    process.send_signal(signal.SIGINT)
    output = outcome(process, 130)
    assert f"stopped before a step was trained: no weights in {run_dir}" in output
    assert "Error" not in output and "Resume with" not in output
    assert not processes_of(run_dir)
    assert not (run_dir / "weights").exists()


@pytest.mark.parametrize("broken", ["reader", "disk", "closed"])
def test_a_run_whose_output_breaks_trains_to_its_end(
    model_cache: Path, tmp_path: Path, broken: str
) -> None:
    """``prime-rl run ... | head -1``, ``> /dev/full`` and ``>&-``."""
    shell = {"reader": '"$@" | head -1; exit ${PIPESTATUS[0]}', "disk": '"$@" > /dev/full'}
    script = shell.get(broken, '"$@" >&- 2>&-')
    arguments = [*command(tmp_path), "--max_steps", "3"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *CLI, *arguments],
        env=os.environ | {"PRIME_RL_CACHE": str(model_cache)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in lines_so_far(tmp_path / "mine" / "trainer.jsonl")] == [1, 2, 3]
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["stopped_at"] is None
    if broken != "closed":
        assert "The run goes on; see" in done.stderr


def test_a_terminal_that_closes_saves_and_stops_the_run(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    run_dir = tmp_path / "mine"
    process = start(*command(tmp_path))
    wait_until(has_trained(run_dir), process)
    assert process.stdout is not None
    process.stdout.close()  # its terminal is gone
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.stdout = None
    assert process.wait(timeout=PATIENCE) == 130
    last = lines_so_far(run_dir / "trainer.jsonl")[-1]["step"]
    assert whole_steps(run_dir) == [last]
    assert json.loads((run_dir / "summary.json").read_text())["stopped_at"] == last
    assert not processes_of(run_dir)
