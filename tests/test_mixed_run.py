"""Four algorithms over four environments in one run, one of them a plugin's with a loss of another
plugin; the teacher goes away and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started_commands import Start, started_commands
from waiting import LIMIT, eventually

from prime_rl.rundir.machine import free_ports
from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]
HALF = ("--model.lessons", '["lookup"]', "--model.warmup_exact", "0.05")
"""A policy that knows how to call its tool, made in seconds; it knows nothing else."""
TRAINS = {
    "reverse-retry": {"ppo_clip"},
    "word-lookup": {"rl", "ce"},
    "reverse-text": {"ref_kl"},
    "reverse-relay": {"ce"},
}
"""Which components each env of configs/mixed.toml feeds, the first by ``CLIPPED``."""
CLIPPED = """
from prime_rl import hookimpl
from prime_rl_grpo.grpo import GRPO

class Clipped(GRPO):
    name = "clipped"
    action_loss = "ppo_clip"

@hookimpl
def register_algorithms():
    return [Clipped]
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def start(model_cache: Path) -> Iterator[Start]:
    with started_commands(model_cache) as starting:
        yield starting


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT) as reply:
            return reply.status == 200
    except OSError:
        return False


def serve(start: Callable[..., subprocess.Popen[str]], port: int) -> subprocess.Popen[str]:
    teacher = start("serve", "tiny-chat", *HALF, "--served-model-name", "teacher", "--port", port)
    eventually(lambda: answers(port), teacher)
    return teacher


def waiting_for(run_dir: Path) -> str:
    try:
        report = json.loads((run_dir / "status" / "orchestrator.json").read_text())
    except (OSError, ValueError):
        return ""
    return report.get("waiting_for") or ""


def test_four_algorithms_share_micro_batches_and_survive_the_teachers_absence(
    start: Callable[..., subprocess.Popen[str]], site: Callable[..., None], tmp_path: Path
) -> None:
    site("clipped_package", "[prime_rl]\nclipped = clipped_package\n", CLIPPED)
    (port,) = free_ports(1)
    teacher = serve(start, port)
    url = json.dumps([f"http://127.0.0.1:{port}/v1"])
    env = "--orchestrator.train.env"
    run = start(
        *("run", ROOT / "configs/mixed.toml", *HALF, "--output_dir", tmp_path),
        *("--run.name", "mixed", "--max_steps", 4, "--trainer.scheduler.warmup_steps", 0),
        *("--orchestrator.batch_size", 48, "--orchestrator.group_size", 4),
        *("--orchestrator.eval.env", "[]", "--orchestrator.post_batch_filters", "[]"),
        *(f"{env}.2.algo.teacher.base_url", url),
        *(f"{env}.3.algo.sampling.source.base_url", url),
        *(f"{env}.0.algo.type", "clipped", "--trainer.losses.ppo_clip.clip_eps_high", 0.3),
        *("--trainer.losses.ppo_clip.normalize_by", "sequences"),
        *("--trainer.token_export.enabled", "true"),
    )
    run_dir = tmp_path / "mixed"
    eventually(lambda: (run_dir / "rollouts" / "step_1.msgpack").exists(), run)
    teacher.send_signal(signal.SIGINT)
    teacher.communicate(timeout=LIMIT)
    eventually(lambda: f"127.0.0.1:{port}" in waiting_for(run_dir), run)
    serve(start, port)
    output = run.communicate(timeout=LIMIT)[0]
    assert run.returncode == 0, output
    check_components(run_dir)
    check_rollouts(run_dir)
    check_rows_are_shared(run_dir)


def check_components(run_dir: Path) -> None:
    """Every env has fed its own components, and no other, over the run."""
    fed: dict[str, set[str]] = defaultdict(set)
    for line in map(json.loads, (run_dir / "trainer.jsonl").read_text().splitlines()):
        for component in ("rl", "ce", "ref_kl", "ppo_clip"):
            for name in TRAINS:
                if line["metrics"].get(f"tokens/{component}/{name}"):
                    fed[name].add(component)
            if line["metrics"].get("tokens/ppo_clip"):
                assert {"loss/ppo_clip", "ppo_clip/is_masked"} <= line["metrics"].keys()
    assert fed == TRAINS


def check_rollouts(run_dir: Path) -> None:
    """Who sampled what, and how many samples a rollout has."""
    for path in sorted((run_dir / "rollouts").iterdir()):
        for rollout in read_rollouts(path)[1]:
            assert rollout.source == ("frozen" if rollout.env == "reverse-relay" else "policy")
            assert (rollout.advantages is None) == (
                rollout.env in ("reverse-text", "reverse-relay")
            )
            if rollout.env != "reverse-relay":
                assert len(rollout.samples) == 1


def check_rows_are_shared(run_dir: Path) -> None:
    """Some packed row holds tokens of several envs."""
    envs: dict[tuple[int, int], set[str]] = defaultdict(set)
    for path in (run_dir / "token_exports").rglob("rank_0.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            envs[line["step"], line["micro_step"]].add(line["env_name"])
    assert max(map(len, envs.values())) >= 3
