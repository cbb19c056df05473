"""From a config and machines to a plan: processes, memory, time and bytes.

Memory and time of the trainer's step are measured (``measure.py``). The formulas here are for the
engines' memory (weights, KV), host memory, and the time of sampling.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from prime_rl import ConfigError, Engine
from prime_rl.config.run import FILES, RunConfig
from prime_rl.orchestrator.admission.inflight import inflight_limit
from prime_rl.orchestrator.agents import make_algorithm, parts_of
from prime_rl.registry.manager import Hooks
from prime_rl_plan.architecture import active_share, architecture, kv_bytes, num_experts
from prime_rl_plan.devices import (
    GIB,
    HOST,
    INPUTS_ON_HOST,
    NETWORK,
    ON_HOST,
    SENT,
    SHARED,
    Machines,
)

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
BUCKET = 64 * 2**20
"""Bytes of small weights that are sent together (prime_rl_broadcast)."""
PIECE = BUCKET
"""Bytes of weights that are on a GPU to be rounded while they are sent by ``ipc``."""
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
    """The plan of a config on some machines."""

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
    concurrency: int
    """Samples of the longest kind whose KV fits into one engine."""
    update: float
    """Bytes that each engine gets with a version."""
    seconds: Mapping[str, float]
    """At least, by part. ``step``: of all; ``network``: of ``train``, if it were all; ``move``: to
    the host and back, where engines and trainer take turns."""
    facts: PlanFacts

    @property
    def ranks(self) -> int:
        return self.facts.ranks

    @property
    def measured(self) -> Mapping[str, Any]:
        return self.facts.measured

    @property
    def fits(self) -> bool:
        return self.trainer.fits and (self.engine is None or self.engine.fits)


@dataclass(frozen=True)
class PlanFacts:
    """The values that the formulas read."""

    config: RunConfig
    engine: Engine
    machines: Machines
    table: dict[str, Any]
    """The model's ``config.json``."""
    measured: dict[str, Any]
    """The answer of ``measure.py``."""
    ranks: int
    rows: int
    """Rows of a rank and step."""

    @property
    def size(self) -> int:
        """Bytes of a number in the engine."""
        return SIZES.get(self.engine.dtype or "auto", 2) if self.machines.count else 4

    @property
    def weights(self) -> float:
        """Weights of the model that an engine serves: adapters are merged into it."""
        return float(self.measured["weights"] - self.measured["trained"] * self.adapts)

    @property
    def adapts(self) -> bool:
        """Only an adapter trains."""
        return bool(self.measured["trained"] < self.measured["weights"])

    @property
    def num_updates(self) -> int:
        """Optimizer steps of a batch."""
        return self.config.trainer.minibatches * self.config.trainer.epochs

    @property
    def computed_rows(self) -> int:
        """Rows that a rank computes in a step: each epoch computes all of them."""
        return self.rows * self.config.trainer.epochs

    @property
    def computing_seconds(self) -> float:
        """Of the rows of a step, without the network; blocks whose inputs lie on the host may wait
        for these."""
        costs = self.measured["costs"]
        host = costs.get("rows_host_bytes", 0.0) / HOST
        return float(self.computed_rows * max(costs["rows_seconds"], host))

    @property
    def in_flight(self) -> int:
        """Samples that one engine runs at once, at most: as many as the run keeps in flight by
        default, as far as its slots hold them, and as may train in time."""
        orchestrator = self.config.orchestrator
        engines = max(self.config.inference.replicas, 1)
        is_elsewhere = self.config.inference.base_url is not None
        capacity = None if is_elsewhere else self.engine.capacity
        is_synchronous = orchestrator.max_off_policy_steps == 0
        limit = inflight_limit(
            orchestrator.max_inflight_rollouts,
            [capacity] * engines,
            synchronous=orchestrator.max_inflight if is_synchronous else None,
            batch_size=orchestrator.expected_rollouts,
            demands={},
        )
        number = math.ceil(min(limit.number, orchestrator.most_inflight) / engines)
        return number if capacity is None else min(number, capacity)

    @property
    def other_context(self) -> float:
        """Bytes of a GPU that the process it is shared with keeps."""
        return CONTEXT if self.config.deployment.colocated else 0.0


