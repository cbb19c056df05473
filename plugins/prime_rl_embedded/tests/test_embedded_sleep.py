"""Sleep: weights and KV come back, and no request or update is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl_embedded.model import load_model
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.sleep import Offloaded
from prime_rl_embedded.testing import Served
from prime_rl_embedded.weights import apply_weights, read_weights

PROMPT = [11, 22, 33, 44]


def bytes_held(scheduler: Scheduler) -> int:
    tensors = [*scheduler.model.module.state_dict().values(), *scheduler.cache.layers.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture
def scheduler(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """A scheduler that moves its memory as on an accelerator."""
    # Not the file's dtype: storage that is mapped from a file cannot be resized.
    model = load_model(model_folder, max_len=64, device="cpu", dtype="float16")
    built = Scheduler(model, num_slots=4, max_model_len=64)
    monkeypatch.setattr(model, "device", torch.device("meta"))  # any device but a CPU
    return built


def run(scheduler: Scheduler, steps: int) -> None:
    """Some steps, on the device that the tensors are on."""
    device, scheduler.model.device = scheduler.model.device, torch.device("cpu")
    with torch.inference_mode():
        for _ in range(steps):
            scheduler.step()
    scheduler.model.device = device


def asked(scheduler: Scheduler, tokens: int = 12, seed: int = 0) -> Request:
    request = Request(list(PROMPT), SamplingParams(max_tokens=tokens, seed=seed))
    scheduler.add(request)
    return request


def test_sleep_empties_weights_and_cache_and_a_request_continues_unchanged(
    scheduler: Scheduler,
) -> None:
    whole = asked(scheduler)
    run(scheduler, 12)
    request = asked(scheduler)
    run(scheduler, 5)
    held = bytes_held(scheduler)
    scheduler.sleep()
    assert scheduler.asleep and bytes_held(scheduler) == 0
    scheduler.sleep()
    scheduler.wake()
    assert not scheduler.asleep and bytes_held(scheduler) == held
    run(scheduler, 7)
    assert request.token_ids == whole.token_ids and request.finish_reason == "length"
    assert request.logprobs == whole.logprobs


def test_fused_projections_and_parameters_still_share_storage_after_waking(
    scheduler: Scheduler, model_folder: Path
) -> None:
    """A weight update writes to the parameters, and the forward reads the fused storage."""
    forward, module = scheduler.model.forward, scheduler.model.module
    layer, attention = forward.layers[0], module.model.layers[0].self_attn  # type: ignore[attr-defined]
    before = attention.k_proj.weight.clone()
    scheduler.sleep()
    scheduler.wake()
    rows = len(attention.q_proj.weight)
    assert torch.equal(attention.k_proj.weight, before)
    attention.k_proj.weight.data.fill_(7.0)
    assert (layer.qkv.weight[rows : rows + len(before)] == 7.0).all()
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_an_idle_engine_forgets_its_cache_and_wakes_to_zeros(scheduler: Scheduler) -> None:
    run(scheduler, 0)
    scheduler.cache.layers[0].fill_(3.0)
    scheduler.sleep()
    scheduler.wake()
    assert all((layer == 0).all() for layer in scheduler.cache.layers.values())


def test_weights_that_arrive_during_sleep_are_applied_on_waking(
    scheduler: Scheduler, model_folder: Path
) -> None:
    module = scheduler.model.module
    weights = read_weights(model_folder, module)
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    scheduler.sleep()
    scheduler.swap_weights(lambda: apply_weights(weights, module), 4)
    scheduler.swap_weights(lambda: apply_weights(doubled, module), 5)
    assert scheduler.version == 5
    scheduler.wake()
    found = module.state_dict()
    assert all(torch.equal(found[name], tensor.half()) for name, tensor in doubled.items())


def test_a_request_aborted_during_sleep_is_removed_after_waking(scheduler: Scheduler) -> None:
    """During sleep, no other row can be copied into its place."""
    leaver, stayer = asked(scheduler, 12, 1), asked(scheduler, 12, 2)
    run(scheduler, 3)
    scheduler.sleep()
    scheduler.abort(leaver)
    assert leaver in scheduler.active
    scheduler.wake()
    assert scheduler.active == [stayer] and scheduler.stats.finished["abort"] == 1
    run(scheduler, 10)  # it copied its KV and joined one step later
    assert stayer.finish_reason == "length"


def test_tensors_that_share_a_storage_move_once() -> None:
    base = torch.arange(6.0)
    parts = [base[:3], base[3:], base]
    offloaded = Offloaded()
    offloaded.offload(parts)
    assert base.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and parts[1].tolist() == [3.0, 4.0, 5.0]


def test_the_next_sleep_uses_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(4.0), torch.arange(4.0) + 10, torch.arange(6.0)]
    offloaded, made = Offloaded(), []
    empty = torch.empty

    def counted(*sizes: Any, **settings: Any) -> torch.Tensor:
        made.append(sizes) if sizes != (0,) else None
        return empty(*sizes, **settings)

    monkeypatch.setattr(torch, "empty", counted)
    for step in range(3):
        offloaded.offload(tensors)
        offloaded.restore()
        assert tensors[0].tolist() == [step, 1.0, 2.0, 3.0]
        assert tensors[1].tolist() == [10.0, 11.0, 12.0, 13.0]
        tensors[0][0] += 1  # new weights, between two sleeps
    assert made == [(16,), (16,), (24,)]


def test_the_routes_sleep_wake_and_stay_paused_until_resume(server: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, PROMPT, max_tokens=400, seed=1)
        server.wait_for("vllm:num_requests_running", 1)
        assert server.post("/sleep", admin=True).json() == {"status": "asleep"}
        assert server.metric("prime_rl:asleep") == 1 and server.metric("prime_rl:paused") == 1
        refused = server.post("/resume", admin=True)
        assert refused.status_code == 409 and "POST /wake_up" in refused.json()["error"]["message"]
        assert server.post("/wake_up", admin=True).json() == {"status": "awake"}
        assert server.metric("prime_rl:asleep") == 0 and server.metric("prime_rl:paused") == 1
        assert not running.done()
        assert server.post("/resume", admin=True).status_code == 200
        assert len(running.result()["choices"][0]["token_ids"]) == 400


def test_only_sleep_level_1_is_supported(server: Served) -> None:
    refused = server.post("/sleep?level=2", admin=True)
    assert refused.status_code == 400 and "level" in refused.json()["error"]["message"]
    assert server.metric("prime_rl:asleep") == 0
