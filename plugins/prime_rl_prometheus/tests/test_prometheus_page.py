"""The page, scraped over HTTP and parsed by prometheus_client."""

import json
import math
import socket
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from waiting import LIMIT

from prime_rl import ConfigError
from prime_rl_prometheus import PrometheusConfig, PrometheusMonitor, register_observers
from prime_rl_prometheus.names import mangle

TRAINED = {
    "loss/mean": 0.25, "perf/throughput": 1200.0, "optim/grad_norm": 0.5, "optim/lr": 1e-6,
    "perf/peak_memory": 3.5, "perf/mfu": 41.0, "entropy/all/mean": 0.75,
    "mismatch_kl/all/mean": 1e-4, "kl_ent_ratio/mean": 2e-4, "time/trainer/step": 9.0,
}  # fmt: skip


@pytest.fixture
def monitor(tmp_path):
    monitor = PrometheusMonitor(PrometheusConfig(port=0), tmp_path)
    yield monitor
    monitor.close()


def get(monitor, path="/metrics", **headers):
    request = urllib.request.Request(monitor.url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return answer.read().decode()


def scrape(monitor):
    families = text_string_to_metric_families(get(monitor))
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_trainer_metrics_have_the_names_of_dashboards(monitor):
    monitor.log(7, TRAINED)
    found = scrape(monitor)
    assert time.time() - found.pop("trainer_last_step_timestamp_seconds") < LIMIT
    assert {name: value for name, value in found.items() if name.startswith("trainer_")} == {
        "trainer_step": 7.0, "trainer_loss": 0.25, "trainer_throughput_tokens_per_sec": 1200.0,
        "trainer_grad_norm": 0.5, "trainer_peak_memory_gib": 3.5, "trainer_learning_rate": 1e-6,
        "trainer_mfu_percent": 41.0, "trainer_entropy": 0.75, "trainer_mismatch_kl": 1e-4,
        "trainer_kl_ent_ratio": 2e-4,
    }  # fmt: skip
    assert found["prime_rl_time_trainer_step"] == 9.0


def test_a_client_that_sends_half_a_request_is_ended(monitor, monkeypatch):
    monkeypatch.setattr(monitor._page._server.RequestHandlerClass, "timeout", 0.1)
    address = monitor._page._server.server_address[:2]
    with socket.create_connection(address, timeout=LIMIT) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nHost")
        assert client.recv(1) == b""
    monitor.log(7, TRAINED)
    assert scrape(monitor)["trainer_step"] == 7.0


def test_all_other_metrics_have_a_name_that_prometheus_allows(monitor):
    monitor.log(8, {"train/agg/all/reward/mean": 0.5, "inference/tokens:rate": 3.0})
    monitor.log(7, TRAINED)
    monitor.log(4, {"eval/my-env/pass@2": 1.0, "eval/my-env/pass^2": 0.25})
    monitor.log(4, {"eval/other/avg@1": 0.0})
    found = scrape(monitor)
    assert found["prime_rl_train_agg_all_reward_mean"] == 0.5
    assert found["prime_rl_inference_tokens_per_rate"] == 3.0
    assert (found["prime_rl_eval_my_env_pass_at_2"], found["prime_rl_eval_my_env_pass_all_2"]) == (
        1.0,
        0.25,
    )
    assert found["prime_rl_eval_other_avg_at_1"] == 0.0
    assert (found["prime_rl_step"], found["trainer_step"]) == (8.0, 7.0)
    assert "# HELP prime_rl_eval_my_env_pass_at_2 eval/my-env/pass@2\n" in get(monitor)


def test_metrics_that_a_later_batch_lacks_disappear(monitor):
    monitor.log(1, {"train/agg/all/error/TaskError": 2.0, "time/step": 1.0})
    monitor.log(2, {"time/step": math.nan})
    found = scrape(monitor)
    assert "prime_rl_train_agg_all_error_TaskError" not in found
    assert math.isnan(found["prime_rl_time_step"])


def test_openmetrics_is_served_on_request(monitor):
    monitor.log(1, {"time/step": 1.0})
    text = get(monitor, Accept="application/openmetrics-text; version=1.0.0")
    assert {family.name for family in open_metrics(text)} == {"prime_rl_step", "prime_rl_time_step"}


def test_health_has_the_step_and_unknown_paths_are_404(monitor):
    assert json.loads(get(monitor, "/health")) == {
        "status": "ok", "step": None, "seconds_since": None,
    }  # fmt: skip
    monitor.log(3, {"time/step": 1.0})
    health = json.loads(get(monitor, "/health"))
    assert health["step"] == 3 and 0 <= health["seconds_since"] < LIMIT
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(monitor, "/secrets")


def test_a_port_in_use_is_an_error_and_close_frees_the_port(tmp_path):
    first = PrometheusMonitor(PrometheusConfig(port=0), tmp_path)
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*port = 0"):
        PrometheusMonitor(PrometheusConfig(port=port), tmp_path)
    first.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_names_that_differ_in_one_symbol_stay_different():
    names = ["eval/a/pass@2", "eval/a/pass^2", "inference/a:rate", "inference/a/rate"]
    assert len({mangle(name) for name in names}) == 4
    assert mangle("train/büro env/all") == "prime_rl_train_b_ro_env_all"


def test_it_registers_the_monitor():
    assert register_observers() == [PrometheusMonitor]
