"""One orchestrator with ten thousand rollouts in flight, whose lengths have a heavy tail.

    python -m bench many [--inflight 10240] [--workers 0 2]

The real orchestrator's process runs three batches against a stub engine: another process, which
answers each request with random tokens after the time that their number takes. Lengths are
log-normal (median 64 tokens, sigma 1.2, at most 2,048; 10 ms each): the mean is twice the median,
one in a hundred is 16 times as long. The trainer is this module: it takes every batch and announces
the next version at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from bench.env_workers import TASKSETS
from prime_rl.rundir.directory import make_run_dir
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.processes import raise_file_limit
from prime_rl_app.config import load_config

STEPS = 3
MEDIAN = 64
SIGMA = 1.2
LONGEST = 2048
TOKEN_SECONDS = 0.01
END = 2
FIRST = 12
LAST = 268
A_TO_H = 76, 84
"""Token ids of the letters. The reward is the share of the letter e."""
GIB = 2.0**30
CONFIG = """
max_steps = {steps}
seq_len = 4096
[model]
name = "bench"
[orchestrator]
batch_size = {batch}
group_size = 8
max_off_policy_steps = 8
max_inflight_rollouts = {inflight}
env_workers = {workers}
save_rollouts = false
[orchestrator.train.sampling]
max_completion_tokens = {longest}
[[orchestrator.train.env]]
id = "busy_scoring"
[orchestrator.renderer]
name = "qwen3"
[rollout_transport]
type = "filesystem"
"""


def length(seed: int) -> int:
    """Tokens of one reply."""
    return min(LONGEST, 1 + int(MEDIAN * math.exp(random.Random(seed).gauss(0.0, SIGMA))))


def engine(
    ready: Connection, seconds: float | None = None, tail: tuple[float, float] = (0.0, 0.0)
) -> None:
    """Every route that the orchestrator asks. Sends the port to ``ready``. ``seconds``: what each
    reply takes, of seven tokens, whose rewards differ. ``tail``: a share of the replies, and what
    these take."""
    from aiohttp import web

    raise_file_limit()
    version = 0

    async def generate(request: web.Request) -> web.Response:
        seed = (await request.json())["sampling_params"]["seed"]
        number = length(seed) if seconds is None else 7
        share, longer = tail
        is_late = random.Random(seed + 1).random() < share
        usual = number * TOKEN_SECONDS if seconds is None else seconds
        await asyncio.sleep(longer if is_late else usual)
        rng = random.Random(seed)
        letters = (FIRST, LAST) if seconds is None else A_TO_H
        tokens = [*(rng.randrange(*letters) for _ in range(number - 1)), END]
        entries = [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "stop"}
        choice |= {"logprobs": {"content": entries}}
        choice |= {"weight_versions": [{"version": version, "start": 0, "end": number}]}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 4096}]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": version})

    async def update(request: web.Request) -> web.Response:
        nonlocal version
        version = (await request.json())["version"]
        return web.json_response({"version": version})

    async def done(request: web.Request) -> web.Response:
        return web.json_response({})

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_post("/update_weights", update)
        for route in ("/pause", "/resume"):
            app.router.add_post(route, done)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def train(run_dir: Path, step: int, orchestrator: Any, seconds: float = 0.0) -> None:
    """Take one batch, train for ``seconds`` and announce the version."""
    path = run_dir / "rollouts_wire" / f"step_{step}"
    while not path.exists():
        assert orchestrator.poll() is None, (run_dir / "log").read_text("utf-8")[-3000:]
        time.sleep(0.01)
    shutil.rmtree(path)
    time.sleep(seconds)
    with (run_dir / "trainer.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": step, "time": 0.0, "metrics": {}}) + "\n")
    version = run_dir / "broadcasts" / f"step_{step}"
    version.mkdir()
    (version / "STABLE").touch()


class Watch:
    """The most of each figure that was seen."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._status = run_dir / "status" / "orchestrator.json"
        self._process = psutil.Process(pid)
        self.inflight = self.memory = self.workers = 0.0

    async def run(self) -> None:
        while True:
            with suppress(OSError, ValueError, psutil.Error):
                detail = json.loads(self._status.read_text("utf-8"))["detail"]
                self.inflight = max(self.inflight, float(detail.get("inflight", 0)))
                self.memory = max(self.memory, self._process.memory_info().rss / GIB)
                others = [p.memory_info().rss for p in self._process.children(recursive=True)]
                self.workers = max(self.workers, max(others, default=0) / GIB)
            await asyncio.sleep(0.25)


@contextmanager
def orchestrating(url: str, folder: Path, **values: int) -> Iterator[tuple[Path, Any]]:
    """The run directory and the process of an orchestrator with ``CONFIG``. Ends with the run."""
    from prime_rl_environments.tiny.tokenizer import build_tokenizer

    folder.mkdir()
    build_tokenizer().save_pretrained(folder / "model")
    (folder / "run.toml").write_text(CONFIG.format(**values, longest=LONGEST), "utf-8")
    overrides = ["--output_dir", str(folder), "--inference.base_url", f'["{url}"]']
    run_dir = make_run_dir(load_config([folder / "run.toml"], overrides))
    Launch(
        model_path=str(folder / "model"),
        served_model_name="policy",
        engine_urls=[url],
        transport_type="filesystem",
        transport_host="",
        transport_ports=[],
    ).write(run_dir)
    command = [sys.executable, "-m", "prime_rl.orchestrator", str(run_dir)]
    env = os.environ | {"PRIME_RL_ADMIN_KEY": "key"}
    with (run_dir / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        yield run_dir, process
        assert process.wait() == 0, (run_dir / "log").read_text("utf-8")[-3000:]
    finally:
        process.kill()


async def measure(url: str, folder: Path, workers: int, inflight: int) -> dict[str, float]:
    """One run."""
    values = {"steps": STEPS, "batch": inflight // 2, "inflight": inflight, "workers": workers}
    with orchestrating(url, folder, **values) as (run_dir, process):
        watch = Watch(run_dir, process.pid)
        watching = asyncio.create_task(watch.run())
        await asyncio.to_thread(train, run_dir, 1, process)
        watched = psutil.Process(process.pid)
        began = time.monotonic()
        before = sum(watched.cpu_times()[:2])
        for step in range(2, STEPS):
            await asyncio.to_thread(train, run_dir, step, process)
        seconds = time.monotonic() - began
        used = sum(watched.cpu_times()[:2]) - before
        await asyncio.to_thread(train, run_dir, STEPS, process)
        watching.cancel()
    rollouts = (STEPS - 2) * (inflight // 2)
    return {
        "workers": workers,
        "inflight": watch.inflight,
        "rollouts_per_second": rollouts / seconds,
        "cpu_ms_per_rollout": used / rollouts * 1e3,
        "orchestrator_gib": watch.memory,
        "largest_worker_gib": watch.workers,
    }


@contextmanager
def serving(seconds: float | None = None, tail: tuple[float, float] = (0.0, 0.0)) -> Iterator[str]:
    """The URL of the stub engine."""
    raise_file_limit()
    os.environ["PYTHONPATH"] = str(TASKSETS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine, args=(there, seconds, tail), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inflight", type=int, default=10240)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    asked = parser.parse_args()
    with serving() as url, tempfile.TemporaryDirectory() as folder:
        for workers in asked.workers:
            place = Path(folder) / f"workers_{workers}"
            figures = asyncio.run(measure(url, place, workers=workers, inflight=asked.inflight))
            print(json.dumps({key: round(value, 3) for key, value in figures.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
