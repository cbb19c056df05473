"""Metrics from the engines' pages, worked out manually."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleets import Engine, fleet_of
from waiting import Clock, until

from prime_rl.inference import engine as engine_module
from prime_rl.inference import fleet as fleet_module
from prime_rl.inference import pool as pool_module
from prime_rl.inference.engine import EngineState
from prime_rl_engine_kit import metrics as metrics_module
from prime_rl_engine_kit.metrics import EngineMetrics, EngineMetricsConfig, parse

PAGE = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="a b"}} {running}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16"}} 1
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="m",engine="0"}} {tokens}
vllm:generation_tokens_total{{model_name="m",engine="1"}} 1
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="1"}} 3
vllm:time_to_first_token_seconds_sum{{engine="0"}} {seconds}
vllm:time_to_first_token_seconds_count{{engine="0"}} {number}
# TYPE vllm:time_to_first_token_seconds_created gauge
vllm:time_to_first_token_seconds_created{{engine="0"}} 1.7e9
"""


def page(running, tokens, seconds=0, number=0):
    return PAGE.format(running=running, tokens=tokens, seconds=seconds, number=number)


def watch_of(request=None, **settings):
    engine = SimpleNamespace(state=EngineState.SERVING, client=SimpleNamespace(request=request))
    fleet = SimpleNamespace(engines=[engine])
    shared = SimpleNamespace(engines=SimpleNamespace(fleet=fleet))
    return EngineMetrics(EngineMetricsConfig(**settings), SimpleNamespace(shared=shared))


def test_a_page_is_read_by_its_types():
    found = parse(page(3.0, 10))
    assert found.gauges == {"num_requests_running": 3.0}
    assert found.counters == {"generation_tokens": 11.0}


def test_gauges_over_engines_and_rates_between_steps():
    watch = watch_of()
    watch.note(10.0, [page(2, 100), page(4, 50)])
    first = watch.of_pages()
    assert first == {
        "inference/num_requests_running/mean": 3.0,
        "inference/num_requests_running/median": 3.0,
        "inference/num_requests_running/min": 2.0,
        "inference/num_requests_running/max": 4.0,
        "inference/num_requests_running/sum": 6.0,
    }
    watch.note(15.0, [page(0, 120), page(0, 90)])
    assert watch.of_pages()["inference/generation_tokens:rate"] == pytest.approx(60 / 5)
    assert "inference/generation_tokens:rate" not in watch.of_pages()  # no look since


def test_a_histogram_gives_the_mean_of_observations_since_the_previous_step():
    watch = watch_of()
    watch.note(10.0, [page(0, 0, seconds=7, number=5), page(0, 0, seconds=1, number=1)])
    assert not [name for name in watch.of_pages() if "time_to_first_token" in name]
    watch.note(15.0, [page(0, 0, seconds=9, number=6), page(0, 0, seconds=2, number=3)])
    found = {name: v for name, v in watch.of_pages().items() if "time_to_first_token" in name}
    assert found == {"inference/time_to_first_token_seconds:mean": 1.0}  # 3 seconds in 3
    watch.note(20.0, [page(0, 0, seconds=9, number=6), page(0, 0, seconds=2, number=3)])
    assert not [name for name in watch.of_pages() if "time_to_first_token" in name]  # no requests


def test_a_restarted_engine_has_no_negative_rate():
    watch = watch_of()
    watch.note(0.0, [page(0, 1000)])
    watch.note(5.0, [page(0, 0)])
    assert watch.of_pages()["inference/generation_tokens:rate"] == 0.0


async def test_a_malformed_page_is_logged_once_and_polling_continues(caplog):
    looks = []

    async def broken(method, route, timeout):
        looks.append(route)
        return SimpleNamespace(text="# TYPE x gauge\nx one")

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(watch_of(broken, interval=0.001).run())
        while len(looks) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
    assert set(looks) == {"/metrics"}
    assert len([r for r in caplog.records if "engine metrics cannot be read" in r.message]) == 1


async def test_each_engine_has_metrics_of_its_own_since_the_last_call(monkeypatch):
    clock, engines = Clock(), (Engine(), Engine())
    for module in (fleet_module, pool_module, engine_module, metrics_module):
        monkeypatch.setattr(module, "time", clock)
    async with fleet_of(*engines) as fleet:
        shared = SimpleNamespace(engines=SimpleNamespace(fleet=fleet))
        watch = EngineMetrics(EngineMetricsConfig(), SimpleNamespace(shared=shared))
        for key in ("a", "a", "b"):
            await fleet.ask(key, lambda e: asyncio.sleep(0))
        await fleet.update_weights(Path("v4"), 4)
        engines[1].away = True
        await until(lambda: not fleet.engines[1].serving)
        clock.now += 7
        assert watch.take_metrics() == {
            "inference/replicas_serving": 1.0,
            "inference/0/requests": 2.0,
            "inference/0/retried": 0.0,
            "inference/0/running": 0.0,
            "inference/0/serving": 1.0,
            "inference/0/version": 4.0,
            "inference/0/down_seconds": 0.0,
            "inference/1/requests": 1.0,
            "inference/1/retried": 0.0,
            "inference/1/running": 0.0,
            "inference/1/serving": 0.0,
            "inference/1/version": 4.0,
            "inference/1/down_seconds": 7.0,
        }
        assert watch.take_metrics()["inference/0/requests"] == 0.0