def estimate(
    config: RunConfig, hooks: Hooks, engine: Engine, ranks: int, places: Any, machines: Machines
) -> Plan:
    """The plan of a config whose processes are placed. Raises ``ConfigError`` for a model that is
    unknown here, or that the trainer cannot train."""
    table = architecture(config)
    config.trainer.check_layout(
        config.model.name,
        num_ranks=ranks,
        num_heads=table["num_attention_heads"],
        num_experts=num_experts(table),
    )
    orchestrator = config.orchestrator
    rows = num_rows(config, ranks)
    measured = measure(
        config, hooks, table=table, ranks=ranks, rows=min(rows, 2), machines=machines
    )
    facts = PlanFacts(
        config, engine, machines=machines, table=table, measured=measured, ranks=ranks, rows=rows
    )
    served, concurrency = engine_side(facts)
    return Plan(
        config,
        machines,
        places=places,
        trainer=trainer_side(facts),
        engine=served if config.inference.base_url is None else None,
        host=host(facts),
        tokens=orchestrator.token_batch_size or orchestrator.expected_rollouts * config.seq_len,
        rows=rows,
        concurrency=concurrency,
        update=measured["published"] * (4 if facts.adapts else SIZES[config.trainer.publish_dtype]),
        seconds=times(facts, concurrency),
        facts=facts,
    )


