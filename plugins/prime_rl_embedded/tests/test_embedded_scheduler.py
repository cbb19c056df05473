"""The scheduler, in this process: order, slots, and failures that spare the other rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl_embedded.kv import KVCache
from prime_rl_embedded.model import ServedModel, load_model
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(model_folder, max_len=64)


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def scheduler(model: ServedModel) -> Scheduler:
    return Scheduler(model, num_slots=2, max_model_len=64)


def request(prompt: list[int], max_tokens: int = 4, **fields: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens), **fields)


def test_lower_priority_goes_first_and_equals_in_order_of_arrival(scheduler: Scheduler) -> None:
    finished: list[str] = []
    for name, priority in (("late", 1), ("first", 0), ("urgent", -1), ("second", 0)):
        scheduler.add(
            request(
                [len(name)],
                request_id=name,
                priority=priority,
                on_finish=lambda r: finished.append(r.request_id),
            )
        )
    while scheduler.has_work:
        scheduler.step()
    assert sorted(finished[:2]) == ["first", "urgent"] and sorted(finished[2:]) == [
        "late",
        "second",
    ]


def test_a_burst_of_prompts_is_admitted_within_the_prefill_budget(model: ServedModel) -> None:
    """Budget 10: prompts of 6, 4 and 5 tokens need two steps, and one of 30 goes alone."""
    scheduler = Scheduler(model, num_slots=8, max_model_len=64, max_prefill_tokens=10)
    for length in (6, 4, 5, 30):
        scheduler.add(request([length] * length, max_tokens=9))
    admitted = []
    for _ in range(3):
        scheduler.step()
        admitted.append(len(scheduler.active))
    assert admitted == [2, 3, 4]


def test_unseeded_requests_depend_on_the_servers_seed_and_the_arrival(model: ServedModel) -> None:
    def answers(seed: int) -> list[list[int]]:
        scheduler = Scheduler(model, num_slots=2, max_model_len=64, seed=seed)
        requests = [request([1, 2, 3], 20) for _ in range(3)]
        for r in requests:
            scheduler.add(r)
        while scheduler.has_work:
            scheduler.step()
        return [r.token_ids for r in requests]

    first = answers(0)
    assert first == answers(0) != answers(1)
    assert first[0] != first[1] != first[2]


def test_a_failing_prefill_fails_what_it_admitted_and_spares_running_rows(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = request([1, 2, 3], 6)
    undisturbed.params = SamplingParams(max_tokens=6, temperature=0)
    alone = Request(undisturbed.prompt, undisturbed.params)
    scheduler.add(alone)
    while scheduler.has_work:
        scheduler.step()
    scheduler.add(undisturbed)
    scheduler.step()
    failing, finished = request([9] * 50), []
    failing.on_finish = lambda r: finished.append(r.error)
    scheduler.add(failing)
    monkeypatch.setattr(scheduler.model, "forward", lambda *_: torch.zeros(1) @ torch.zeros(2))
    scheduler.step()
    monkeypatch.undo()
    while scheduler.has_work:
        scheduler.step()
    assert len(finished) == 1 and str(finished[0]).startswith("RuntimeError: ")
    assert undisturbed.token_ids == alone.token_ids and undisturbed.finish_reason == "length"


def test_a_failing_decode_fails_the_running_rows_and_the_next_request_is_served(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = request([1, 2], 30)
    scheduler.add(running)
    scheduler.step()
    monkeypatch.setattr(scheduler.model, "forward", lambda *_: 1 / 0)
    scheduler.step()
    monkeypatch.undo()
    assert (
        running.finish_reason == "error" and running.error == "ZeroDivisionError: division by zero"
    )
    assert not scheduler.has_work and scheduler.stats.finished["error"] == 1
    after = request([1, 2], 3)
    scheduler.add(after)
    while scheduler.has_work:
        scheduler.step()
    assert after.finish_reason == "length"


def test_logits_that_are_not_finite_fail_their_row_only(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, sick = request([1, 2], 5), request([3, 4, 5], 5)
    scheduler.add(healthy)
    scheduler.add(sick)
    forward = scheduler.model.forward

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        logits[1] = torch.nan
        return logits

    monkeypatch.setattr(scheduler.model, "forward", poisoned)
    scheduler.step()
    monkeypatch.undo()
    while scheduler.has_work:
        scheduler.step()
    assert healthy.finish_reason == "length"
    assert sick.finish_reason == "error"
    assert sick.error == "the model's logits are not finite at position 3 under policy version 0"


def test_a_request_that_shares_a_prompt_whose_logits_are_not_finite_fails_with_it(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise copy the cleared row."""
    twins = [request([3, 4, 5], 5), request([3, 4, 5], 5)]
    for twin in twins:
        scheduler.add(twin)
    forward = scheduler.model.forward
    monkeypatch.setattr(scheduler.model, "forward", lambda *args: forward(*args) * torch.nan)
    scheduler.step()
    assert [twin.finish_reason for twin in twins] == ["error", "error"]
    assert twins[1].error == twins[0].error and not scheduler.has_work


