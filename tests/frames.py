"""The byte check: what the orchestrator's process sends to the trainer, frame by frame.

The real orchestrator process runs the shipped configs against a scripted engine. The trainer is
this module: it reads every frame and announces the next version. A change of the code that keeps
the behavior keeps every byte. After a change of behavior that is meant, run

    python tests/frames.py

and say in the commit message why the frames differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import warm  # noqa: E402 - a module beside this one
from scripted_engine import scripted_engine  # noqa: E402

from prime_rl.rundir.directory import make_run_dir  # noqa: E402
from prime_rl.rundir.launch import Launch  # noqa: E402
from prime_rl.wire.micro_batch import decode_batch  # noqa: E402
from prime_rl.wire.sealing import unsealed  # noqa: E402
from prime_rl_app.config import load_config  # noqa: E402
from prime_rl_environments.tiny.chat import build_chat_tokenizer  # noqa: E402

DIGESTS = Path(__file__).with_name("frames.json")

STEPS = 4
LIMIT_SECONDS = 600.0

CASES: dict[str, tuple[str, Sequence[str]]] = {
    "grpo": ("reverse_text/grpo.toml", ()),
    "reinforce_pp": ("reverse_text/grpo.toml", ("--orchestrator.algo.type", "reinforce_pp")),
    "echo": ("word_lookup/echo.toml", ()),
    "multi_turn": ("reverse_retry/grpo.toml", ()),
    "two_seats": ("propose_solve/hierarchical_grpo.toml", ("--orchestrator.batch_size", "40")),
    "mixed": (
        "mixed.toml",
        (
            *("--orchestrator.train.env.2.algo.teacher.base_url", '["{url}/v1"]'),
            *("--orchestrator.train.env.3.algo.sampling.source.base_url", '["{url}/v1"]'),
        ),
    ),
}
"""A shipped config each, and what is changed of it."""

SMALL = [
    *("--max_steps", str(STEPS), "--orchestrator.batch_size", "16"),
    *("--orchestrator.group_size", "4", "--orchestrator.max_off_policy_steps", "0"),
    *("--orchestrator.eval.env", "[]", "--trainer.scheduler.warmup_steps", "0"),
    *("--rollout_transport.type", "filesystem", "--run.name", "frames"),
]


def frames_of(case: str, folder: Path, more: Sequence[str] = ()) -> list[str]:
    """The digest of every frame that the orchestrator sends under one of ``CASES``, with ``more``
    overrides. The run stays in ``folder / "frames"``."""
    file, changes = CASES[case]
    tokenizer = build_chat_tokenizer()
    model = folder / "model"
    tokenizer.save_pretrained(model)
    with scripted_engine(tokenizer, "policy", "teacher") as engine:
        overrides = [*SMALL, *more, *(each.replace("{url}", engine.url) for each in changes)]
        overrides += ["--output_dir", str(folder), "--inference.base_url", f'["{engine.url}"]']
        run_dir = make_run_dir(load_config([ROOT / "configs" / file], overrides))
        Launch(
            model_path=str(model),
            served_model_name="policy",
            engine_urls=[engine.url],
            transport_type="filesystem",
            transport_host="",
            transport_ports=[],
        ).write(run_dir)
        return _digests(run_dir)


def _digests(run_dir: Path) -> list[str]:
    log = run_dir / "orchestrator.log"
    command = [sys.executable, "-m", "prime_rl.orchestrator", str(run_dir)]
    env = os.environ | {"PRIME_RL_ADMIN_KEY": "key"}
    with log.open("w") as output:
        process = warm.Popen(command, stdout=output, stderr=output, env=env)
        try:
            frames = [_receive(run_dir, step, process, log) for step in range(1, STEPS + 1)]
            code = process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert code == 0, log.read_text()
    return [hashlib.sha256(frame).hexdigest() for frame in frames]


def _receive(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> bytes:
    """Take the batch of one step, and announce the version that it makes."""
    path, deadline = run_dir / "rollouts_wire" / f"step_{step}", time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    frame = bytes(unsealed((path / "rank_0.bin").read_bytes()))
    assert decode_batch(frame)[0] == step
    (path / "rank_0.bin").unlink()
    path.rmdir()
    with (run_dir / "trainer.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "time": 0.0, "metrics": {}}) + "\n")
    version = run_dir / "broadcasts" / f"step_{step}"
    version.mkdir()
    (version / "STABLE").touch()
    return frame


def main() -> None:
    """Write the digests of every case."""
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = frames_of(case, Path(folder))
    DIGESTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