def num_rows(config: RunConfig, ranks: int) -> int:
    """Rows of a rank and step, all samples as long as ``seq_len``."""
    samples = math.ceil(
        config.orchestrator.expected_rollouts * config.trainer.context_parallel / ranks
    )
    return math.ceil(samples / max(config.row_tokens // config.seq_len, 1))


# -- the trainer


def measure(
    config: RunConfig,
    hooks: Hooks,
    table: Mapping[str, Any],
    ranks: int,
    rows: int,
    machines: Machines,
) -> dict[str, Any]:
    """See ``measure.py``."""
    env = config.orchestrator.train.env[0]
    algorithm = parts_of(make_algorithm(env, config.orchestrator.algo, hooks))[0].algorithm
    request = {
        "trainer": config.trainer.model_dump(mode="json"),
        "model": dict(table),
        "gpu": _on_gpu(config, machines),
        "half": _in_half(config, machines),
        "memory": machines.memory,
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


def _in_half(config: RunConfig, machines: Machines) -> bool:
    dtype = config.trainer.dtype
    return dtype == "bfloat16" or (dtype == "auto" and _on_gpu(config, machines))


def _on_gpu(config: RunConfig, machines: Machines) -> bool:
    return machines.count > 0 and config.trainer.device != "cpu"


def trainer_side(facts: PlanFacts) -> Side:
    """One rank: the largest peak, by kind, and what a GPU needs besides."""
    regions = {k: peak for k, peak in facts.measured["peaks"].items() if k != "between steps"}
    parts = dict(max(regions.values(), key=lambda peak: float(peak["total"])))
    on_gpu = _on_gpu(facts.config, facts.machines)
    total = parts.pop("total") - (parts.pop(ON_HOST, 0) if on_gpu else 0)
    if not on_gpu:
        return Side(parts, math.inf, total)
    if facts.config.weight_broadcast.type not in (FILES, "ipc"):
        parts["publish buffer"] = facts.measured["largest"] * 4.0
    parts["reserve"] = CONTEXT + FRAGMENTATION * total
    limit = facts.machines.memory - facts.other_context
    copy = copy_to_send(facts, limit - sum(parts.values()))
    if copy:
        parts["copy of the weights to send (rank 0)"] = copy
    return Side(parts, limit, sum(parts.values()))


def copy_to_send(facts: PlanFacts, free: float) -> float:
    """Bytes on a GPU for a copy of the weights, which NCCL sends while the trainer goes on; 0 if
    there is none. ``free``: what is left without it."""
    table = facts.config.weight_broadcast
    if table.type != "nccl" or facts.adapts:
        return 0.0
    size = float(facts.measured["published"] * SIZES[facts.config.trainer.publish_dtype])
    overlap = table.settings.get("overlap", "auto")
    # As the sender decides (prime_rl_broadcast.sender).
    fits = size <= free - max(2 * 2**30, 0.05 * facts.machines.memory)
    return size if overlap is True or (overlap == "auto" and fits) else 0.0


# -- the engine


def gpus_of_copy(facts: PlanFacts) -> int:
    """GPUs that share one copy of an engine's weights. Those of vLLM's ``prefill_engines`` have
    copies of their own."""
    settings = facts.engine.config.model_dump()
    return facts.engine.num_gpus // (1 + int(settings.get("prefill_engines") or 0))


def engine_side(facts: PlanFacts) -> tuple[Side, int]:
    """One GPU of an engine, and how many of the longest samples its KV holds. Keys of vLLM's names
    (``gpu_memory_utilization``) are read from any engine's table."""
    machines = facts.machines
    settings = facts.engine.config.model_dump()
    spread = gpus_of_copy(facts) if machines.count else 1
    weights = facts.weights * facts.size / spread
    longest = facts.config.inference.max_model_len or facts.config.seq_len
    sample = kv_bytes(facts.table, facts.size) * kv_copies(facts) * longest / spread
    if not machines.count:
        parts = {"weights": weights, "KV": sample * facts.in_flight}
        return Side(parts, math.inf, sum(parts.values())), facts.in_flight

    share = float(settings.get("gpu_memory_utilization") or UTILIZATION)
    limit = min(share * machines.memory, machines.memory - CONTEXT - facts.other_context)
    room = share * machines.memory - weights - ENGINE_RUNTIME
    # One sample of the longest kind has to fit, or the engine refuses to start.
    parts = {"weights": weights, "KV": max(room, sample), "runtime": ENGINE_RUNTIME}
    if facts.config.weight_broadcast.type == "ipc" and not facts.adapts:
        # Memory that both sides see, and what the engine copies from it (prime_rl_broadcast.ipc).
        size = facts.measured["largest"] * SIZES[facts.config.trainer.publish_dtype]
        parts["weights on their way"] = 2.0 * max(size, BUCKET) + PIECE
        limit = machines.memory - CONTEXT - facts.other_context
    return Side(parts, limit, sum(parts.values())), max(int(room // sample), 0)


def kv_copies(facts: PlanFacts) -> int:
    """GPUs of an engine that keep the same keys and values. Latent attention has no heads that
    tensor parallelism could divide."""
    if not facts.table.get("kv_lora_rank"):
        return 1
    return int(facts.engine.config.model_dump().get("tensor_parallel_size") or 1)


# -- host memory, time


def host(facts: PlanFacts) -> Parts:
    """Bytes on each machine, besides a process's usual one or two GiB."""
    local = math.ceil(facts.ranks / facts.config.deployment.trainer_nodes)
    # A reader of files copies what a rank keeps straight to its place, out of the page cache.
    half = _in_half(facts.config, facts.machines)
    parts = {}
    if facts.ranks == 1 and not half:
        parts["ranks read the model (float32)"] = 4.0 * facts.weights * local
    held = facts.measured["peaks"]["update"]
    moments = held.get(ON_HOST, 0)
    if moments:
        parts[ON_HOST] = float(moments * local)
    if facts.measured["inputs_on_host"] and _on_gpu(facts.config, facts.machines):
        parts[INPUTS_ON_HOST] = float(facts.measured["inputs_on_host"] * local)
    if facts.config.weight_broadcast.as_files and not facts.adapts:
        share = facts.measured["published"] / facts.config.deployment.trainer_nodes
        copies = 2.0 * share * SIZES[facts.config.trainer.publish_dtype]
        parts["weights on their way to files (two copies at most)"] = copies

    table = facts.config.weight_broadcast
    if table.type == "gloo" and not facts.adapts and table.settings.get("overlap", "auto"):
        size = facts.measured["published"] * SIZES[facts.config.trainer.publish_dtype]
        parts["copy of the weights to send (rank 0)"] = float(size)

    if facts.config.deployment.colocated:
        state = held.get("weights", 0) + held.get("optimizer", 0)
        parts["trainer's state while engines sample"] = float(state * local)
        asleep = facts.weights * facts.size * facts.config.inference.replicas
        parts["engines' weights while they sleep"] = asleep

    return parts


def times(facts: PlanFacts, concurrency: int) -> dict[str, float]:
    """Seconds by a roofline: nothing is faster. Empty without a GPU."""
    config = facts.config
    costs = facts.measured["costs"]
    if not facts.machines.count:
        return {}
    found = traffic(facts)
    shared = sum(each.seconds for each in found if each.kind == SHARED)
    sent = sum(each.seconds for each in found if each.kind == SENT)
    # Moments on the host are read and written in each optimizer step.
    moments = 2 * facts.measured["peaks"]["update"].get(ON_HOST, 0) / HOST
    train = max(facts.computing_seconds, shared) + sent
    train += facts.num_updates * (costs["update_seconds"] + moments)
    seconds = {"train": train, "sample": sampling_seconds(facts, concurrency)}
    if config.deployment.colocated:
        seconds["move"] = moving_seconds(facts)
    in_turn = config.deployment.colocated or config.orchestrator.max_off_policy_steps == 0
    step = sum(seconds.values()) if in_turn else max(seconds.values())
    network = shared + sent
    return seconds | {"step": step} | ({"network": network} if network else {})


@dataclass(frozen=True)
class Traffic:
    """What one rank exchanges with a group of ranks in a step."""

    kind: str
    """``SHARED`` or ``SENT``."""
    between_machines: bool
    bytes: float
    """That leave the rank."""
    seconds: float


TRAFFIC = re.compile(rf"(rows|update)_network/({SHARED}|{SENT})/(\d+)/(\d+)")


def traffic(facts: PlanFacts) -> list[Traffic]:
    """Of a rank and step, by kind and wire. If any group of a mesh is of several machines, every
    byte of such groups counts as one between machines: a step is as slow as the slowest."""
    sums = defaultdict[tuple[str, bool], float](float)
    on_machine = facts.ranks // facts.config.deployment.trainer_nodes
    for key, moved in facts.measured["costs"].items():
        match = TRAFFIC.fullmatch(key)
        if match is None:
            continue
        size, span = int(match[3]), int(match[4])
        # Ranks are numbered machine by machine. Those of a group have equal distances, and as many
        # groups as the distance fill a block of neighbors. A machine has whole blocks, or parts.
        distance = (span - 1) // max(size - 1, 1)
        crosses = on_machine % (distance * size or 1) > 0
        leaves = moved * (size - 1) / size
        number = facts.computed_rows if match[1] == "rows" else facts.num_updates
        sums[match[2], crosses] += leaves * number

    wires = {True: NETWORK, False: facts.machines.link or NETWORK}
    return [
        Traffic(kind, away, bytes=leaves, seconds=leaves / wires[away])
        for (kind, away), leaves in sorted(sums.items())
        if leaves
    ]


def moving_seconds(facts: PlanFacts) -> float:
    """The trainer's state to the GPU and back, and an engine's weights: both take turns."""
    held = facts.measured["peaks"]["update"]
    state = held.get("weights", 0) + held.get("optimizer", 0)
    served = facts.weights * facts.size / gpus_of_copy(facts)
    return 2 * float(state + served) / HOST


def sampling_seconds(facts: PlanFacts, concurrency: int) -> float:
    """All samples of a batch, each ``seq_len`` long: prefill by operations, decoding by the bytes
    of weights and KV that each token of a batch reads."""
    config = facts.config
    machines = facts.machines
    size = facts.size
    if config.inference.base_url is not None or not concurrency:
        return 0.0
    spread = gpus_of_copy(facts)
    most = config.orchestrator.train.sampling.max_completion_tokens or config.seq_len // 2
    completion = min(most, config.seq_len - 1)
    prompt = config.seq_len - completion
    samples = config.orchestrator.expected_rollouts / max(config.inference.replicas, 1)
    at_once = max(min(concurrency, facts.in_flight, samples), 1)
    flops = 2 * facts.weights * active_share(facts.table, facts.weights)
    peak = (machines.bfloat16 if size == 2 else machines.float32) * spread
    prompts = samples / config.orchestrator.group_size  # a group shares its prefill
    kv = kv_bytes(facts.table, size) * kv_copies(facts) * (prompt + completion / 2)
    read = (facts.weights * size + at_once * kv) / (machines.bandwidth * spread)
    token = max(read, at_once * flops / peak)
    return prompts * prompt * flops / peak + samples / at_once * completion * token


def kinds(parts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Largest first, without those under 10 MiB."""
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 10 * 2**20:
            yield name, size
