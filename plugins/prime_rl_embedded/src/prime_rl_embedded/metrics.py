"""``/metrics`` in Prometheus' text format, under vLLM's names where they exist."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from prime_rl_embedded.loop import EngineLoop

_FINISHED_LABELS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class MetricValue:
    """One value of a metric, and its type."""

    name: str
    kind: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


def collect(engine: EngineLoop) -> list[MetricValue]:
    """The current value of every metric. Counters end in ``_total`` and never decrease."""
    scheduler = engine.scheduler
    stats = scheduler.stats
    cache = scheduler.cache
    waiting = scheduler.num_waiting
    # The engine's thread changes the list meanwhile; copying it is atomic under the GIL.
    used = sum(len(r.prompt) + len(r.token_ids) for r in list(scheduler.active))
    room = scheduler.num_slots * scheduler.max_model_len
    config = {
        "block_size": str(scheduler.max_model_len),
        "num_gpu_blocks": str(scheduler.num_slots),
        "kv_cache_size_tokens": str(room),
    }
    return [
        MetricValue("vllm:num_requests_running", "gauge", len(scheduler.active)),
        MetricValue("vllm:num_requests_waiting", "gauge", waiting),
        MetricValue(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            value=waiting,
            labels={"reason": "capacity"},
        ),
        MetricValue("vllm:kv_cache_usage_perc", "gauge", used / room),
        MetricValue("vllm:cache_config_info", "gauge", value=1, labels=config),
        MetricValue("vllm:num_preemptions_total", "counter", 0),
        MetricValue("vllm:prompt_tokens_total", "counter", stats.prompt_tokens),
        MetricValue("vllm:generation_tokens_total", "counter", stats.generated_tokens),
        MetricValue("vllm:prefix_cache_queries_total", "counter", stats.prompt_tokens),
        MetricValue("vllm:prefix_cache_hits_total", "counter", stats.shared_tokens),
        *(
            MetricValue(
                "vllm:request_success_total",
                "counter",
                value=stats.finished[reason],
                labels={"finished_reason": reason},
            )
            for reason in _FINISHED_LABELS
        ),
        MetricValue("prime_rl:requests_received_total", "counter", scheduler.arrivals),
        MetricValue("prime_rl:engine_steps_total", "counter", stats.steps),
        MetricValue("prime_rl:weight_updates_total", "counter", stats.weight_updates),
        MetricValue("prime_rl:policy_version", "gauge", scheduler.version),
        MetricValue("prime_rl:paused", "gauge", int(engine.paused)),
        MetricValue("prime_rl:asleep", "gauge", int(scheduler.asleep)),
        MetricValue("prime_rl:kv_cache_allocated_tokens", "gauge", cache.slots * cache.capacity),
        MetricValue("process_cpu_seconds_total", "counter", time.process_time()),
    ]


def render(engine: EngineLoop, model_name: str) -> str:
    families: dict[str, Metric] = {}
    for sample in collect(engine):
        name = sample.name.removesuffix("_total")  # prometheus_client adds it to counters
        family = families.setdefault(name, Metric(name, "", sample.kind))
        family.add_sample(sample.name, {"model_name": model_name, **sample.labels}, sample.value)
    text: bytes = generate_latest(SimpleNamespace(collect=families.values))
    return text.decode()