def test_aborted_requests_leave_the_queues_at_once(scheduler: Scheduler) -> None:
    """Of 3,000 waiting requests 2,990 are aborted: none takes memory or a step for long."""
    gone: list[Request] = []
    scored = (SamplingParams(1), SamplingParams(1, prompt_logprobs=1))
    requests = [Request([1, i % 250], scored[i % 2], on_finish=gone.append) for i in range(3000)]
    for request in requests:
        scheduler.add(request)
    for request in requests[:-10]:
        scheduler.abort(request)
        assert gone[-1] is request
        assert len(scheduler.waiting) + len(scheduler.unscored) <= 2 * scheduler.num_waiting
    scheduler.abort(requests[0])  # no effect
    assert scheduler.num_waiting == 10 and scheduler.stats.finished == {"abort": 2990}
    while scheduler.has_work:
        scheduler.step()
    assert scheduler.num_waiting == 0 and scheduler.stats.ended == len(gone) == 3000
    assert {request.finish_reason for request in requests[-10:]} == {"length"}


def test_an_abort_closes_the_gap_with_the_last_row(scheduler: Scheduler) -> None:
    first, last = request([1, 2, 3], 20), Request([4, 5], SamplingParams(20, temperature=0))
    alone = Request([4, 5], last.params)
    for r in (alone, first, last):
        scheduler.add(r)
        if r is alone:
            while scheduler.has_work:
                scheduler.step()
    for _ in range(5):
        scheduler.step()
    scheduler.abort(first)
    assert scheduler.active == [last] and first.finish_reason == "abort"
    while scheduler.has_work:
        scheduler.step()
    assert last.token_ids == alone.token_ids
    scheduler.abort(last)
    assert last.finish_reason == "length"


def test_kv_computed_under_old_weights_is_not_shared(scheduler: Scheduler) -> None:
    scheduler.add(request([1, 2, 3, 4], 20))
    scheduler.step()
    scheduler.swap_weights(lambda: None, version=1)
    later = request([1, 2, 3, 4], 20)
    scheduler.add(later)
    scheduler.step()
    assert later.cached_tokens == 0
    scheduler.abort(later)
    scheduler.abort(scheduler.active[0])


def test_the_cache_grows_by_doubling_and_keeps_what_it_holds() -> None:
    cache = KVCache({0: (2, 4)}, max_slots=20, max_len=300)
    assert (cache.slots, cache.capacity) == (8, 128)
    keys = torch.arange(16.0).view(2, 2, 4)
    cache.write(0, torch.tensor([0, 7]), torch.tensor([127, 5]), keys, -keys)
    cache.reserve(9, 129)
    assert (cache.slots, cache.capacity) == (16, 256)
    cache.reserve(17, 257)
    assert (cache.slots, cache.capacity) == (20, 300)
    assert torch.equal(cache.layers[0][0, 0, :, 127], keys[0])
    assert torch.equal(cache.layers[0][1, 7, :, 5], -keys[1])
    cache.copy_row(7, 3, 6)
    assert torch.equal(cache.layers[0][0, 3, :, 5], keys[1])
    assert cache.layers[0].count_nonzero() == 15 + 15 + 16  # keys[0] contains one zero
    cache.clear_row(7)
    assert cache.layers[0][:, 7].count_nonzero() == 0


def test_numbers_of_a_step_reach_a_gpu_without_a_wait(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.tensor(numbers, device=...)`` would wait until the GPU has done all that is queued:
    in the middle of a step, the whole model. ``to_device`` queues the copy."""
    make = torch.tensor

    def on_host(*values: Any, **options: Any) -> torch.Tensor:
        assert "device" not in options, "waits for the device"
        return make(*values, **options)

    monkeypatch.setattr(torch, "tensor", on_host)
    scheduler = Scheduler(model, num_slots=4, max_model_len=64)
    many: dict[str, Any] = {"max_tokens": 20}
    for prompt, sampling in (
        ([1, 2, 3, 4], SamplingParams(**many)),
        ([1, 2, 3, 4], SamplingParams(**many)),
        ([5, 6], SamplingParams(**many, temperature=0.7, top_p=0.9)),
        ([7], SamplingParams(**many, temperature=0.0)),
        ([8, 9], SamplingParams(max_tokens=1, prompt_logprobs=1)),
    ):
        scheduler.add(Request(prompt, sampling))
    for _ in range(3):
        scheduler.step()
    assert [len(each.token_ids) for each in scheduler.active] == [3, 3, 3, 2]
    assert scheduler.stats.finished["error"] == 0
    assert scheduler.stats.finished["length"] == 1
