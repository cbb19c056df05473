"""From a config and machines to a plan: processes, memory, time and bytes.

Memory and time of the trainer's step are measured (``measure.py``). What stands here as a formula is
the engines' memory (weights, KV), host memory, and the time of sampling.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prime_rl import ConfigError, Engine
from prime_rl.config.run import RunConfig
from prime_rl.plugins.manager import Hooks
from prime_rl.plugins.offers import ALGORITHM, make
from prime_rl.run.gpus import num_engines
from prime_rl_plan.architecture import active_share, architecture, kv_bytes
from prime_rl_plan.devices import GIB, NETWORK, Machines

CONTEXT = 1.0 * GIB
"""Memory of a GPU that each of its processes holds besides tensors: CUDA's context, NCCL's buffers,
cuBLAS's workspaces."""
FRAGMENTATION = 0.05
"""Share of the trainer's memory that torch's allocator cannot use."""
ENGINE_RUNTIME = 2.0 * GIB
"""Memory of an engine's GPU for the activations of a prefill and for CUDA graphs."""
UTILIZATION = 0.9
"""vLLM's default share of a GPU."""
LAYERS = (3, 5)
"""Numbers of layers that are measured; the rest is extrapolated."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}

Parts = dict[str, float]
"""Bytes by kind."""


@dataclass(frozen=True)
class Side:
    """The memory of one process on its GPU."""

    parts: Parts
    limit: float
    """Bytes that it may use."""
    total: float
    """Bytes that it uses, with what is reserved."""

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(frozen=True)
class Plan:
    """What a config comes to on some machines."""

    config: RunConfig
    machines: Machines
    places: list[tuple[str, str]]
    """Process and place."""
    trainer: Side
    engine: Side | None
    """None: the run starts none."""
    host: Parts
    """Bytes on each machine."""
    tokens: int
    """Most tokens of a step."""
    rows: int
    """Rows of a rank and step."""
    ranks: int
    concurrency: int
    """Samples of the longest kind whose KV fits into one engine."""
    update: float
    """Bytes that each engine gets with a version."""
    seconds: Mapping[str, float]
    measured: Mapping[str, Any]
    architecture: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.trainer.fits and (self.engine is None or self.engine.fits)


def estimate(
    config: RunConfig, hooks: Hooks, engine: Engine, ranks: int, places: Any, machines: Machines
) -> Plan:
    """The plan of a config whose processes are placed. Raises ``ConfigError`` for a model that is
    unknown here, or that the trainer cannot train."""
    table = architecture(config)
    gpu = machines.count > 0 and config.trainer.device != "cpu"
    samples = math.ceil(config.orchestrator.batch_size / ranks)
    per_row = max(config.row_tokens // config.seq_len, 1)
    rows = math.ceil(samples / per_row)
    measured = measure(config, hooks, table, ranks, min(rows, 2), gpu, machines)
    trainer = trainer_side(config, measured, machines, gpu)
    size = SIZES.get(engine.dtype or "auto", 2) if machines.count else 4
    served, concurrency = engine_side(config, engine, table, measured, size, machines)
    starts = num_engines(config)
    parts = measured["published"] * _published_size(config, measured)
    seconds = times(config, measured, machines, rows, ranks, size, table, concurrency, engine)
    return Plan(
        *(config, machines, places, trainer, served if starts else None),
        host=host(config, measured, machines, ranks, size, engine),
        tokens=config.orchestrator.batch_size * config.seq_len,
        rows=rows,
        ranks=ranks,
        concurrency=concurrency,
        update=parts,
        seconds=seconds,
        measured=measured,
        architecture=table,
    )


def _published_size(config: RunConfig, measured: Mapping[str, Any]) -> int:
    adapter = measured["trained"] < measured["weights"]
    return 4 if adapter else SIZES[str(getattr(config.trainer, "publish_dtype", "float32"))]


# -- the trainer


def measure(
    config: RunConfig,
    hooks: Hooks,
    table: Mapping[str, Any],
    ranks: int,
    rows: int,
    gpu: bool,
    machines: Machines,
) -> dict[str, Any]:
    """See ``measure.py``."""
    env = config.orchestrator.train.env[0]
    algo = env.algo or config.orchestrator.algo
    algorithm = make(ALGORITHM, algo.type, algo.settings, hooks, f"env {env.label!r}: algo")
    dtype = config.trainer.dtype
    request = {
        "trainer": config.trainer.model_dump(mode="json"),
        "model": dict(table),
        "gpu": gpu,
        "half": dtype == "bfloat16" or (dtype == "auto" and gpu),
        "ranks": ranks,
        "rows": rows,
        "row_tokens": config.row_tokens,
        "seq_len": min(config.seq_len, config.row_tokens),
        "component": algorithm.action_loss,
        "layers": LAYERS,
        "roofline": {
            "bfloat16": machines.bfloat16 or math.inf,
            "float32": machines.float32 or math.inf,
            "bytes": machines.bandwidth or math.inf,
        },
    }
    return _ask(json.dumps(request, sort_keys=True))


@cache
def _ask(request: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "prime_rl_plan.measure"]
    done = subprocess.run(command, input=request, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"the trainer cannot take a step with this config: {said[0]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def trainer_side(
    config: RunConfig, measured: Mapping[str, Any], machines: Machines, gpu: bool
) -> Side:
    """One rank: the largest peak, by kind, and what a GPU needs besides."""
    peaks = {k: v for k, v in measured["peaks"].items() if k != "between steps"}
    parts = dict(max(peaks.values(), key=lambda peak: peak["total"]))
    total = parts.pop("total")
    if not gpu:
        return Side(parts, math.inf, total)
    if config.weight_broadcast.as_files is False:
        parts["publish buffer"] = measured["largest"] * 4.0
    parts["reserve"] = CONTEXT + FRAGMENTATION * total
    others = CONTEXT if config.deployment.colocated else 0.0
    return Side(parts, machines.memory - others, sum(parts.values()))


# -- the engine


def engine_side(
    config: RunConfig,
    engine: Engine,
    table: dict[str, Any],
    measured: Mapping[str, Any],
    size: int,
    machines: Machines,
) -> tuple[Side, int]:
    """One GPU of an engine, and how many of the longest samples its KV holds. Keys of vLLM's names
    (``gpu_memory_utilization``) are read from any engine's table."""
    settings = engine.config.model_dump()
    spread = engine.num_gpus if machines.count else 1
    weights = _model_weights(measured) * size / spread
    longest = config.inference.max_model_len or config.seq_len
    sample = kv_bytes(table, size) * longest / spread
    wanted = _concurrent(config)
    if not machines.count:
        return Side({"weights": weights, "KV": sample * wanted}, math.inf, weights), wanted
    share = float(settings.get("gpu_memory_utilization") or UTILIZATION)
    room = share * machines.memory - weights - ENGINE_RUNTIME
    parts = {"weights": weights, "KV": max(room, sample), "runtime": ENGINE_RUNTIME}
    # One sample of the longest kind has to fit, or the engine refuses to start.
    others = CONTEXT if config.deployment.colocated else 0.0
    side = Side(parts, share * machines.memory, sum(parts.values()))
    if side.fits and share * machines.memory + others + CONTEXT > machines.memory:
        side = Side(parts | {"contexts": others + CONTEXT}, machines.memory, math.inf)
    return side, max(int(room // sample), 0)


def _model_weights(measured: Mapping[str, Any]) -> float:
    """Of the model that an engine serves: adapters are merged into it."""
    adapter = measured["trained"] < measured["weights"]
    return float(measured["weights"] - measured["trained"] * adapter)


def _concurrent(config: RunConfig) -> int:
    """Samples that one engine has in flight."""
    return math.ceil(config.orchestrator.max_inflight / max(config.inference.replicas, 1))


# -- host memory, time


def host(
    config: RunConfig,
    measured: Mapping[str, Any],
    machines: Machines,
    ranks: int,
    size: int,
    engine: Engine,
) -> Parts:
    """Bytes on each machine, besides a process's usual one or two GiB."""
    local = math.ceil(ranks / config.deployment.trainer_nodes)
    parts = {"ranks read the model (float32)": 4.0 * _model_weights(measured) * local}
    if config.deployment.colocated:
        held = measured["peaks"]["update"]
        state = held.get("weights", 0) + held.get("optimizer", 0)
        parts["trainer's state while engines sample"] = float(state * local)
        asleep = _model_weights(measured) * size * config.inference.replicas
        parts["engines' weights while they sleep"] = asleep
    return parts


def times(
    config: RunConfig,
    measured: Mapping[str, Any],
    machines: Machines,
    rows: int,
    ranks: int,
    size: int,
    table: dict[str, Any],
    concurrency: int,
    engine: Engine,
) -> dict[str, float]:
    """Seconds by a roofline: nothing is faster. Empty without a GPU."""
    if not machines.count:
        return {}
    costs = measured["costs"]
    wire = machines.link if config.deployment.trainer_nodes == 1 else NETWORK
    share = (ranks - 1) / ranks
    network = costs.get("rows_network_bytes", 0.0) * share / wire
    train = rows * max(costs["rows_seconds"], network) + costs["update_seconds"]
    sample = sampling_seconds(config, measured, machines, size, table, concurrency, engine)
    found = {"train": train, "sample": sample}
    if network:
        found["of which network, if it is the slower"] = rows * network
    in_turn = config.deployment.colocated or config.orchestrator.max_off_policy_steps == 0
    return found | {"step": train + sample if in_turn else max(train, sample)}


def sampling_seconds(
    config: RunConfig,
    measured: Mapping[str, Any],
    machines: Machines,
    size: int,
    table: dict[str, Any],
    concurrency: int,
    engine: Engine,
) -> float:
    """All samples of a batch, each ``seq_len`` long: prefill by operations, decoding by the bytes
    of weights and KV that each token of a batch reads."""
    replicas = max(config.inference.replicas, 1)
    if config.inference.base_url is not None or not concurrency:
        return 0.0
    spread = engine.num_gpus
    most = config.orchestrator.train.sampling.max_completion_tokens or config.seq_len // 2
    completion = min(most, config.seq_len - 1)
    prompt = config.seq_len - completion
    samples = config.orchestrator.batch_size / replicas
    at_once = max(min(concurrency, _concurrent(config), samples), 1)
    weights = _model_weights(measured)
    flops = 2 * weights * active_share(table, weights)
    peak = machines.bfloat16 if size == 2 else machines.float32
    prompts = samples / config.orchestrator.group_size  # a group shares its prefill
    prefill = prompts * prompt * flops / (peak * spread)
    kv = kv_bytes(table, size) * (prompt + completion / 2)
    read = (weights * size + at_once * kv) / (machines.bandwidth * spread)
    token = max(read, at_once * flops / (peak * spread))
    return prefill + samples / at_once * completion * token


def kinds(parts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Largest first, without those under 10 MiB."""
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 10 * 2**20:
            yield name, size
